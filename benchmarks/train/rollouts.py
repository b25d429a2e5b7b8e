"""`gristmill bench posttrain`: answers drawn for reinforcement learning, against
transformers' `generate`.

Both sides draw from the same model in float32 on one thread of the CPU, at temperature
1, for the same prompts of mixed length, several answers to each, until every answer has
the same number of tokens (no id ends one). Ours is the work of the stage `rl`: the
weights are copied from the model in training, then the engine answers. Sides take
turns.

For answers of several turns the peer is a loop over the same `generate`: each turn ends
after a fixed number of tokens, and the same tokens of a tool's answer follow on both
sides, so that both draw equally many tokens.

Sampling alone is measured on given logits: no model generates faster than that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from benchmarks.measuring import Row, fastest, row
from benchmarks.train.tuning import PAD, TURNS, VOCAB, left_padded, peer, write_start
from gristmill.train.distributed.fsdp import sharded_model
from gristmill.train.distributed.process_groups import World, single_process
from gristmill.train.generation.sampling import Sampling, random_numbers, sampled_ids
from gristmill.train.generation.scheduler import Request
from gristmill.train.models.weights import stored
from gristmill.train.rl.multi_turn import Asked, Dialogue
from gristmill.train.rl.rollout import Generated
from gristmill.train.rl.sampler import Sampler, sampling_of
from gristmill.train.rl.tools.call_format import Call
from gristmill.train.rl.tools.tool_call import Used

PROMPTS, GROUP, NEW_TOKENS = 8, 8, 96
SAMPLED_VOCABS, TOP_P, SAMPLINGS = (32_768, 128_256), 0.9, 5
LOGIT_DEVIATIONS = {"": 4.0, "_flat": 1.0}
"""Suffix of a row's name -> standard deviation of its logits."""
TURNS_OF_ANSWER, TOOL_TOKENS = 3, 16
"""Turns of an answer with tools, and the tokens of each answer of a tool."""
SHORTEST, LONGEST = 8, 64
"""Tokens of a prompt."""


def rows() -> Iterator[Row]:
    """Measure both kinds of answers.

    Raises:
        RuntimeError: a side did not draw all tokens.
    """
    torch.set_num_threads(1)
    yield from sampling_rows()
    with tempfile.TemporaryDirectory() as temporary, single_process() as world:
        folder = Path(temporary)
        sampler = make_sampler(folder, world)
        model = peer(folder).eval() if find_spec("transformers") is not None else None
        note = f"{PROMPTS} prompts x {GROUP} answers of {NEW_TOKENS} tokens"
        # 1.28 and 1.20, 2026-11-28, 2 cores
        yield _row(
            "grpo_rollouts_vs_transformers", sampler, model, draw, generate, note
        )
        note = f"{note}, in {TURNS_OF_ANSWER} turns"
        yield _row(
            "grpo_turns_vs_transformers",
            sampler,
            model,
            draw_turns,
            generate_turns,
            note,
        )


def sampling_rows() -> Iterator[Row]:
    """Measure sampling from the nucleus of given logits, of a model that is sure of few
    ids, and of one that is sure of none.
    """
    if find_spec("transformers") is None:
        return
    from transformers import TopPLogitsWarper

    warp = TopPLogitsWarper(top_p=TOP_P)
    count = PROMPTS * GROUP
    samplings = [Sampling(1.0, TOP_P, seed) for seed in range(count)]
    generators = [random_numbers(sampling.seed, (1,)) for sampling in samplings]

    def theirs(logits: torch.Tensor) -> None:
        # The steps of transformers' GenerationMixin._sample.
        scores = warp(None, logits.to(copy=True, dtype=torch.float32))
        torch.multinomial(scores.softmax(dim=-1), num_samples=1)

    for suffix, deviation in LOGIT_DEVIATIONS.items():
        for vocab in SAMPLED_VOCABS:
            generator = torch.Generator().manual_seed(0)
            logits = deviation * torch.randn(count, vocab, generator=generator)
            logps = logits.log_softmax(dim=-1)
            perplexity = float((-(logps.exp() * logps).sum(dim=-1)).mean().exp())
            ours, peer_rate = (
                count / seconds
                for seconds in fastest(
                    SAMPLINGS,
                    partial(sampled_ids, logits, samplings, generators),
                    partial(theirs, logits),
                    warmups=1,
                )
            )
            yield row(
                f"sampling{suffix}_vs_transformers, {vocab:,} ids",
                ours,
                peer_rate,
                "tokens/s",
                f"{count} rows, top_p {TOP_P}, perplexity {perplexity:,.0f}; ours "
                "bounds the speed of any model",
                floor=2.0,
            )


