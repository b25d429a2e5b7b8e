"""Elastic weight consolidation (Kirkpatrick et al. 2017): weights that earlier data needed are held where they were."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.train.loop.objective import Objective
from gristmill.train.optim.sharded import local, whole_sum


class ElasticWeights:
    """The penalty weight / 2 sum_i F_i (theta_i - theta*_i)^2 of equation 3, where theta* are the weights now.

    Args:
        model: sharded, before its first step.
        fisher: the diagonal of the Fisher information by parameter, sharded as they are.
        weight: lambda.
    """

    def __init__(self, model: nn.Module, fisher: dict[str, Tensor], weight: float) -> None:
        self._model, self._fisher, self._weight = model, fisher, weight
        self._start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def add_gradients(self) -> Tensor:
        """Add the penalty's gradients to those that the parameters have; returns the penalty (a plain scalar)."""
        penalty = None
        for name, parameter in self._model.named_parameters():
            assert parameter.grad is not None
            moved = parameter.detach() - self._start[name]
            pull = self._fisher[name] * moved
            local(parameter.grad).add_(local(pull), alpha=self._weight)
            part = whole_sum(pull * moved)
            penalty = part if penalty is None else penalty + part
        assert penalty is not None
        return penalty * (self._weight / 2)


def fisher_diagonal(model: nn.Module, objective: Objective, rows: np.ndarray) -> dict[str, Tensor]:
    """The diagonal of the Fisher information per token, by parameter, sharded as they are.

    The mean over rows of (d log p(row) / d theta)^2 / tokens, with labels that the model draws itself: given what
    precedes them they are independent, so that a row's squared gradient is on average the sum of its tokens' (Martens
    2020, section 5; with the text's own labels it would be the empirical Fisher, which is something else). Every
    process computes every row, as gradients of single rows are not to be had from a sum over processes.

    Args:
        model: sharded, without gradients; it has none afterwards.
        objective: of the earlier data.
        rows: numbers of the rows to take.
    """
    found = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for draw, row in enumerate(rows):
        part = objective.prepare(np.array([row]))
        objective.loss(model, part, objective.weight(np.array([row])) ** -0.5, draw).loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                local(found[name]).addcmul_(gradient, gradient, value=1 / len(rows))
                parameter.grad = None
    return found
