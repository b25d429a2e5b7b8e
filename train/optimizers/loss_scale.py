"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2), decided on
the device.

Gradients below float16's range would vanish, so the loss is multiplied before the
backward pass and the gradients are divided after it. An overflow skips the step and
halves the scale; after enough good steps the scale doubles.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gristmill.train.optimizers.dtensor_sums import gradients_of, local

INITIAL, GROWTH, BACKOFF, GROWTH_STEPS = 2.0**16, 2.0, 0.5, 2000
"""PyTorch's GradScaler."""


class LossScale:
    """Loss scale and the number of good steps since its last change.

    Args:
        device: where the training computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.tensor(INITIAL, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.float32, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint, loaded in place."""
        return {"value": self.value, "good_steps": self._good_steps}

    @torch.no_grad()
    def divide(self, model: nn.Module) -> None:
        """Divide all gradients by the scale."""
        gradients = list(map(local, gradients_of(model)))
        torch._foreach_mul_(gradients, self.value.reciprocal())

    @torch.no_grad()
    def follow(self, overflow: Tensor) -> None:
        """Shrink after an overflow (a scalar bool on the device); grow after enough
        steps without one.
        """
        good = torch.where(overflow, 0.0, self._good_steps + 1.0)
        grown = good >= GROWTH_STEPS
        factor = torch.where(overflow, BACKOFF, torch.where(grown, GROWTH, 1.0))
        self.value.mul_(factor)
        self._good_steps.copy_(torch.where(grown, 0.0, good))