def _row(
    name: str,
    sampler: Sampler,
    model: Any,
    ours: Callable[[Sampler], int],
    peer_side: Callable[[Any], int],
    note: str,
) -> Row:
    def checked(side: Callable[[Any], int], argument: Any) -> Callable[[], None]:
        def run() -> None:
            tokens = side(argument)
            if tokens != PROMPTS * GROUP * NEW_TOKENS:
                raise RuntimeError(
                    f"{side.__name__} drew {tokens} tokens, not "
                    f"{PROMPTS * GROUP * NEW_TOKENS}"
                )

        return run

    sides = [checked(ours, sampler)]
    if model is not None:
        sides.append(checked(peer_side, model))
    rates = [
        PROMPTS * GROUP * NEW_TOKENS / seconds
        for seconds in fastest(TURNS, *sides, warmups=1)
    ]
    if model is None:
        return row(name, rates[0], None, "tokens/s", "transformers is not installed")
    return row(name, rates[0], rates[1], "tokens/s", note, floor=0.9)


def make_sampler(folder: Path, world: World) -> Sampler:
    """Return a sampler of the small model, which is written to a folder."""
    shape = write_start(folder)
    return Sampler(
        sharded_model(shape, stored(folder), world, torch.float32),
        None,
        shape,
        torch.float32,
        PROMPTS * GROUP,
        world,
    )


def prompts() -> list[list[int]]:
    """Draw prompts of mixed length."""
    generator = np.random.default_rng(0)
    return [
        generator.integers(6, VOCAB, int(length)).tolist()
        for length in generator.integers(SHORTEST, LONGEST, PROMPTS)
    ]


def requests(most_tokens: int, tools: tuple[str, ...] = ()) -> list[Asked]:
    """Return a request for every answer to every prompt."""
    every_prompt = [prompt for prompt in prompts() for _ in range(GROUP)]
    return [
        Asked(
            Request(
                tuple(ids),
                most_tokens,
                frozenset(),
                sampling_of(1.0, 0, 0, "prompt", place),
            ),
            tools,
        )
        for place, ids in enumerate(every_prompt)
    ]


def draw(sampler: Sampler) -> int:
    """Draw our answers, all at the same time; returns their tokens."""
    return sum(len(answer.tokens) for answer in sampler.answer(requests(NEW_TOKENS)))


class Answering:
    """Stand-in for a chat, a form of calls and tools: every turn calls, and gets the
    same tokens as an answer.
    """

    tokenizer = Tokenizer(BPE())

    def plain(self, text: str) -> str:
        """Return the text."""
        return text

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Return no text, since none is read."""
        return ""

    def calls(self, turn: str) -> list[Call]:
        """Return a call."""
        return [Call("tool", {})]

    def answer(self, turn: int, calls: Sequence[Any]) -> list[Used]:
        """Return an answer for each call."""
        return [Used(turn, "tool", "{}", "", False)] * len(calls)

    def answers(self, answers: Sequence[str]) -> list[int]:
        """Return the tokens of an answer."""
        return [7] * TOOL_TOKENS


class Turns(Dialogue):
    """Dialogues of a model that calls a tool in every turn."""

    def __init__(self) -> None:
        stand_in: Any = Answering()
        super().__init__(stand_in, stand_in, stand_in, TURNS_OF_ANSWER, TOOL_TOKENS)


def draw_turns(sampler: Sampler) -> int:
    """Draw our answers of several turns; returns the tokens that were drawn."""
    most = NEW_TOKENS // TURNS_OF_ANSWER
    drawn = 0

    def turn(turn_requests: Sequence[Request]) -> list[Generated]:
        nonlocal drawn
        answers = sampler.answer(
            [Asked(replace(request, max_new_tokens=most)) for request in turn_requests]
        )
        drawn += sum(len(answer.tokens) for answer in answers)
        return [Generated(answer.tokens, True) for answer in answers]

    Turns().answers(turn, requests(2 * NEW_TOKENS, ("tool",)))
    return drawn


@torch.no_grad()
def generate_turns(model: Any) -> int:
    """Draw transformers' answers of several turns: a turn of all, the tools' tokens,
    the next turn.
    """
    most, drawn = NEW_TOKENS // TURNS_OF_ANSWER, 0
    ids, mask = left_padded([prompt for prompt in prompts() for _ in range(GROUP)])
    for _ in range(TURNS_OF_ANSWER):
        answers = sampled(model, ids, mask, most)
        drawn += int(answers[:, ids.shape[1] :].numel())
        ids = torch.cat([answers, torch.full((len(answers), TOOL_TOKENS), 7)], dim=1)
        mask = torch.cat(
            [mask, torch.ones(len(answers), most + TOOL_TOKENS, dtype=mask.dtype)],
            dim=1,
        )
    return drawn


@torch.no_grad()
def generate(model: Any) -> int:
    """Draw transformers' answers, all in one batch padded on the left; returns their
    tokens.
    """
    ids, mask = left_padded(prompts())
    return int(
        sampled(model, ids, mask, NEW_TOKENS, num_return_sequences=GROUP)[
            :, ids.shape[1] :
        ].numel()
    )


def sampled(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, tokens: int, **options: Any
) -> torch.Tensor:
    """Return prompts with as many drawn tokens each."""
    answers: torch.Tensor = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=PAD,
        eos_token_id=None,
        **options,
    )
    return answers
