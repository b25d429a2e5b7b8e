"""Which optimizer steps are bad: a loss that is not a number, or lies far above the recent ones.

After OLMo-core's SkipStepOptimizer: 128 losses are remembered, and judged by once there are 64.
"""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW_STEPS = 128
ACTIVE_AFTER_STEPS = 64


def empty_window(device: torch.device) -> Tensor:
    """The losses of the last WINDOW_STEPS steps, (128,) float32; NaN where there is none yet."""
    return torch.full((WINDOW_STEPS,), float("nan"), dtype=torch.float32, device=device)


def is_bad_step(loss: Tensor, gradient_norm: Tensor, window: Tensor, sigma: float) -> Tensor:
    """Whether this step's update must not happen: a scalar bool on the device, decided without asking the host.

    Args:
        loss: scalar, the step's mean loss.
        gradient_norm: scalar, before clipping.
        window: the losses before this one; those that are NaN do not count.
        sigma: how many standard deviations over their mean are too many.
    """
    known = ~window.isnan()
    count = known.sum()
    values = torch.where(known, window, 0.0)
    mean = values.sum() / count
    variance = (torch.where(known, window - mean, 0.0) ** 2).sum() / (count - 1)
    spike = (count >= ACTIVE_AFTER_STEPS) & (loss - mean > sigma * variance.sqrt())
    return ~(loss.isfinite() & gradient_norm.isfinite()) | spike


def remember_loss(window: Tensor, loss: Tensor, step: int) -> None:
    """Put a loss into the window, in place of the oldest.

    A spike is remembered too, so that a lasting change of level is accepted in the end; what is not finite is not.
    """
    window[step % WINDOW_STEPS] = torch.where(loss.isfinite(), loss, float("nan"))
