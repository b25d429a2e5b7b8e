"""A second set of weights that follows the trained ones: exponential (EMA) or plain (SWA) means of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gristmill.mixtures.training import Average
from gristmill.train.optim.sharded import local


class AveragedWeights:
    """The mean of a model's trained weights along the way, sharded as they are.

    Args:
        model: sharded.
        section: which mean, from when on, how often.
        steps: of the whole training.
    """

    def __init__(self, model: nn.Module, section: Average, steps: int) -> None:
        self._model, self._section = model, section
        self._start = round(section.start_fraction * steps)
        self._weights = {name: parameter.detach().clone() for name, parameter in self._trained()}
        device = next(model.parameters()).device
        self._count = torch.zeros((), dtype=torch.float32, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """The state, for a checkpoint; filled in place when one is loaded."""
        return {**self._weights, "count": self._count}

    @torch.no_grad()
    def follow(self, step: int, bad: Tensor) -> None:
        """Take in the weights after a step (counted from 1); a step that was held back does not count again.

        Until averaging starts the mean is the weights themselves, so that nothing of the untrained model is in it.
        """
        if step > self._start and (step - self._start) % self._section.every:
            return
        share = self._share(step)
        for name, parameter in self._trained():
            mean = local(self._weights[name])
            mean.lerp_(local(parameter), torch.where(bad, 0.0, share).to(mean.dtype))
        if step > self._start:
            self._count += (~bad).float()

    def _share(self, step: int) -> Tensor:
        """How much of the new mean the present weights are."""
        if step <= self._start:
            return torch.ones_like(self._count)
        if self._section.kind == "swa":
            return 1.0 / (self._count + 1.0)
        # The first one starts the mean; from then on it forgets at the given rate.
        return torch.where(self._count == 0, 1.0, 1.0 - self._section.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within this the model has the mean weights; afterwards its own ones again, bit by bit."""
        own = {name: local(parameter).detach().clone() for name, parameter in self._trained()}
        self._put({name: local(tensor) for name, tensor in self._weights.items()})
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self._trained():
            local(parameter).copy_(weights[name])

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that are not frozen: the mean of the others is what they are."""
        return [(name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad]
