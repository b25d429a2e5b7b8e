"""Sampling of answers from a model in training: every process gets the full weights,
and answers its share.

The weights are the current ones, with adapters merged, in the dtype of the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gristmill.core.seeds import seeded_key
from gristmill.mixtures.schema.posttraining import Lora
from gristmill.train.adapters.lora import DOWN, merged, rounded_weights
from gristmill.train.distributed.fsdp import gathered
from gristmill.train.distributed.process_groups import World
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request, Scheduler
from gristmill.train.models.encoder import model_of
from gristmill.train.models.model_config import StoredShape
from gristmill.train.models.weights import (
    allocate,
    stored_buffers,
    stored_tensors,
)
from gristmill.train.rl.multi_turn import Asked, Dialogue
from gristmill.train.rl.rollout import Generated

LAYER_PARTS = 3
"""Parts of a parameter's name up to its layer: `model.layers.0`."""


class Engine:
    """Gristmill's scheduler on a copy of the policy, on the training device.

    Args:
        shape: of the model.
        dtype: of the computation.
        rows: answers at a time.
        device: of the copy.
    """

    def __init__(
        self,
        shape: StoredShape,
        dtype: torch.dtype,
        rows: int,
        device: torch.device,
    ) -> None:
        self._rows = rows
        with torch.device("meta"):
            copy = model_of(shape)
        for parameter in copy.parameters():
            parameter.data = parameter.data.to(dtype)
        allocate(copy, device)
        self._copy: Any = copy.eval().requires_grad_(False)

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load the policy's current weights, by name."""
        tensors = stored_tensors(self._copy)
        for name, tensor in weights:
            tensors[name].copy_(tensor)

    def draw(self, requests: Sequence[Request]) -> list[Generated]:
        """Answer each request."""
        return drawn_by(Scheduler(self._copy, self._rows), requests)


@dataclass(frozen=True)
class Sampler:
    """Answers requests with the current policy.

    Attributes:
        model: sharded; read again before each batch.
        lora: its adapters, if any.
        engine: samples on this rank.
        world: the processes.
        dialogue: turns and tool calls; an answer is a single turn if absent.
    """

    model: nn.Module
    lora: Lora | None
    engine: Engine
    world: World
    dialogue: Dialogue | None = None

    def answer(self, asked: Sequence[Asked]) -> list[Generated]:
        """Answer each request, with the same results on every rank; a collective call
        with the same requests.
        """
        self.engine.load(self._weights())
        rank, size = self.world.data_rank, self.world.data_size
        rank_requests = asked[rank::size]
        if self.dialogue is None:
            drawn = self.engine.draw([request.request for request in rank_requests])
        else:
            drawn = self.dialogue.answers(self.engine.draw, rank_requests)
        shares = [(rank, drawn)]
        if self.world.size > 1:
            shares *= self.world.size
            dist.all_gather_object(shares, (rank, drawn))
        answers: list[Generated] = [Generated([], False)] * len(asked)
        for rank, share in shares:
            answers[rank::size] = share
        return answers

    @torch.no_grad()
    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, adapters merged, layer by layer."""
        for _, layer in groupby(
            _whole(self.model), key=lambda item: item[0].split(".")[:LAYER_PARTS]
        ):
            tensors = dict(layer)
            yield from (
                tensors if self.lora is None else merged(tensors, self.lora)
            ).items()


def _whole(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights of a policy, gathered one by one; rounded ones precede their adapters."""
    rounded = rounded_weights(model)
    for name, parameter in model.named_parameters():
        if (
            name.endswith(DOWN)
            and (weight := rounded.get(f"{name.removesuffix(DOWN)}weight")) is not None
        ):
            yield f"{name.removesuffix(DOWN)}weight", weight.whole(torch.float32)
        yield name, gathered(parameter)
    yield from stored_buffers(model).items()


def drawn_by(scheduler: Scheduler, requests: Sequence[Request]) -> list[Generated]:
    """Answers to the requests; the scheduler must be idle."""
    numbers = [scheduler.add(request) for request in requests]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    ended: set[int] = set()
    while not scheduler.is_idle:
        for chunk in scheduler.step():
            tokens[chunk.number] += chunk.tokens
            if chunk.stop is not None:
                # The stop token is sampled and trained on like any other token.
                tokens[chunk.number].append(chunk.stop)
                ended.add(chunk.number)
    return [Generated(tokens[number], number in ended) for number in numbers]


def sampling_of(
    temperature: float, seed: int, batch: int, prompt: str, place: int
) -> Sampling:
    """Sampling parameters of an answer.

    Args:
        temperature: logits are divided by it.
        seed: of the training.
        batch: the number of the batch of prompts.
        prompt: the prompt's id.
        place: index of the answer in the batch.
    """
    return Sampling(temperature, seed=seeded_key(seed, batch, prompt, place) >> 1)
