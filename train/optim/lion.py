"""Lion: the sign of an interpolated running mean (Chen et al. 2023, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gristmill.train.optim.builder import EachParameter
from gristmill.train.optim.dtensor_sums import local


class Lion(EachParameter):
    """One moment, elementwise on the shards of DTensors."""

    def hyperparameters(self) -> dict[str, Any]:
        """Return those of the step and of the mean."""
        return {"betas": self.section.decays}

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Mean of the gradients."""
        return {"exp_avg": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [
                parameter for parameter in group["params"] if parameter.grad is not None
            ]
            if not parameters:
                continue
            weights = [local(parameter) for parameter in parameters]
            gradients = [local(parameter.grad) for parameter in parameters]
            means = [
                local(self.state[parameter]["exp_avg"]) for parameter in parameters
            ]
            first, second = group["betas"]
            # c = beta1 m + (1 - beta1) g; theta -= lr (sign(c) + decay theta); m =
            # beta2 m + (1 - beta2) g
            steps = torch._foreach_lerp(means, gradients, 1.0 - first)
            torch._foreach_sign_(steps)
            torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, steps, alpha=-group["lr"])
            torch._foreach_lerp_(means, gradients, 1.0 - second)


build = Lion
