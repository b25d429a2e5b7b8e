"""Form of `build` in the modules of optimizers, and their parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.mixtures.sections.optimizers import Optimizer

NamedParameters = Sequence[tuple[str, nn.Parameter]]
ZerosLike = Callable[[Tensor], Tensor]
"""Creates a moment of a parameter: zeros with the parameter's placement."""
Group = dict[str, Any]
"""Group of parameters with their hyperparameters, as in `param_groups`."""
Build = Callable[[NamedParameters, Optimizer, ZerosLike, int], torch.optim.Optimizer]
"""`build(named, section, zeros_like, steps)` of the module of a kind: creates the
optimizer of some parameters, with its moments, for a training of so many steps.
"""


def decay_groups(named: NamedParameters, section: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups: matrices, which decay, and all others."""
    matrices = [parameter for _, parameter in named if parameter.ndim >= 2]
    vectors = [parameter for _, parameter in named if parameter.ndim < 2]
    groups = [(matrices, section.weight_decay), (vectors, 0.0)]
    return [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in groups
        if parameters
    ]


class EachParameter(torch.optim.Optimizer):
    """Frame of the optimizers that update their parameters one by one.

    Args:
        named: the parameters.
        section: settings.
        zeros_like: creates a moment.
        steps: of the training.
    """

    def __init__(
        self,
        named: NamedParameters,
        section: Optimizer,
        zeros_like: ZerosLike = torch.zeros_like,
        steps: int = 0,
    ) -> None:
        self.section = section
        defaults = {"lr": section.learning_rate, **self.hyperparameters(steps)}
        super().__init__(decay_groups(named, section), defaults)
        for name, parameter in named:
            self.state[parameter].update(self.moments(name, parameter, zeros_like))

    def hyperparameters(self, steps: int) -> dict[str, Any]:
        """Settings of `update`, which checkpoints hold in `param_groups`."""
        return {}

    def moments(
        self, name: str, parameter: Tensor, zeros_like: ZerosLike
    ) -> dict[str, Tensor]:
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
