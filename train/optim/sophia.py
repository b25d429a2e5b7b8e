"""Sophia-G: momentum over a diagonal of the Gauss-Newton matrix, clipped (Liu et al.
2023, algorithms 2 and 3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gristmill.mixtures.optimizers import Optimizer
from gristmill.train.optim.builder import NamedParameters, ZerosLike, decay_groups
from gristmill.train.optim.dtensor_sums import local

SMALLEST_CURVATURE = 1e-12
"""Section 3.1: epsilon."""


class Sophia(torch.optim.Optimizer):
    """Momentum and curvature, elementwise on the shards of DTensors.

    `estimate` takes gradients of the loss against labels sampled from the model. They
    enter with the next step, so a skipped step skips them too.
    """

    def __init__(
        self,
        named: NamedParameters,
        section: Optimizer,
        zeros_like: ZerosLike = torch.zeros_like,
        steps: int = 0,
    ) -> None:
        super().__init__(
            decay_groups(named, section),
            {
                "lr": section.learning_rate,
                "betas": section.decays,
                "gamma": section.gamma,
            },
        )
        self._estimates: dict[torch.Tensor, torch.Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(
                    exp_avg=zeros_like(parameter), hessian=zeros_like(parameter)
                )

    @torch.no_grad()
    def estimate(self, examples: float) -> None:
        """Take the parameters' gradients as those of sampled labels, and clear them.

        Args:
            examples: B, the number of predictions that the loss averages: the estimate
                is B g * g (algorithm 2).
        """
        self._estimates = {
            parameter: local(parameter.grad) ** 2 * examples
            for group in self.param_groups
            for parameter in group["params"]
        }
        self.zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter."""
        parameters = [
            (group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
        ]
        for group, parameter in parameters:
            state, lr = self.state[parameter], group["lr"]
            mean, hessian, weight = (
                local(state["exp_avg"]),
                local(state["hessian"]),
                local(parameter),
            )
            mean.lerp_(local(parameter.grad), 1.0 - group["betas"][0])
            if (estimate := self._estimates.pop(parameter, None)) is not None:
                mixed = hessian.lerp(estimate, 1.0 - group["betas"][1])
                hessian.copy_(torch.where(estimate.isfinite(), mixed, hessian))
            weight.mul_(1.0 - lr * group["weight_decay"])
            # Algorithm 3, line 13: theta -= lr clip(m / max(gamma h, eps), 1)
            weight.sub_(
                (mean / (hessian * group["gamma"]).clamp(min=SMALLEST_CURVATURE)).clamp(
                    -1.0, 1.0
                ),
                alpha=lr,
            )


build = Sophia
