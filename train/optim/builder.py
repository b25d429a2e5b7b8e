"""Form of `build` in the modules of optimizers, and their parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.mixtures.schema.optimizer import Optimizer

Parameters = Sequence[nn.Parameter]
Group = dict[str, Any]
"""Group of parameters with their hyperparameters, as in `param_groups`."""
Build = Callable[[Parameters, Optimizer], torch.optim.Optimizer]
"""`build(parameters, section)` of the module of a kind: creates the
optimizer of some parameters, with its moments.
"""


def decay_groups(parameters: Parameters, section: Optimizer) -> list[Group]:
    """Return the parameter groups: matrices, which decay, and all others."""
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [(matrices, section.weight_decay), (vectors, 0.0)]
    return [
        {"params": members, "weight_decay": decay}
        for members, decay in groups
        if members
    ]


class EachParameter(torch.optim.Optimizer):
    """Frame of the optimizers that update their parameters one by one.

    Args:
        parameters: those to update.
        section: settings.
    """

    def __init__(self, parameters: Parameters, section: Optimizer) -> None:
        self.section = section
        defaults = {"lr": section.learning_rate, **self.hyperparameters()}
        super().__init__(decay_groups(parameters, section), defaults)
        for parameter in parameters:
            self.state[parameter].update(self.moments(parameter))

    def hyperparameters(self) -> dict[str, Any]:
        """Settings of `update`, which checkpoints hold in `param_groups`."""
        return {}

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """State of a parameter before the first step."""
        raise NotImplementedError

    def update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        """Update a parameter and its state."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)
