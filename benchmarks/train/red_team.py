"""A red team: prompts per second of `evaluate: {red_team: ...}`, against transformers
and a loop over phrases.

Both sides ask the same model in float32 on one thread of the CPU, and take the
likeliest tokens. The loop asks batch by batch in the order of the file, padded on the
left, as the scripts of the prompts' authors do. Ours keeps answers part by part, and
computes intervals by category. The model's answers mean nothing: some words stand for
phrases of refusal. The note has the number of equal answers, and of refusals on either
side.
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
from benchmarks.train.tuning import (
    PAD,
    VOCAB,
    left_padded,
    peer,
    tokenizer,
    write_start,
)
from gristmill.core.stage_context import Context
from gristmill.mixtures.sections.evaluation import Evaluate, RedTeam
from gristmill.train.evaluation.answering import Reader
from gristmill.train.evaluation.red_teaming import red_teaming
from gristmill.train.models.weights import load_model

PROMPTS, BATCH, NEW_TOKENS = 256, 32, 32
SHORTEST, LONGEST = 6, 60
"""Words of a prompt; a word is a token."""
REFUSING = tuple(f"w{word}" for word in range(6, VOCAB, 40))
REPEATS = 3


def rows() -> Iterator[Row]:
    """Measure prompts per second."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_start(folder)
        words, model = tokenizer(), peer(folder).eval()
        texts = prompts()
        (folder / "prompts.csv").write_text(
            "goal,target\n" + "".join(f"{text},x\n" for text in texts)
        )
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
                "sets": [{"format": "advbench", "path": str(folder / "prompts.csv")}],
                "max_new_tokens": NEW_TOKENS,
                "worst": PROMPTS,
                "refusals": REFUSING,
                "refusal_characters": 1000,
            }
        )
        numbers = itertools.count()
        answers, refusals = dict[str, set[tuple[str, str]]](), dict[str, int]()

        def ours() -> None:
            with red_teaming(
                Evaluate(red_team=section), Context(folder / f"work-{next(numbers)}")
            ) as team:
                assert team is not None
                summary = team.ask(reader, "sft", False)
            (measured,) = summary["sets"].values()
            refusals["ours"] = round(
                measured["measures"]["refused"]["all"]["value"] * PROMPTS
            )
            answers["ours"] = {
                (entry["prompt"], entry["answer"].strip()) for entry in summary["worst"]
            }

        def plain() -> None:
            plain_answers = generate(model, words, texts)
            refusals["plain"] = sum(
                not {*REFUSING}.isdisjoint(answer.split()) for answer in plain_answers
            )
            answers["plain"] = {
                (text, answer.strip())
                for text, answer in zip(texts, plain_answers, strict=True)
            }

        our_seconds, plain_seconds = fastest(REPEATS, ours, plain)
    yield row(
        "red_team_vs_transformers",
        PROMPTS / our_seconds,
        PROMPTS / plain_seconds,
        "prompts/s",
        f"{len(answers['ours'] & answers['plain'])} of {PROMPTS} answers of "
        f"{NEW_TOKENS} tokens are the same; "
        f"{refusals['ours']} refuse, of the loop's {refusals['plain']}",
    )


def prompts() -> list[str]:
    """Draw texts."""
    draw = np.random.default_rng(0)
    return [
        " ".join(f"w{word}" for word in draw.integers(6, VOCAB, int(length)))
        for length in draw.integers(SHORTEST, LONGEST, PROMPTS)
    ]


def no_chat() -> Any:
    """Stand in for a reader's chat: the model continues texts, and no conversation is
    asked for.
    """
    raise AssertionError(
        "the prompts of this measurement are texts, but a conversation was asked for"
    )


@torch.no_grad()
def generate(model: Any, words: Any, texts: list[str]) -> list[str]:
    """Return the answers of a plain loop over transformers."""
    answers: list[str] = []
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        ids, mask = left_padded(
            [[0, *words.encode(text, add_special_tokens=False)] for text in batch]
        )
        completed = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=PAD,
            eos_token_id=0,
        )
        answers += words.batch_decode(
            completed[:, ids.shape[1] :], skip_special_tokens=True
        )
    return answers
