"""Lion: the sign of an interpolated running mean (Chen et al. 2023, algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gristmill.train.optim.builder import Group, GuardedOptimizer, Moments, Parameters
from gristmill.train.optim.dtensor_sums import gradient_of, local


class Lion(GuardedOptimizer):
    """One moment, elementwise on the shards of DTensors."""

    def hyperparameters(self) -> dict[str, Any]:
        """Return those of the step and of the mean."""
        return {"betas": self.section.decays}

    def moments(self, parameter: Tensor) -> Moments:
        """Mean of the gradients."""
        return {"exp_avg": torch.zeros_like(parameter)}

    def update(self, parameters: Parameters, group: Group, good: Tensor) -> None:
        """Step along the signs.

        c = beta1 m + (1 - beta1) g; theta -= lr (sign(c) + decay theta); m = beta2 m +
        (1 - beta2) g
        """
        weights = [local(parameter) for parameter in parameters]
        gradients = [local(gradient_of(parameter)) for parameter in parameters]
        means = [local(self.state[parameter]["exp_avg"]) for parameter in parameters]
        first, second = group["betas"]
        rate = group["lr"] * good
        steps = torch._foreach_lerp(means, gradients, 1.0 - first)
        torch._foreach_sign_(steps)
        torch._foreach_mul_(steps, rate)
        torch._foreach_mul_(weights, 1.0 - rate * group["weight_decay"])
        torch._foreach_sub_(weights, steps)
        torch._foreach_lerp_(means, gradients, [(1.0 - second) * good] * len(means))


build = Lion
