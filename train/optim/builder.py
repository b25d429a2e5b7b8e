"""Form of `build` in the modules of optimizers, and their parameter groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.mixtures.schema.optimizer import Optimizer
from gristmill.train.optim.dtensor_sums import local

Parameters = Sequence[nn.Parameter]
Group = dict[str, Any]
"""Group of parameters with their hyperparameters, as in `param_groups`."""
Moments = dict[str, Tensor]
"""State of a parameter, by name."""
Build = Callable[[Parameters, Optimizer], torch.optim.Optimizer]
"""`build(parameters, section)` of the module of a kind: creates the
optimizer of some parameters, with its moments.
"""


def decay_groups(parameters: Parameters, section: Optimizer) -> list[Group]:
    """Return the parameter groups: matrices, which decay, and all others."""
    groups: list[Group] = [
        {
            "params": [parameter for parameter in parameters if parameter.ndim >= 2],
            "weight_decay": section.weight_decay,
        },
        {
            "params": [parameter for parameter in parameters if parameter.ndim < 2],
            "weight_decay": 0.0,
        },
    ]
    return [group for group in groups if group["params"]]


class GuardedOptimizer(torch.optim.Optimizer, ABC):
    """Base of optimizers whose step a flag on the device can skip.

    The flag is an attribute during the step, `found_inf`, a float32 scalar that is 1 for
    a bad step, as for PyTorch's fused AdamW.

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

    @abstractmethod
    def moments(self, parameter: Tensor) -> Moments:
        """State of a parameter before the first step."""

    @abstractmethod
    def update(self, parameters: Parameters, group: Group, good: Tensor) -> None:
        """Update parameters that have gradients, and their state.

        Args:
            parameters: of the group.
            group: hyperparameters.
            good: float32 scalar on the device, factor of every rate: 1, or 0 in a bad
                step, whose gradients are zero.
        """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [
                parameter for parameter in group["params"] if parameter.grad is not None
            ]
            if not parameters:
                continue
            bad: Tensor | None = getattr(self, "found_inf", None)
            if bad is None:
                bad = torch.zeros((), device=parameters[0].device)
            for parameter in parameters:
                local(parameter.grad).masked_fill_(bad.bool(), 0.0)
            self.update(parameters, group, 1.0 - bad)
