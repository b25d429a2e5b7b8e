"""Draws answers from a model that is being trained: every process gets its whole weights, and answers its share.

The weights are those as they are now, adapters merged, in the dtype that the training computes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gristmill.dataprep.seeds import seeded_key
from gristmill.mixtures.posttraining import Lora
from gristmill.train.adapters.lora import DOWN, merged, rounded_weights
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request, Scheduler
from gristmill.train.models.llama import Llama
from gristmill.train.models.shape import Shape
from gristmill.train.parallel.sharding import gathered
from gristmill.train.parallel.world import World
from gristmill.train.reinforcement.dialogue import Asked, Dialogue
from gristmill.train.reinforcement.policy import is_critic
from gristmill.train.reinforcement.rollouts import Generated

LAYER_PARTS = 3
"""Of a parameter's name, up to its layer: `model.layers.0`."""


class Engine(Protocol):
    """Draws from a copy of the policy."""

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take the policy's weights as they are now, by name."""

    def draw(self, requests: Sequence[Request]) -> list[Generated]:
        """An answer to each request."""


class OwnEngine:
    """This package's scheduler, on the device that trains.

    Args:
        shape: of the model.
        dtype: that is computed in.
        rows: answers at the same time.
        device: where.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, rows: int, device: torch.device) -> None:
        self._rows = rows
        with torch.device("meta"):
            copy = Llama(shape).to(dtype)
        self._copy = copy.to_empty(device=device).eval().requires_grad_(False)

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """See `Engine.load`."""
        own = dict(self._copy.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor)

    def draw(self, requests: Sequence[Request]) -> list[Generated]:
        """See `Engine.draw`."""
        return drawn_by(Scheduler(self._copy, self._rows), requests)


class Sampler:
    """Answers requests with the policy as it is.

    Args:
        model: sharded; read again before each batch.
        lora: its adapters, if it has some.
        engine: draws on this rank.
        world: the processes.
        dialogue: has several turns and tools; an answer is one turn if absent.
    """

    def __init__(
        self, model: nn.Module, lora: Lora | None, engine: Engine, world: World, dialogue: Dialogue | None = None
    ) -> None:
        self._model, self._lora, self._engine, self._world, self._dialogue = model, lora, engine, world, dialogue

    def answer(self, asked: Sequence[Asked]) -> list[Generated]:
        """An answer to each request, the same on every rank; every rank calls this together, with the same requests."""
        self._engine.load(self._weights())
        own = [asked[number] for number in range(self._world.data_rank, len(asked), self._world.data_size)]
        drawn = (
            self._engine.draw([one.request for one in own])
            if self._dialogue is None
            else (self._dialogue.answers(self._engine.draw, own))
        )
        everybody: list[tuple[int, list[Generated]]] = [(self._world.data_rank, drawn)]
        if self._world.size > 1:
            gathered: list[tuple[int, list[Generated]]] = [(0, [])] * self._world.size
            dist.all_gather_object(gathered, everybody[0])
            everybody = gathered
        found: list[Generated] = [Generated([], False)] * len(asked)
        for rank, share in everybody:
            found[rank :: self._world.data_size] = share
        return found

    @torch.no_grad()
    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, adapters merged, a layer at a time."""
        for _, layer in groupby(_whole(self._model), key=lambda item: item[0].split(".")[:LAYER_PARTS]):
            tensors = dict(layer)
            yield from (tensors if self._lora is None else merged(tensors, self._lora)).items()


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy, without its critic, gathered one by one; those held rounded before their adapters."""
    rounded = rounded_weights(model)
    for name, parameter in model.named_parameters():
        if name.endswith(DOWN) and (weight := rounded.get(f"{name.removesuffix(DOWN)}weight")) is not None:
            yield f"{name.removesuffix(DOWN)}weight", weight.whole(torch.float32)
        if not is_critic(name):
            yield name, gathered(parameter)


def drawn_by(scheduler: Scheduler, requests: Sequence[Request]) -> list[Generated]:
    """The answer to each request; the scheduler must be idle."""
    numbers = [scheduler.add(request) for request in requests]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    ended: set[int] = set()
    while not scheduler.is_idle:
        for one in scheduler.step():
            tokens[one.number] += one.tokens
            if one.stop is not None:
                # The end is drawn like any other token, and learned from.
                tokens[one.number].append(one.stop)
                ended.add(one.number)
    return [Generated(tokens[number], number in ended) for number in numbers]


def sampling_of(temperature: float, seed: int, batch: int, prompt: str, place: int) -> Sampling:
    """How one answer is drawn.

    Args:
        temperature: logits are divided by it.
        seed: of the training.
        batch: the number of the batch of prompts.
        prompt: the prompt's id.
        place: of the answer in the batch.
    """
    return Sampling(temperature, seed=seeded_key(seed, batch, prompt, place) >> 1)
