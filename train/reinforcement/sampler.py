"""Answers drawn from a model in training, by the engine of `train/generation`.

Every process gets the whole of the weights as they are now, adapters merged, in the dtype that the training computes
in, and answers its share of the prompts. What is drawn depends on seed, batch, prompt and the place in the batch
alone: neither on the number of processes nor on who is answered together (but for rounding, where a product's shape
changes it).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gristmill.mixtures.posttraining import Lora
from gristmill.train.adapters.frozen import rounded_weights
from gristmill.train.adapters.lora import DOWN, merged
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request, Scheduler
from gristmill.train.models.llama import Llama
from gristmill.train.models.shape import Shape
from gristmill.train.parallel.world import World
from gristmill.train.reinforcement.policy import is_critic
from gristmill.train.reinforcement.rollouts import Generated

LAYER_PARTS = 3
"""Of a parameter's name, up to its layer: `model.layers.0`."""


class Sampler:
    """Draws from a model that is being trained.

    Args:
        model: sharded; read anew before each batch.
        shape: of the model.
        lora: its adapters, if it has some.
        dtype: that is computed in.
        rows: answers at the same time on this rank.
        world: the processes.
    """

    def __init__(
        self, model: nn.Module, shape: Shape, lora: Lora | None, dtype: torch.dtype, rows: int, world: World
    ) -> None:
        self._model, self._lora, self._rows, self._world = model, lora, rows, world
        with torch.device("meta"):
            twin = Llama(shape).to(dtype)
        self._twin = twin.to_empty(device=world.device).eval().requires_grad_(False)

    def answer(self, requests: Sequence[Request]) -> list[Generated]:
        """An answer to each request, the same on every rank; every rank calls this together, with the same requests."""
        self._refresh()
        own = range(self._world.data_rank, len(requests), self._world.data_size)
        drawn = drawn_by(Scheduler(self._twin, self._rows), [requests[number] for number in own])
        everybody: list[tuple[int, list[Generated]]] = [(self._world.data_rank, drawn)]
        if self._world.size > 1:
            gathered: list[tuple[int, list[Generated]]] = [(0, [])] * self._world.size
            dist.all_gather_object(gathered, everybody[0])
            everybody = gathered
        found: list[Generated] = [Generated([], False)] * len(requests)
        for rank, share in everybody:
            found[rank :: self._world.data_size] = share
        return found

    @torch.no_grad()
    def _refresh(self) -> None:
        """Copy the weights, a layer at a time."""
        own = dict(self._twin.named_parameters())
        for _, layer in groupby(_whole(self._model), key=lambda item: item[0].split(".")[:LAYER_PARTS]):
            tensors = dict(layer)
            for name, tensor in (tensors if self._lora is None else merged(tensors, self._lora)).items():
                own[name].copy_(tensor)


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a policy, without its critic, gathered one by one; those held rounded before their adapters."""
    rounded = rounded_weights(model)
    for name, parameter in model.named_parameters():
        if name.endswith(DOWN) and (weight := rounded.get(f"{name.removesuffix(DOWN)}weight")) is not None:
            yield f"{name.removesuffix(DOWN)}weight", weight.whole(torch.float32)
        if not is_critic(name):
            yield name, parameter.full_tensor()  # type: ignore[attr-defined]


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
    key = hashlib.blake2b(f"{seed}/{batch}/{prompt}/{place}".encode(), digest_size=8).digest()
    return Sampling(temperature, seed=int.from_bytes(key, "little") >> 1)
