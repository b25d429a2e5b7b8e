"""Averages of the trained weights: exponential (EMA) or uniform (SWA)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gristmill.mixtures.schema.pretrain import Average
from gristmill.train.models.tensor_files import Tensors
from gristmill.train.optim.dtensor_sums import local, trainable


class AveragedWeights:
    """Running mean of a model's trainable weights, sharded as they are.

    Args:
        model: sharded.
        section: kind of mean, start and interval.
        steps: of the whole training.
    """

    def __init__(self, model: nn.Module, section: Average, steps: int) -> None:
        self._model, self._section = model, section
        self._start = round(section.start_fraction * steps)
        self._weights = {
            name: parameter.detach().clone()
            for name, parameter in trainable(self._model)
        }
        self._count = torch.zeros(
            (), dtype=torch.float32, device=next(model.parameters()).device
        )

    def tensors(self) -> Tensors:
        """State for a checkpoint, loaded in place."""
        return {**self._weights, "count": self._count}

    @torch.no_grad()
    def follow(self, step: int, bad: Tensor) -> None:
        """Add the weights after a step (counted from 1); a skipped step does not count.

        The mean equals the weights until averaging starts, so the untrained model is
        not part of it.
        """
        if step > self._start and (step - self._start) % self._section.every:
            return
        if step <= self._start:
            share = torch.ones_like(self._count)
        elif self._section.kind == "swa":
            share = 1.0 / (self._count + 1.0)
        else:  # The first weights start the mean, which decays from then on.
            share = torch.where(self._count == 0, 1.0, 1.0 - self._section.decay)
        for name, parameter in trainable(self._model):
            mean = local(self._weights[name])
            mean.lerp_(local(parameter), torch.where(bad, 0.0, share).to(mean.dtype))
        if step > self._start:
            self._count += (~bad).float()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Swap the averaged weights into the model, and restore its own weights
        bit-equal on exit.
        """
        weights = {
            name: local(parameter).detach().clone()
            for name, parameter in trainable(self._model)
        }
        self._put({name: local(tensor) for name, tensor in self._weights.items()})
        try:
            yield
        finally:
            self._put(weights)

    @torch.no_grad()
    def _put(self, weights: Tensors) -> None:
        for name, parameter in trainable(self._model):
            local(parameter).copy_(weights[name])
