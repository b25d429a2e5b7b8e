"""muP: learning rates by the width of a matrix, so that one found on a narrow model holds on a wide one.

With m = width / base width (Yang & Hu 2021, "Tensor Programs V", table 8): a matrix of the layers gets 1 / m of Adam's
rate, whose every update has the same size. Muon's updates, scaled to AdamW's root mean square (Liu et al. 2025), have
spectral norms that grow with sqrt(width), where they are to grow not at all (Yang et al. 2023, "A spectral condition
for feature learning"): a matrix gets 1 / sqrt(m). The gain of the last norm, which holds the output multiplier 1 / m
(`train/models/initialisation.py`), moves with 1 / m too: for Adam that is the multiplier itself (lemma J.1).

Decay per step, rate times decay, is the same at every width (Wang & Aitchison 2024, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gristmill.mixtures.training import ON_MATRICES, OptimizerKind
from gristmill.train.models.initialisation import FINAL_NORM, LAYERS

RATE_FACTOR = "lr_factor"
"""The key of a parameter group under which a factor of its learning rate stands."""


def rate_factor(name: str, dimensions: int, width_factor: float, kind: OptimizerKind) -> float:
    """The share of the learning rate that a parameter gets.

    Args:
        name: the parameter's.
        dimensions: 2 of a matrix.
        width_factor: m.
        kind: the optimizer's.
    """
    if LAYERS in name and dimensions == 2:
        return width_factor**-0.5 if kind in ON_MATRICES else 1 / width_factor
    return 1 / width_factor if name.endswith(FINAL_NORM) else 1.0


def scale_rates(
    optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, width_factor: float, kind: OptimizerKind
) -> None:
    """Split groups of parameters by the share of the learning rate that they get."""
    factors = {
        id(parameter): rate_factor(name, parameter.ndim, width_factor, kind)
        for name, parameter in model.named_parameters()
    }
    for optimizer in optimizers:
        groups = []
        for group in optimizer.param_groups:
            for factor in sorted({factors[id(parameter)] for parameter in group["params"]}):
                members = [parameter for parameter in group["params"] if factors[id(parameter)] == factor]
                groups.append(
                    {**group, "params": members, RATE_FACTOR: factor, "weight_decay": group["weight_decay"] / factor}
                )
        optimizer.param_groups = groups
