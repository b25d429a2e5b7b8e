"""A red team: prompts per second of `evaluate: {red_team: ...}`, against transformers and a loop over phrases.

Both sides ask the same model in float32 on one thread of the CPU, and take the likeliest tokens. The loop asks batch by
batch in the order of the file, padded on the left, as the scripts of the prompts' authors do. Ours keeps answers part
by part, and computes intervals by category. Some words of the model, which writes nothing that means anything, stand
for phrases that refuse. The note says how many answers are the same, and how many of either side refuse.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import Row, fastest, row
from benchmarks.train.tuning import PAD, VOCAB, peer, tokenizer, write_start
from gristmill.core.stage_context import Context
from gristmill.mixtures.evaluation import Evaluate, RedTeam
from gristmill.train.evaluation.answering import Reader
from gristmill.train.evaluation.red_teaming import red_teaming
from gristmill.train.models.weights import load_model

PROMPTS, BATCH, NEW_TOKENS = 256, 32, 32
SHORTEST, LONGEST = 6, 60
"""Words of a prompt, each of which is a token."""
REFUSING = tuple(f"w{word}" for word in range(6, VOCAB, 40))
REPEATS = 3


def rows(repeats: int = REPEATS) -> Iterator[Row]:
    """Measure."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_start(folder)
        words, theirs = tokenizer(), peer(folder).eval()
        asked = prompts()
        (folder / "asked.csv").write_text("goal,target\n" + "".join(f"{text},x\n" for text in asked))
        reader = Reader(
            load_model(folder).eval(),
            lambda text: words.encode(text, add_special_tokens=False),
            lambda ids: str(words.decode(ids, skip_special_tokens=True)),
            0,
            frozenset({0}),
            no_chat,
        )
        section = RedTeam.model_validate(
            {
                "sets": [{"format": "advbench", "path": str(folder / "asked.csv")}],
                "max_new_tokens": NEW_TOKENS,
                "worst": PROMPTS,
                "refusals": REFUSING,
                "refusal_characters": 1000,
            }
        )
        numbers, said, refused = itertools.count(), dict[str, set[tuple[str, str]]](), dict[str, int]()

        def ours() -> None:
            with red_teaming(Evaluate(red_team=section), Context(folder / f"work-{next(numbers)}")) as team:
                assert team is not None
                found = team.ask(reader, "sft", False)
            (measured,) = found["sets"].values()
            refused["ours"] = round(measured["measures"]["refused"]["all"]["value"] * PROMPTS)
            said["ours"] = {(one["prompt"], one["answer"].strip()) for one in found["worst"]}

        def plain() -> None:
            texts, refused["plain"] = generate(theirs, words, asked)
            said["plain"] = {(prompt, text.strip()) for prompt, text in zip(asked, texts, strict=True)}

        mine, other = fastest(repeats, ours, plain)
    yield row(
        "red_team_vs_transformers",
        PROMPTS / mine,
        PROMPTS / other,
        "prompts/s",
        f"{len(said['ours'] & said['plain'])} of {PROMPTS} answers of {NEW_TOKENS} tokens are the same; "
        f"{refused['ours']} refuse, of the loop's {refused['plain']}",
    )


def prompts() -> list[str]:
    """Texts of drawn words."""
    draw = np.random.default_rng(0)
    return [
        " ".join(f"w{word}" for word in draw.integers(6, VOCAB, int(length)))
        for length in draw.integers(SHORTEST, LONGEST, PROMPTS)
    ]


def no_chat() -> Any:
    """What a reader has for conversations, which are not asked here: the model continues texts."""
    raise AssertionError("the prompts of this measurement are texts, but a conversation was asked for")


@torch.no_grad()
def generate(model: Any, words: Any, asked: list[str]) -> tuple[list[str], int]:
    """What one would write without us: answers, and how many of them refuse."""
    texts: list[str] = []
    for begin in range(0, len(asked), BATCH):
        ids = [[0, *words.encode(text, add_special_tokens=False)] for text in asked[begin : begin + BATCH]]
        longest = max(map(len, ids))
        found = model.generate(
            torch.tensor([[PAD] * (longest - len(one)) + one for one in ids]),
            attention_mask=torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in ids]),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=PAD,
            eos_token_id=0,
        )
        texts += words.batch_decode(found[:, longest:], skip_special_tokens=True)
    return texts, sum(not {*REFUSING}.isdisjoint(text.split()) for text in texts)
