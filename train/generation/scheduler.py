"""Continuous batching: each round extends all running requests, removes the finished
and admits the waiting.

Rows share only forward passes (Yu et al. 2022, Orca).

Positions of a row count from its start, so its cache stays valid wherever it is moved.

Samples of a row depend on its random stream and its prompt, never on the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gristmill.train.generation.sampling import (
    Sampling,
    draw,
    probabilities,
    random_numbers,
)
from gristmill.train.models.own_model import OwnModel
from gristmill.train.models.transformer import Cache, Llama, empty_cache

ROOM = 64
"""Positions by which caches grow."""
PREFILL_TOKENS = 8192
"""Most prompt tokens admitted in one round, padding included; a longer prompt is
admitted alone.
"""
Finish = Literal["stop", "length"]


class PromptTooLongError(ValueError):
    """A prompt that is empty, or leaves no room for a new token."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        prompt: at least one id.
        max_new_tokens: most ids to generate; fewer at the end of the model's sequence
            length.
        stops: ids that end the continuation, and are excluded from it.
        sampling: parameters of sampling.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    stops: frozenset[int]
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Progress:
    """Result of a round for a request: its number, new ids, the reason if it ended, and
    the id that ended it.
    """

    number: int
    tokens: list[int]
    finish: Finish | None
    stop: int | None = None


@dataclass
class _Row:
    number: int
    request: Request
    remaining: int
    generator: np.random.Generator
    last: int
    """Newest id, which is not cached yet."""


class Scheduler:
    """Scheduler of requests to a model; single-threaded.

    Args:
        model: in one process, not sharded.
        most_rows: most requests that run together; the others wait in order.
    """

    def __init__(self, model: Llama, most_rows: int) -> None:
        self.model = model
        self.most_rows = most_rows
        self._device = model.model.embed_tokens.weight.device
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._cache: Cache | None = None
        self._added = 0

    @property
    def is_idle(self) -> bool:
        """True if no request runs or waits."""
        return not self._rows and not self._waiting

    def check(self, request: Request) -> None:
        """Raise PromptTooLongError if a prompt is empty or fills the model's sequence
        length.
        """
        length = len(request.prompt)
        max_length = self.model.shape.sequence_length
        if not 0 < length < max_length:
            raise PromptTooLongError(
                f"a prompt has {length} tokens; it needs at least one, and fewer "
                f"than the model's {max_length}"
            )

    def add(self, request: Request) -> int:
        """Queue a request; returns its number for progress reports.

        Raises:
            PromptTooLongError: as `check`.
        """
        self.check(request)
        row = _Row(
            self._added,
            request,
            min(
                request.max_new_tokens,
                self.model.shape.sequence_length - len(request.prompt),
            ),
            random_numbers(request.sampling.seed, request.prompt),
            request.prompt[-1],
        )
        self._waiting.append(row)
        self._added += 1
        return row.number

    def cancel(self, number: int) -> None:
        """Drop a request."""
        self._waiting = deque(row for row in self._waiting if row.number != number)
        self._keep(
            [place for place, row in enumerate(self._rows) if row.number != number]
        )

    @torch.no_grad()
    def step(self) -> list[Progress]:
        """Run one round: a new id for every running request, or its end."""
        self._admit()
        if self._cache is None:
            return []
        if self._cache.length == self._cache.layers[0].keys.shape[2]:
            running = self._cache, range(len(self._rows))
            self._cache = arranged(self.model, [running], ROOM + 1)
        ids = torch.tensor([[row.last] for row in self._rows], device=self._device)
        logits = self.model(ids, cache=self._cache)[:, -1]
        tokens: list[int] = logits.argmax(dim=-1).tolist()
        # Rows with equal parameters are computed together; the result is that of each
        # row alone.
        rows_by_parameters: dict[tuple[float, float], list[int]] = {}
        for place, row in enumerate(self._rows):
            sampling = row.request.sampling
            if sampling.temperature > 0.0:
                parameters = (sampling.temperature, sampling.top_p)
                rows_by_parameters.setdefault(parameters, []).append(place)
        for places in rows_by_parameters.values():
            sampling = self._rows[places[0]].request.sampling
            distributions = probabilities(logits[places].cpu().numpy(), sampling)
            for place, distribution in zip(places, distributions, strict=True):
                tokens[place] = draw(distribution, self._rows[place].generator)
        progress = []
        for row, token in zip(self._rows, tokens, strict=True):
            if token in row.request.stops:
                progress.append(Progress(row.number, [], "stop", token))
                continue
            row.last = token
            row.remaining -= 1
            finish: Finish | None = None if row.remaining else "length"
            progress.append(Progress(row.number, [token], finish))
        self._keep(
            [place for place, update in enumerate(progress) if update.finish is None]
        )
        return progress

    def _admit(self) -> None:
        """Compute the prompts of waiting requests while there is room, and start
        them.
        """
        entering: list[_Row] = []
        longest = 0
        while self._waiting and len(self._rows) + len(entering) < self.most_rows:
            longest = max(longest, len(self._waiting[0].request.prompt))
            if entering and longest * (len(entering) + 1) > PREFILL_TOKENS:
                break
            entering.append(self._waiting.popleft())
        if not entering:
            return
        prompts = [row.request.prompt[:-1] for row in entering]
        parts = [(filled(self.model, prompts), range(len(entering)))]
        if self._cache is not None:
            parts.insert(0, (self._cache, range(len(self._rows))))
        self._cache = arranged(self.model, parts, ROOM)
        self._rows += entering

    def _keep(self, places: list[int]) -> None:
        if len(places) == len(self._rows):
            return
        self._rows = [self._rows[place] for place in places]
        if self._cache is not None:
            self._cache = (
                arranged(self.model, [(self._cache, places)], ROOM) if places else None
            )


