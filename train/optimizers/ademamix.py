"""AdEMAMix: AdamW with a second, much slower mean of the gradients (Pagliardini et al.
2024, algorithm 1).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gristmill.train.optimizers.builder import EachParameter, Group, ZerosLike
from gristmill.train.optimizers.dtensor_sums import local
from gristmill.train.optimizers.offload import STEP


class AdEMAMix(EachParameter):
    """Three moments, elementwise on the shards of DTensors, without host
    synchronisation.
    """

    def hyperparameters(self, steps: int) -> dict[str, Any]:
        """Return those of three means; by default the slow one takes effect over the
        whole training.
        """
        section = self.section
        return {
            "betas": section.decays,
            "beta3": section.beta3,
            "alpha": section.alpha,
            "rise_steps": steps if section.rise_steps is None else section.rise_steps,
            "eps": section.eps,
        }

    def moments(
        self, name: str, parameter: Tensor, zeros_like: ZerosLike
    ) -> dict[str, Tensor]:
        """Step, two means and the mean square."""
        return {
            STEP: torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": zeros_like(parameter),
            "exp_avg_slow": zeros_like(parameter),
            "exp_avg_sq": zeros_like(parameter),
        }

    def update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        """Move along both means over the root of the mean square."""
        fast, squares = group["betas"]
        state = self.state[parameter]
        gradient, weight = local(gradient), local(parameter)
        step = state[STEP]
        step += 1
        beta3, alpha = scheduled_slow_mean(
            step, fast, group["beta3"], group["alpha"], group["rise_steps"]
        )
        mean, slow, square = (
            local(state[name]) for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq")
        )
        mean.lerp_(gradient, 1.0 - fast)
        slow.lerp_(gradient, (1.0 - beta3).to(slow.dtype))
        square.lerp_(gradient * gradient, 1.0 - squares)
        # The slow mean has no bias correction: its weight warms up instead
        # (section 3).
        direction = mean / (1.0 - fast**step) + alpha * slow
        direction /= (square / (1.0 - squares**step)).sqrt_().add_(group["eps"])
        lr = group["lr"]
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
