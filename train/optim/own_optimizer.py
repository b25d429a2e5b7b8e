"""User-defined optimizers: created from the user's code and checked before training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gristmill.dataprep.user_functions import (
    blaming,
    check_call,
    load_function,
    taken_by_name,
    wrong,
)
from gristmill.mixtures.user_code import Own


def own_optimizer(
    own: Own, named: Sequence[tuple[str, nn.Parameter]], learning_rate: float
) -> torch.optim.Optimizer:
    """Create an optimizer by the user's class or function.

    It gets two parameter groups: matrices, and vectors with `weight_decay` 0. Their
    `lr` is set before every step.

    Args:
        own: the code and its options.
        named: trainable parameters by name, sharded.
        learning_rate: at the peak of the schedule; passed as `lr` if the function has
            that parameter.

    Raises:
        OwnCodeError: the code fails, or returns something else than an optimizer of all
            parameters.
    """
    code = own.use
    function = load_function(code)
    rates = dict.fromkeys(taken_by_name(function, ["lr"]), learning_rate)
    options = {**rates, **own.options}
    check_call(code, function, ("params",), options)
    groups = [
        {
            "params": [parameter for _, parameter in named if parameter.ndim >= 2],
            "lr": learning_rate,
        },
        {
            "params": [parameter for _, parameter in named if parameter.ndim < 2],
            "lr": learning_rate,
            "weight_decay": 0.0,
        },
    ]
    with blaming(code):
        optimizer = function([group for group in groups if group["params"]], **options)
    if not isinstance(optimizer, torch.optim.Optimizer):
        returned = type(optimizer).__name__
        raise wrong(own, f"returned {returned}; return a torch.optim.Optimizer")
    updated = {
        id(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    missing = [name for name, parameter in named if id(parameter) not in updated]
    if missing or len(updated) != len(named):
        problem = "has parameters that were not passed to it"
        if missing:
            problem = f"leaves out {missing[0]}, which is trained"
        raise wrong(own, f"made an optimizer that {problem}; give it all of `params`")
    # PyTorch calls step(closure=None) when it loads a checkpoint.
    check_call(code, optimizer.step, (), {"closure": None}, "step")
    optimizer.own_code = code  # type: ignore[attr-defined]
    return optimizer