def arranged(
    model: Llama, parts: Sequence[tuple[Cache, Sequence[int]]], room: int
) -> Cache:
    """New cache of some rows of others, as short as the longest row allows.

    Args:
        model: model of the caches.
        parts: caches with their selected rows, in order.
        room: further positions.
    """
    device = parts[0][0].starts.device
    chosen = [
        (cache, torch.tensor(rows, dtype=torch.int64, device=device))
        for cache, rows in parts
    ]
    sizes = torch.cat([cache.length - cache.starts[rows] for cache, rows in chosen])
    length = int(sizes.max()) if len(sizes) else 0
    target = empty_cache(
        model.shape, length - sizes, length + room, parts[0][0].layers[0].keys.dtype
    )
    target.length = length
    first = 0
    for cache, rows in chosen:
        width = min(length, cache.length)
        into = (
            slice(first, first + len(rows)),
            slice(None),
            slice(length - width, length),
        )
        out_of = rows, slice(None), slice(cache.length - width, cache.length)
        for new, old in zip(target.layers, cache.layers, strict=True):
            new.keys[into] = old.keys[out_of]
            new.values[into] = old.values[out_of]
        first += len(rows)
    return target


@torch.no_grad()
def filled(model: Llama, prompts: Sequence[Sequence[int]]) -> Cache:
    """Cache of prompts, which may be empty; computes no logits."""
    device = model.model.embed_tokens.weight.device
    longest = max(map(len, prompts))
    # Left padding makes all rows end at the same position.
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, dtype=torch.int64)
    starts = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    cache = empty_cache(
        model.shape, starts, longest, model.model.embed_tokens.weight.dtype
    )
    if longest:
        model(ids.to(device), head=lambda hidden, weight: None, cache=cache)
    return cache


def generate(
    model: Llama | OwnModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stops: Collection[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Continue prompts, all in one batch.

    Args:
        model: in one process, not sharded.
        prompts: ids of each prompt, at least one.
        max_new_tokens: most ids to generate; fewer at the end of the model's sequence
            length.
        stops: ids that end a continuation; they are excluded from the result.
        temperature: 0 is greedy, 1 samples from the model's distribution.
        seed: with the prompt, determines every draw.

    Returns:
        the new ids of each prompt.

    Raises:
        gristmill.train.generation.scheduler.PromptTooLongError: a prompt is empty or
            fills the model's sequence length.
    """
    sampling = Sampling(temperature, seed=seed)
    if isinstance(model, OwnModel):
        return continue_texts(
            model, prompts, max_new_tokens, frozenset(stops), sampling
        )
    return complete(
        Scheduler(model, most_rows=len(prompts)),
        [
            Request(
                tuple(int(token) for token in prompt),
                max_new_tokens,
                frozenset(stops),
                sampling,
            )
            for prompt in prompts
        ],
    )


def complete(scheduler: Scheduler, requests: Sequence[Request]) -> list[list[int]]:
    """New ids of each request, in order; the scheduler must be idle."""
    tokens_by_request: dict[int, list[int]] = {
        scheduler.add(request): [] for request in requests
    }
    while not scheduler.is_idle:
        for update in scheduler.step():
            tokens_by_request[update.number] += update.tokens
    return list(tokens_by_request.values())


@torch.no_grad()
def continue_texts(
    model: OwnModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stops: frozenset[int],
    sampling: Sampling,
) -> list[list[int]]:
    """Continue prompts one by one, recomputing the full text for every token, without a
    cache.

    Arguments and samples are those of `generate`.
    """
    device = next(model.parameters()).device
    continuations = []
    for prompt in prompts:
        ids = list(prompt)
        generator = random_numbers(sampling.seed, prompt)
        most = min(len(ids) + max_new_tokens, model.shape.sequence_length)
        while len(ids) < most:
            logits: Tensor = model(torch.tensor([ids], device=device))[0, -1].cpu()
            token = int(logits.argmax())
            if sampling.temperature > 0.0:
                scores = logits.numpy().astype(np.float32)
                token = draw(probabilities(scores, sampling), generator)
            if token in stops:
                break
            ids.append(token)
        continuations.append(ids[len(prompt) :])
    return continuations
