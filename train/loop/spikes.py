"""Detection of bad steps: a loss that is not finite, or far above recent losses.

Follows OLMo-core's SkipStepOptimizer: a window of 128 losses, used once it is half
full.
"""

from __future__ import annotations

import torch
from torch import Tensor


def empty_window(device: torch.device, steps: int) -> Tensor:
    """Window of the losses of the last `steps` steps, float32; NaN for missing
    entries.
    """
    return torch.full((steps,), float("nan"), dtype=torch.float32, device=device)


def judge(
    loss: Tensor, gradient_norm: Tensor, window: Tensor, sigma: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Decide on the device, without host synchronisation, if a step must be skipped.

    Args:
        loss: scalar, mean loss of the step.
        gradient_norm: scalar, before clipping.
        window: earlier losses; NaN entries are ignored.
        sigma: standard deviations above the mean that make a loss bad; None accepts any
            finite loss.

    Returns:
        a scalar bool, and the mean and standard deviation of the window.
    """
    is_known = ~window.isnan()
    count = is_known.sum()
    mean = torch.where(is_known, window, 0.0).sum() / count
    variance = (torch.where(is_known, window - mean, 0.0) ** 2).sum() / (count - 1)
    deviation = variance.sqrt()
    bad = ~(loss.isfinite() & gradient_norm.isfinite())
    if sigma is not None:
        bad |= (count >= len(window) // 2) & (loss - mean > sigma * deviation)
    return bad, mean, deviation


def remember_loss(window: Tensor, loss: Tensor, step: int) -> None:
    """Replace the oldest loss of the window.

    Spikes are stored too, so that a lasting change of level is eventually accepted;
    losses that are not finite are stored as NaN.
    """
    window[step % len(window)] = torch.where(loss.isfinite(), loss, float("nan"))
