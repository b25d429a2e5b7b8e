"""Gradient clipping by the global norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gristmill.train.optim.dtensor_sums import gradients_of, total_norm


@torch.no_grad()
def clip_gradients(model: nn.Module, largest_norm: float) -> Tensor:
    """Clip gradients; returns their global norm before clipping (a plain scalar)."""
    norm = total_norm(gradients_of(model))
    torch.nn.utils.clip_grads_with_norm_(
        model.parameters(), largest_norm, norm, foreach=True
    )
    return norm
