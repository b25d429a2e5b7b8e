"""Sophia-G: momentum over a diagonal of the Gauss-Newton matrix, clipped (Liu et al.
2023, algorithms 2 and 3).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gristmill.train.optimizers.builder import EachParameter, Group, ZerosLike
from gristmill.train.optimizers.dtensor_sums import local

SMALLEST_CURVATURE = 1e-12
"""Section 3.1: epsilon."""


class Sophia(EachParameter):
    """Momentum and curvature, elementwise on the shards of DTensors.

    `estimate` takes gradients of the loss against labels sampled from the model. They
    enter with the next step, so a skipped step skips them too.
    """

    @cached_property
    def _estimates(self) -> dict[Tensor, Tensor]:
        return {}

    def hyperparameters(self, steps: int) -> dict[str, Any]:
        """Return those of both means, and the bound of a step."""
        return {"betas": self.section.decays, "gamma": self.section.gamma}

    def moments(
        self, name: str, parameter: Tensor, zeros_like: ZerosLike
    ) -> dict[str, Tensor]:
        """Mean of the gradients, and of the estimates of the curvature."""
        return {"exp_avg": zeros_like(parameter), "hessian": zeros_like(parameter)}

    @torch.no_grad()
    def estimate(self, examples: float) -> None:
        """Take the parameters' gradients as those of sampled labels, and clear them.

        Args:
            examples: B, the number of predictions that the loss averages: the estimate
                is B g * g (algorithm 2).
        """
        self._estimates.update(
            (parameter, local(parameter.grad) ** 2 * examples)
            for group in self.param_groups
            for parameter in group["params"]
        )
        self.zero_grad(set_to_none=True)

    def update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        """Move along the mean over the curvature, clipped."""
        first, second = group["betas"]
        lr = group["lr"]
        state, weight = self.state[parameter], local(parameter)
        mean, hessian = local(state["exp_avg"]), local(state["hessian"])
        mean.lerp_(local(gradient), 1.0 - first)
        if (estimate := self._estimates.pop(parameter, None)) is not None:
            mixed = hessian.lerp(estimate, 1.0 - second)
            hessian.copy_(torch.where(estimate.isfinite(), mixed, hessian))
        weight.mul_(1.0 - lr * group["weight_decay"])
        # Algorithm 3, line 13: theta -= lr clip(m / max(gamma h, eps), 1)
        curvature = (hessian * group["gamma"]).clamp(min=SMALLEST_CURVATURE)
        weight.sub_((mean / curvature).clamp(-1.0, 1.0), alpha=lr)


build = Sophia
