"""Continuous batching: each round extends all running requests, removes the finished
and admits the waiting.

Rows share only forward passes (Yu et al. 2022, Orca).

Positions of a row count from its start, so its cache stays valid wherever it is moved.

Samples of a row depend on its random stream and its prompt, never on the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gristmill.train.generation.sampling import (
    Sampling,
    random_numbers,
    sampled_ids,
    sent,
)
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
    """A request that waits or runs.

    Attributes:
        unsampled, unread: ids that are yet to be sampled, and to be reported; 0 of
            these after its end.
        generator: its random stream.
        cached: positions in the cache, all but the newest id.
        past: cache of this row alone, of a model with `extend`.
    """

    number: int
    request: Request
    unsampled: int
    unread: int
    generator: np.random.Generator
    cached: int
    past: Any = None


@dataclass(frozen=True)
class _Round:
    """New ids of rows that ran together, on their way to the host.

    Attributes:
        rows: the rows.
        ids: (n,) on the CPU.
        arrival: event after which the ids may be read; None without a GPU.
    """

    rows: list[_Row]
    ids: Tensor
    arrival: torch.cuda.Event | None

    def read(self) -> Iterator[Progress]:
        """Progress of each row that had not ended before."""
        if self.arrival is not None:
            self.arrival.synchronize()
        for row, token in zip(self.rows, self.ids.tolist(), strict=True):
            if not row.unread:
                continue
            if token in row.request.stops:
                row.unread = 0
                yield Progress(row.number, [], "stop", token)
            else:
                row.unread -= 1
                yield Progress(row.number, [token], None if row.unread else "length")


class Scheduler:
    """Scheduler of requests to a model; single-threaded.

    Args:
        model: in one process, not sharded. One with `extend`, which is not the built-in
            decoder, reads its rows one by one.
        most_rows: most requests that run together; the others wait in order.

    Attributes:
        rounds_ahead: rounds that the device may be ahead of the progress reports; on a
            GPU one, so that it computes while the host reads. Rows that a stop ended run
            as many rounds in vain.
    """

    def __init__(self, model: Llama, most_rows: int) -> None:
        self.model = model
        self.most_rows = most_rows
        self._extend: Any = getattr(model, "extend", None)
        self._device = next(model.parameters()).device
        self.rounds_ahead = int(self._device.type == "cuda")
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._newest = torch.empty(0, 1, dtype=torch.int64, device=self._device)
        """(n, 1) newest id of each running row, which is not cached yet."""
        self._cache: Cache | None = None
        self._unread: deque[_Round] = deque()
        self._added = 0

    @property
    def is_idle(self) -> bool:
        """True if no request runs or waits."""
        return not (self._rows or self._waiting or self._unread)

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
        cached = len(request.prompt) - 1
        most = min(
            request.max_new_tokens, self.model.shape.sequence_length - 1 - cached
        )
        row = _Row(
            self._added,
            request,
            most,
            most,
            random_numbers(request.sampling.seed, request.prompt),
            cached,
        )
        self._waiting.append(row)
        self._added += 1
        return row.number

    def cancel(self, number: int) -> None:
        """Drop a request."""
        self._waiting = deque(row for row in self._waiting if row.number != number)
        for row in chain(self._rows, *(sampled.rows for sampled in self._unread)):
            if row.number == number:
                row.unread = 0
        self._keep_running()

    @torch.no_grad()
    def step(self) -> list[Progress]:
        """Run one round: a new id for every running request, or its end."""
        self._admit()
        if self._rows:
            ids = sampled_ids(
                self._next_logits(),
                [row.request.sampling for row in self._rows],
                [row.generator for row in self._rows],
            )
            self._newest = ids[:, None]
            for row in self._rows:
                row.unsampled -= 1
                row.cached += 1
            # The copy goes to pinned memory, and nothing waits for it here.
            on_host = ids.to("cpu", non_blocking=True)
            arrival = None
            if ids.is_cuda:
                arrival = torch.cuda.Event()
                arrival.record()
            self._unread.append(_Round(self._rows, on_host, arrival))
        progress: list[Progress] = []
        while len(self._unread) > (self.rounds_ahead if self._rows else 0):
            progress += self._unread.popleft().read()
        self._keep_running()
        return progress

    def _next_logits(self) -> Tensor:
        """Logits (n, v) after the newest id of each running row."""
        if self._cache is not None:
            if self._cache.length == self._cache.layers[0].keys.shape[2]:
                self._arrange([(self._cache, range(len(self._rows)))], ROOM + 1)
            return self.model(self._newest, cache=self._cache)[:, -1]
        parts = []
        for row, ids in zip(self._rows, self._newest.split(1), strict=True):
            if row.past is None:
                ids = sent([row.request.prompt], torch.int64, self._device)
            logits, row.past = self._extend(ids, row.past)
            parts.append(logits)
        return torch.cat(parts)

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
        parts = [] if self._cache is None else [(self._cache, range(len(self._rows)))]
        self._rows = [*self._rows, *entering]
        if self._extend is None:
            prompts = [row.request.prompt[:-1] for row in entering]
            parts.append((filled(self.model, prompts), range(len(entering))))
            self._arrange(parts, ROOM)
        last = sent(
            [row.request.prompt[-1:] for row in entering], torch.int64, self._device
        )
        self._newest = torch.cat((self._newest, last))

    def _keep_running(self) -> None:
        """Drop the rows that ended, or will end with ids that are not read yet."""
        places = [
            place
            for place, row in enumerate(self._rows)
            if row.unsampled and row.unread
        ]
        if len(places) == len(self._rows):
            return
        self._rows = [self._rows[place] for place in places]
        self._newest = self._newest[sent(places, torch.int64, self._device)]
        if self._cache is not None:
            self._arrange([(self._cache, places)], ROOM)

    def _arrange(self, parts: Sequence[tuple[Cache, Sequence[int]]], room: int) -> None:
        """Copy the running rows to a new cache, as short as the longest row allows.

        Args:
            parts: caches with their rows that run, in order.
            room: further positions.
        """
        self._cache = None
        if not self._rows:
            return
        length = max(row.cached for row in self._rows)
        chosen = [
            (cache, sent(rows, torch.int64, self._device)) for cache, rows in parts
        ]
        sizes = torch.cat([cache.length - cache.starts[rows] for cache, rows in chosen])
        dtype = parts[0][0].layers[0].keys.dtype
        target = empty_cache(self.model.shape, length - sizes, length + room, dtype)
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
        self._cache = target


@torch.no_grad()
def filled(model: Llama, prompts: Sequence[Sequence[int]]) -> Cache:
    """Cache of prompts, which may be empty; computes no logits."""
    device = model.model.embed_tokens.weight.device
    longest = max(map(len, prompts))
    # Left padding makes all rows end at the same position.
    padding = [longest - len(prompt) for prompt in prompts]
    ids = [
        [0] * missing + [*prompt]
        for missing, prompt in zip(padding, prompts, strict=True)
    ]
    starts = sent(padding, torch.int64, device)
    cache = empty_cache(
        model.shape, starts, longest, model.model.embed_tokens.weight.dtype
    )
    if longest:
        model(
            sent(ids, torch.int64, device),
            head=lambda hidden, weight: None,
            cache=cache,
        )
    return cache


def generate(
    model: Llama,
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
