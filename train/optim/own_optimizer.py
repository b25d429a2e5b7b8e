"""An optimizer of the user's: made from its code, after a look at whether a training can use it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gristmill.dataprep.own_functions import blaming, check_call, load_function, taken_by_name
from gristmill.mixtures.own_code import Own, OwnCodeError, OwnFunction


def own_optimizer(own: Own, named: Sequence[tuple[str, nn.Parameter]], learning_rate: float) -> torch.optim.Optimizer:
    """What the user's class or function makes of a model's parameters.

    It gets two groups, matrices and vectors; the vectors' has `weight_decay` 0. Their `lr` is set before every step.

    Args:
        own: the code and its options.
        named: the trained parameters by name, split as they are.
        learning_rate: at the peak of the schedule; given as `lr` to what takes that.

    Raises:
        OwnCodeError: it fails, or what it makes is no optimizer of all these parameters.
    """
    code, function = own.use, load_function(own.use)
    options = {**dict.fromkeys(taken_by_name(function, ["lr"]), learning_rate), **own.options}
    check_call(code, function, ("params",), options)
    groups = [
        {"params": [one for _, one in named if one.ndim >= 2], "lr": learning_rate},
        {"params": [one for _, one in named if one.ndim < 2], "lr": learning_rate, "weight_decay": 0.0},
    ]
    with blaming(code):
        made = function([group for group in groups if group["params"]], **options)
    if not isinstance(made, torch.optim.Optimizer):
        raise OwnCodeError(f"{code.place}: {code.name} returned {type(made).__name__}; return a torch.optim.Optimizer")
    has = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in named if id(parameter) not in has]
    if missing or len(has) != len(named):
        what = f"leaves out {missing[0]}, which is trained" if missing else "has parameters that were not given to it"
        raise OwnCodeError(f"{code.place}: the optimizer of {code.name} {what}; give it all of `params`")
    # PyTorch calls it so where a checkpoint is loaded.
    check_call(code, made.step, (), {"closure": None}, "step")
    made.own_code = code  # type: ignore[attr-defined]
    return made


def own_code_of(optimizer: torch.optim.Optimizer) -> OwnFunction | None:
    """The user's code that an optimizer was made by; None of a built-in one."""
    code: OwnFunction | None = getattr(optimizer, "own_code", None)
    return code


def step_own(code: OwnFunction, optimizer: torch.optim.Optimizer, bad: torch.Tensor) -> None:
    """A step of the user's optimizer, unless it is a bad one, for which the device is asked: what a step would change
    of the optimizer's own state cannot be known beforehand.

    Raises:
        OwnCodeError: it fails.
    """
    if not bad.item():
        with blaming(code):
            optimizer.step()
