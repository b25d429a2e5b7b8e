"""Form of `build` in the modules of optimizers, and their parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.mixtures.optimizers import Optimizer

NamedParameters = Sequence[tuple[str, nn.Parameter]]
ZerosLike = Callable[[Tensor], Tensor]
"""Creates a moment of a parameter: zeros with the parameter's placement."""
Build = Callable[[NamedParameters, Optimizer, ZerosLike, int], torch.optim.Optimizer]
"""`build(named, section, zeros_like, steps)` of the module of a kind: creates the
optimizer of some parameters, with its moments, for a training of so many steps.
"""


def decay_groups(named: NamedParameters, section: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups: matrices, which decay, and all others."""
    parameters = [parameter for _, parameter in named]
    return [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": section.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
