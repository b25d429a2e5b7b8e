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


@dataclass
class Sampler:
    """Answers requests with the current policy, by gristmill's scheduler on a copy of
    it.

    Attributes:
        model: sharded; read again before each batch.
        lora: its adapters, if any.
        shape: of the model.
        dtype: of the copy's computation.
        rows: answers at a time.
        world: the processes.
        dialogue: turns and tool calls; an answer is a single turn if absent.
    """

    model: nn.Module
    lora: Lora | None
    shape: StoredShape
    dtype: torch.dtype
    rows: int
    world: World
    dialogue: Dialogue | None = None

    def __post_init__(self) -> None:
        copy: Any = model_of(self.shape)
        for parameter in copy.parameters():
            parameter.data = parameter.data.to(self.dtype)
        allocate(copy, self.world.device)
        self._copy = copy.eval().requires_grad_(False)

    def answer(self, asked: Sequence[Asked]) -> list[Generated]:
        """Answer each request, with the same results on every rank; a collective call
        with the same requests.
        """
        tensors = stored_tensors(self._copy)
        with torch.no_grad():
            for name, tensor in self._weights():
                tensors[name].copy_(tensor)
        rank, size = self.world.data_rank, self.world.data_size
        own = asked[rank::size]
        if self.dialogue is None:
            drawn = self.draw([request.request for request in own])
        else:
            drawn = self.dialogue.answers(self.draw, own)
        shares = [(rank, drawn)]
        if self.world.size > 1:
            shares *= self.world.size
            dist.all_gather_object(shares, (rank, drawn))
        answers: list[Generated] = [Generated([], False)] * len(asked)
        for rank, share in shares:
            answers[rank::size] = share
        return answers

    def draw(self, requests: Sequence[Request]) -> list[Generated]:
        """Answers of one turn."""
        return drawn_by(Scheduler(self._copy, self.rows), requests)

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
