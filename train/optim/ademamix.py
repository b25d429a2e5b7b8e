"""AdEMAMix: AdamW with a second, much slower mean of the gradients (Pagliardini et al.
2024, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gristmill.mixtures.optimizers import Optimizer
from gristmill.train.optim.builder import NamedParameters, ZerosLike, decay_groups
from gristmill.train.optim.dtensor_sums import local
from gristmill.train.optim.offload import STEP


class AdEMAMix(torch.optim.Optimizer):
    """Three moments, elementwise on the shards of DTensors, without host
    synchronisation.
    """

    def __init__(
        self,
        named: NamedParameters,
        section: Optimizer,
        zeros_like: ZerosLike = torch.zeros_like,
        steps: int = 0,
    ) -> None:
        rise_steps = section.rise_steps
        super().__init__(
            decay_groups(named, section),
            {
                "lr": section.learning_rate,
                "betas": section.decays,
                "beta3": section.beta3,
                "alpha": section.alpha,
                "rise_steps": steps if rise_steps is None else rise_steps,
                "eps": section.eps,
            },
        )
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(
                    {
                        STEP: torch.zeros(
                            (), dtype=torch.float32, device=parameter.device
                        )
                    },
                    exp_avg=zeros_like(parameter),
                    exp_avg_slow=zeros_like(parameter),
                    exp_avg_sq=zeros_like(parameter),
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            (fast, squares), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient, weight = (
                    self.state[parameter],
                    local(parameter.grad),
                    local(parameter),
                )
                step = state[STEP]
                step += 1
                beta3, alpha = scheduled_slow_mean(
                    step, fast, group["beta3"], group["alpha"], group["rise_steps"]
                )
                mean, slow, square = (
                    local(state[name])
                    for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq")
                )
                mean.lerp_(gradient, 1.0 - fast)
                slow.lerp_(gradient, (1.0 - beta3).to(slow.dtype))
                square.lerp_(gradient * gradient, 1.0 - squares)
                # The slow mean has no bias correction: its weight warms up instead
                # (section 3).
                direction = mean / (1.0 - fast**step) + alpha * slow
                direction /= (square / (1.0 - squares**step)).sqrt_().add_(group["eps"])
                weight.mul_(1.0 - lr * group["weight_decay"]).sub_(direction, alpha=lr)


def scheduled_slow_mean(
    step: Tensor, fast: float, beta3: float, alpha: float, steps: int
) -> tuple[Tensor, Tensor]:
    """beta3 and alpha of a step: alpha rises linearly, beta3 with a linear half-life
    (section 3, schedulers).

    Args:
        step: counted from 1, a scalar.
        fast: initial beta3.
        beta3, alpha: final values.
        steps: of the warm-up; 0 for none.
    """
    if not steps:
        return torch.full_like(step, beta3), torch.full_like(step, alpha)
    share = (step / steps).clamp(max=1.0)
    if not fast or not beta3:
        return torch.full_like(step, beta3), share * alpha
    first, last = math.log(fast), math.log(beta3)
    return torch.exp(first * last / ((1.0 - share) * last + share * first)).clamp(
        max=beta3
    ), share * alpha


build = AdEMAMix
