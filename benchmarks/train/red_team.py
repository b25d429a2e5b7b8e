"""A red team: prompts per second of `evaluate: {red_team: ...}`, against transformers and a loop over phrases.

Both sides ask the same model in float32 on one thread of the CPU, and take the likeliest tokens. The loop asks batch by
batch in the order of the file, padded on the left, as the scripts of the prompts' authors do. Ours keeps answers part
by part, and computes intervals by category. The note says how many answers are the same.
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
from gristmill.dataprep.context import Context
from gristmill.mixtures.evaluation import REFUSALS, Evaluate, RedTeam
from gristmill.train.evaluation.answering import Reader
from gristmill.train.evaluation.red_teaming import red_teaming
from gristmill.train.models.weights import load_model

PROMPTS, BATCH, NEW_TOKENS = 256, 32, 32
SHORTEST, LONGEST = 6, 60
"""Words of a prompt, each of which is a token."""
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
        reader = Reader(load_model(folder).eval(), lambda text: words.encode(text, add_special_tokens=False),
                        lambda ids: str(words.decode(ids, skip_special_tokens=True)), 0, frozenset({0}), no_chat)
        section = RedTeam.model_validate({
            "sets": [{"format": "advbench", "path": str(folder / "asked.csv")}], "max_new_tokens": NEW_TOKENS,
            "worst": PROMPTS})
        numbers, said = itertools.count(), dict[str, set[tuple[str, str]]]()

        def ours() -> None:
            with red_teaming(Evaluate(red_team=section), Context(folder / f"work-{next(numbers)}")) as team:
                assert team is not None
                found = team.ask(reader, "sft", False)
            said["ours"] = {(one["prompt"], one["answer"].strip()) for one in found["worst"]}

        def plain() -> None:
            said["plain"] = {(prompt, text.strip()) for prompt, text in zip(asked, generate(theirs, words, asked),
                                                                           strict=True)}

        mine, other = fastest(repeats, ours, plain)
    yield row("red_team_vs_transformers", PROMPTS / mine, PROMPTS / other, "prompts/s",
              f"{len(said['ours'] & said['plain'])} of {PROMPTS} answers of {NEW_TOKENS} tokens are the same")


def prompts() -> list[str]:
    """Texts of drawn words."""
    draw = np.random.default_rng(0)
    return [" ".join(f"w{word}" for word in draw.integers(6, VOCAB, int(length)))
            for length in draw.integers(SHORTEST, LONGEST, PROMPTS)]


def no_chat() -> Any:
    """The model continues texts."""
    raise NotImplementedError


@torch.no_grad()
def generate(model: Any, words: Any, asked: list[str]) -> list[str]:
    """What one would write without us: answers, of which those that refuse are counted."""
    texts: list[str] = []
    for begin in range(0, len(asked), BATCH):
        ids = [[0, *words.encode(text, add_special_tokens=False)] for text in asked[begin : begin + BATCH]]
        longest = max(map(len, ids))
        found = model.generate(
            torch.tensor([[PAD] * (longest - len(one)) + one for one in ids]),
            attention_mask=torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in ids]),
            do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=PAD, eos_token_id=0)
        texts += words.batch_decode(found[:, longest:], skip_special_tokens=True)
    refused = sum(any(phrase in text[:200].lower() for phrase in REFUSALS) for text in texts)
    assert refused <= len(texts)
    return texts
