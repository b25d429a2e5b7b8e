"""Gradient clipping: global, or adaptive by output unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gristmill.mixtures.sections.optimizers import Optimizer
from gristmill.train.optimizers.dtensor_sums import (
    gradients_of,
    local,
    reduce_partial,
    squared_norm,
    sum_along,
)

SMALLEST_WEIGHT_NORM = 1e-3
"""Epsilon of Brock et al. 2021, section 4: keeps weights that start at zero
trainable.
"""
OUTPUT_MATRIX = "lm_head"
"""Final linear layer, which is not clipped (Brock et al. 2021, section 4.2)."""


@torch.no_grad()
def clip_gradients(model: nn.Module, section: Optimizer) -> Tensor:
    """Clip gradients; returns their global norm before clipping (a plain scalar)."""
    norm = squared_norm(gradients_of(model)).sqrt()
    if section.clip == "adaptive":
        clip_units(model, section.clip_factor)
    else:
        torch.nn.utils.clip_grads_with_norm_(
            model.parameters(), section.clip_norm, norm, foreach=True
        )
    return norm


def clip_units(model: nn.Module, factor: float) -> None:
    """Adaptive gradient clipping (Brock et al. 2021, equation 3), by output unit.

    A unit is a row of a matrix, or a whole vector. The norm of its gradient is at most
    `factor` times the norm of its weights (at least 1e-3).
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is None or name.startswith(OUTPUT_MATRIX):
            continue
        weights, gradients = unit_norms(parameter), unit_norms(parameter.grad)
        limits = weights.clamp(min=SMALLEST_WEIGHT_NORM) * factor
        # The clamp avoids a division by the norm of a zero gradient.
        local(parameter.grad).mul_(
            (limits / gradients.clamp(min=torch.finfo(gradients.dtype).tiny)).clamp(
                max=1.0
            )
        )


def unit_norms(tensor: Tensor) -> Tensor:
    """Norms of the local units over all shards: (rows, 1, ...) for a matrix, (1,) for a
    vector.
    """
    squares = tensor * tensor
    for dim in range(1 if tensor.ndim > 1 else 0, tensor.ndim):
        squares = sum_along(squares, dim)
    return local(reduce_partial(squares)).sqrt()
