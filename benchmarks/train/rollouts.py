"""`gristmill bench posttrain`: answers drawn for reinforcement learning, against transformers' `generate`.

Answers of several turns are drawn for the same prompts by a loop over the same `generate`: each turn ends after a fixed
number of tokens, and the same tokens of a tool's answer follow on both sides. So both draw as many tokens.

Both sides draw from the same model in float32 on one thread of the CPU, at temperature 1, for the same prompts of mixed
length, several answers to each, until every answer has one and the same number of tokens (no id ends one). Ours is what
the stage `rl` does: the weights are copied from the model in training, then the engine answers. Sides go by turns.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measuring import Row, row
from benchmarks.train.tuning import PAD, TURNS, VOCAB, peer, write_start
from gristmill.train.generation.scheduler import Request
from gristmill.train.models.weights import stored
from gristmill.train.parallel.process_groups import single_process
from gristmill.train.parallel.sharding import sharded_model
from gristmill.train.reinforcement.multi_turn import Asked, Dialogue
from gristmill.train.reinforcement.rollouts import Generated
from gristmill.train.reinforcement.sampler import OwnEngine, Sampler, sampling_of
from gristmill.train.reinforcement.tools.call_format import Call
from gristmill.train.reinforcement.tools.tool_call import Used

PROMPTS, GROUP, NEW_TOKENS = 8, 8, 96
TURNS_OF_ANSWER, TOOL_TOKENS = 3, 16
"""Turns of an answer with tools, and the tokens of each answer of a tool."""
SHORTEST, LONGEST = 8, 64
"""Tokens of a prompt."""


def rows() -> Iterator[Row]:
    """Measure; the row has name, ours, peer, unit, ratio, both sides measured by turns here and now."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary, single_process() as world:
        folder = Path(temporary)
        shape = write_start(folder)
        sampler = Sampler(
            sharded_model(shape, stored(folder), world, torch.float32),
            None,
            OwnEngine(shape, torch.float32, PROMPTS * GROUP, world.device),
            world,
        )
        sides, turns = {"ours": lambda: draw(sampler)}, {"ours": lambda: draw_turns(sampler)}
        note = "transformers is not installed"
        if find_spec("transformers") is not None:
            model = peer(folder).eval()
            turns["peer"] = lambda: generate_turns(model)
            sides["peer"], note = lambda: generate(model), f"{PROMPTS} prompts x {GROUP} answers of {NEW_TOKENS} tokens"
        for name, both in (("grpo_rollouts_vs_transformers", sides), ("grpo_turns_vs_transformers", turns)):
            speed = {side: PROMPTS * GROUP * NEW_TOKENS / seconds for side, seconds in fastest(both).items()}
            told = f"{note}, in {TURNS_OF_ANSWER} turns" if both is turns and "peer" in turns else note
            yield row(name, speed["ours"], speed.get("peer"), "tokens/s", told)


def prompts() -> list[list[int]]:
    """Random ids, of mixed length."""
    generator = np.random.default_rng(0)
    return [
        generator.integers(6, VOCAB, int(length)).tolist() for length in generator.integers(SHORTEST, LONGEST, PROMPTS)
    ]


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
    answers = sampler.answer(
        [
            Asked(Request(tuple(ids), NEW_TOKENS, frozenset(), sampling_of(1.0, 0, 0, "prompt", place)))
            for place, ids in enumerate(asked)
        ]
    )
    return sum(len(answer.tokens) for answer in answers)


class Answering:
    """In the place of a chat, of a form of calls and of tools: every turn calls, and is answered by the same tokens."""

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """No text is looked at."""
        return ""

    def calls(self, turn: str) -> list[Call]:
        """One call."""
        return [Call("tool", {})]

    def answer(self, turn: int, calls: Sequence[Any]) -> list[Used]:
        """One answer for each call."""
        return [Used(turn, "tool", "{}", "", False)] * len(calls)

    def answers(self, answers: Sequence[str]) -> list[int]:
        """The tokens of an answer."""
        return [7] * TOOL_TOKENS


class Turns(Dialogue):
    """Dialogues of a model that calls in every turn."""

    def __init__(self) -> None:
        every: Any = Answering()
        super().__init__(every, every, every, TURNS_OF_ANSWER, TOOL_TOKENS)

    def _cut(self, answer: str) -> str:
        return answer


def draw_turns(sampler: Sampler) -> int:
    """Our answers of several turns; returns the tokens that were drawn."""
    most = NEW_TOKENS // TURNS_OF_ANSWER
    asked = [prompt for prompt in prompts() for _ in range(GROUP)]
    drawn = 0

    def turn(requests: Sequence[Request]) -> list[Generated]:
        nonlocal drawn
        found = sampler.answer([Asked(replace(one, max_new_tokens=most)) for one in requests])
        drawn += sum(len(one.tokens) for one in found)
        return [Generated(one.tokens, True) for one in found]

    Turns().answers(
        turn,
        [
            Asked(Request(tuple(ids), 2 * NEW_TOKENS, frozenset(), sampling_of(1.0, 0, 0, "prompt", place)), ("tool",))
            for place, ids in enumerate(asked)
        ],
    )
    return drawn


@torch.no_grad()
def generate_turns(model: Any) -> int:
    """The same with transformers: a turn of all, the tools' tokens behind it, the next turn."""
    most, drawn = NEW_TOKENS // TURNS_OF_ANSWER, 0
    asked = [prompt for prompt in prompts() for _ in range(GROUP)]
    longest = max(map(len, asked))
    ids = torch.tensor([[PAD] * (longest - len(one)) + one for one in asked])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in asked])
    for _ in range(TURNS_OF_ANSWER):
        found = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=most,
            max_new_tokens=most,
            pad_token_id=PAD,
            eos_token_id=None,
        )
        drawn += int(found[:, ids.shape[1] :].numel())
        ids = torch.cat([found, torch.full((len(found), TOOL_TOKENS), 7)], dim=1)
        mask = torch.cat([mask, torch.ones(len(found), most + TOOL_TOKENS, dtype=mask.dtype)], dim=1)
    return drawn


@torch.no_grad()
def generate(model: Any) -> int:
    """transformers' answers, all in one batch padded on the left; returns their tokens."""
    asked = prompts()
    longest = max(map(len, asked))
    ids = torch.tensor([[PAD] * (longest - len(one)) + one for one in asked])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in asked])
    found = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=GROUP,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=PAD,
        eos_token_id=None,
    )
    return int(found[:, longest:].numel())
