"""`gristmill bench posttrain`: answers drawn for reinforcement learning, against transformers' `generate`.

Both sides draw from the same model in float32 on one thread of the CPU, at temperature 1, for the same prompts of mixed
length, several answers to each, until every answer has one and the same number of tokens (no id ends one). Ours is what
the stage `rl` does: the weights are copied from the model in training, then the engine answers. Sides go by turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import Row, row
from benchmarks.train.tuning import PAD, TURNS, VOCAB, peer, write_start
from gristmill.train.generation.scheduler import Request
from gristmill.train.models.weights import stored
from gristmill.train.parallel.sharding import sharded_model
from gristmill.train.parallel.world import single_process
from gristmill.train.reinforcement.dialogue import Asked
from gristmill.train.reinforcement.sampler import OwnEngine, Sampler, sampling_of

PROMPTS, GROUP, NEW_TOKENS = 8, 8, 96
SHORTEST, LONGEST = 8, 64
"""Tokens of a prompt."""


def rows() -> Iterator[Row]:
    """Measure; the row has name, ours, peer, unit, ratio, both sides measured by turns here and now."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, single_process() as world:
        folder = Path(temporary)
        shape = write_start(folder)
        sampler = Sampler(sharded_model(shape, stored(folder), world, torch.float32), None,
                          OwnEngine(shape, torch.float32, PROMPTS * GROUP, world.device), world)
        sides = {"ours": lambda: draw(sampler)}
        note = "transformers is not installed"
        if find_spec("transformers") is not None:
            model = peer(folder).eval()
            sides["peer"], note = lambda: generate(model), f"{PROMPTS} prompts x {GROUP} answers of {NEW_TOKENS} tokens"
        best = fastest(sides)
    speed = {name: PROMPTS * GROUP * NEW_TOKENS / seconds for name, seconds in best.items()}
    yield row("grpo_rollouts_vs_transformers", speed["ours"], speed.get("peer"), "tokens/s", note)


def prompts() -> list[list[int]]:
    """Random ids, of mixed length."""
    generator = np.random.default_rng(0)
    return [generator.integers(6, VOCAB, int(length)).tolist()
            for length in generator.integers(SHORTEST, LONGEST, PROMPTS)]


def fastest(sides: dict[str, Callable[[], int]]) -> dict[str, float]:
    """Each side's fastest time over some turns, in seconds; a turn before them is not counted.

    Raises:
        RuntimeError: a side did not draw all tokens.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(TURNS + 1):
        for name, side in sides.items():
            started = time.perf_counter()
            drawn = side()
            found[name].append(time.perf_counter() - started)
            if drawn != PROMPTS * GROUP * NEW_TOKENS:
                raise RuntimeError(f"{name} drew {drawn} tokens, not {PROMPTS * GROUP * NEW_TOKENS}")
    return {name: min(seconds[1:]) for name, seconds in found.items()}


def draw(sampler: Sampler) -> int:
    """Our answers, all at the same time; returns their tokens."""
    asked = [prompt for prompt in prompts() for _ in range(GROUP)]
    answers = sampler.answer([
        Asked(Request(tuple(ids), NEW_TOKENS, frozenset(), sampling_of(1.0, 0, 0, "prompt", place)))
        for place, ids in enumerate(asked)])
    return sum(len(answer.tokens) for answer in answers)


@torch.no_grad()
def generate(model: Any) -> int:
    """transformers' answers, all in one batch padded on the left; returns their tokens."""
    asked = prompts()
    longest = max(map(len, asked))
    ids = torch.tensor([[PAD] * (longest - len(one)) + one for one in asked])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in asked])
    found = model.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                           num_return_sequences=GROUP, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS,
                           pad_token_id=PAD, eos_token_id=None)
    return int(found[:, longest:].numel())
