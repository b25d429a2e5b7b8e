"""How gradients are kept from being too large: all together, or unit by unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gristmill.mixtures.training import Optimizer
from gristmill.train.optim.sharded import local, settled, squared_norm, sum_along
from gristmill.train.parallel.pipeline_parallel import over_stages

SMALLEST_WEIGHT_NORM = 1e-3
"""Brock et al. 2021, section 4: epsilon, so that what starts at zero is not frozen."""
OUTPUT_MATRIX = "lm_head"
"""Brock et al. 2021, section 4.2: the final linear layer is not clipped."""


@torch.no_grad()
def clip_gradients(model: nn.Module, section: Optimizer) -> Tensor:
    """Scale gradients down as the section says; returns their global norm before (a plain scalar)."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = over_stages(model, squared_norm(gradients)).sqrt()
    if section.clip == "adaptive":
        clip_units(model, section.clip_factor)
    else:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), section.clip_norm, norm, foreach=True)
    return norm


def clip_units(model: nn.Module, factor: float) -> None:
    """Adaptive gradient clipping (Brock et al. 2021, equation 3), by output unit.

    A unit is a row of a matrix, or a whole vector. Its gradient is scaled to `factor` times the norm of its weights
    (at least 1e-3) where it is longer than that.
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is None or name.startswith(OUTPUT_MATRIX):
            continue
        weights, gradients = unit_norms(parameter), unit_norms(parameter.grad)
        most = weights.clamp(min=SMALLEST_WEIGHT_NORM) * factor
        # Where the gradient is zero there is nothing to clip, and nothing to divide by.
        local(parameter.grad).mul_((most / gradients.clamp(min=torch.finfo(gradients.dtype).tiny)).clamp(max=1.0))


def unit_norms(tensor: Tensor) -> Tensor:
    """Norms of this process's units: (rows, 1, ...) for a matrix, (1,) for a vector; over all their shares."""
    squares = tensor * tensor
    for dim in range(1 if tensor.ndim > 1 else 0, tensor.ndim):
        squares = sum_along(squares, dim)
    return local(settled(squares)).sqrt()
