"""Which optimizer steps are bad: a loss that is not a number, or lies far above the recent ones.

After OLMo-core's SkipStepOptimizer: 128 losses are remembered, and judged by once there are half of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


def empty_window(device: torch.device, steps: int) -> Tensor:
    """The losses of the last `steps` steps, float32; NaN where there is none yet."""
    return torch.full((steps,), float("nan"), dtype=torch.float32, device=device)


def window_statistics(window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How many losses are known, their mean and their standard deviation: scalars on the device."""
    known = ~window.isnan()
    count = known.sum()
    mean = torch.where(known, window, 0.0).sum() / count
    variance = (torch.where(known, window - mean, 0.0) ** 2).sum() / (count - 1)
    return count, mean, variance.sqrt()


def judge(loss: Tensor, gradient_norm: Tensor, window: Tensor, sigma: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Whether a step's update must not happen: decided on the device, without asking the host.

    Args:
        loss: scalar, the step's mean loss.
        gradient_norm: scalar, before clipping.
        window: the losses before this one; those that are NaN do not count.
        sigma: how many standard deviations over their mean are too many; None: any number is a good loss.

    Returns:
        a scalar bool, and the mean and the deviation that it was judged by.
    """
    count, mean, deviation = window_statistics(window)
    bad = ~(loss.isfinite() & gradient_norm.isfinite())
    if sigma is not None:
        bad |= (count >= len(window) // 2) & (loss - mean > sigma * deviation)
    return bad, mean, deviation


def remember_loss(window: Tensor, loss: Tensor, step: int) -> None:
    """Put a loss into the window, in place of the oldest.

    A spike is remembered too, so that a lasting change of level is accepted in the end; what is not finite is not.
    """
    window[step % len(window)] = torch.where(loss.isfinite(), loss, float("nan"))


@dataclass(frozen=True)
class Streak:
    """Bad steps that follow one another, as far as they are known.

    Attributes:
        length: how many the last ones are; 0 after a good one.
        due: the first step of a streak that became long enough to roll back, until that is done.
    """

    length: int = 0
    due: int | None = None

    def after(self, step: int, bad: bool, enough: int | None) -> Streak:
        """The streak after one more step; `enough` in a row make a rollback due (None: never)."""
        if not bad:
            return replace(self, length=0)
        length = self.length + 1
        if self.due is None and enough is not None and length >= enough:
            return Streak(length, step - length + 1)
        return replace(self, length=length)


def rollback_step(due: int, every: int) -> int:
    """The step to roll back to: the last multiple of `every` before the first bad step; 0 is the start."""
    return (due - 1) // every * every
