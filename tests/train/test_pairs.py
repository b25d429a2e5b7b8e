from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gristmill.train.data.conversation_tokens import Chat
from gristmill.train.data.pairs import (
    Pair,
    are_held_out,
    encode_pairs,
    gained_more,
    is_held_out,
    more_likely,
)


def example(
    prompt: str, chosen: str, rejected: str, earlier: tuple[dict[str, str], ...] = ()
) -> dict[str, Any]:
    return {
        "id": prompt,
        "prompt": [*earlier, {"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def test_only_the_final_answers_are_scored(tokenizer_folder: Path) -> None:
    chat = Chat(tokenizer_folder)
    earlier = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    )
    (pair,) = encode_pairs(
        [example("Why?", "Because.", "No.", earlier)], chat, 100
    ).used
    assert isinstance(pair, Pair)
    assert (
        chat.decode(pair.chosen.ids[pair.chosen.trained], special=True)
        == "Because.<|end|>"
    )
    assert (
        chat.decode(pair.rejected.ids[pair.rejected.trained], special=True)
        == "No.<|end|>"
    )


def test_pairs_without_room_are_dropped_and_truncated_ones_counted(
    tokenizer_folder: Path,
) -> None:
    examples = [
        example("word " * 60, "a", "b"),
        example("q", "word " * 60, "b"),
        example("<|end|>", "a", "b"),
    ]
    encoded = encode_pairs(examples, Chat(tokenizer_folder), 50)
    (pair,) = encoded.used
    assert pair.example["id"] == "q"
    assert [answer.truncated for answer in pair.conversations] == [True, False]
    assert (encoded.counts.dropped, encoded.counts.unrenderable) == (1, 1)


def test_held_out_share_depends_on_seed_and_prompt_only() -> None:
    examples = [example(f"question {n}", "a", "b") for n in range(2000)]
    held_out = are_held_out(examples, 0.1, 7).tolist()
    assert 0.07 < np.mean(held_out) < 0.13
    assert held_out == [is_held_out(pair["prompt"], 0.1, 7) for pair in examples]
    assert held_out != are_held_out(examples, 0.1, 8).tolist()


def test_gain_compares_log_ratios_and_counts_no_ties() -> None:
    reference = np.array([[-5.0, -1.0], [-5.0, -1.0], [-1.0, -5.0], [-2.0, -2.0]])
    logps = np.array([[-4.0, -1.5], [-6.0, -1.0], [-1.0, -5.0], [-2.0, -3.0]])
    assert gained_more(logps, reference).tolist() == [True, False, False, True]
    assert not gained_more(reference, reference).any()
    assert more_likely(reference) == 0.25
    assert more_likely(np.empty((0, 2))) is None


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_or_no_pairs_can_be_held_out(share: float) -> None:
    prompt = example("q", "a", "b")["prompt"]
    assert is_held_out(prompt, share, 0) is bool(share)
