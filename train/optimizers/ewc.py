"""Elastic weight consolidation (Kirkpatrick et al. 2017): a penalty on moving weights
that earlier data needs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.train.loop.objective import Objective
from gristmill.train.optimizers.dtensor_sums import local, total_sum


class ElasticWeights:
    """Penalty weight / 2 sum_i F_i (theta_i - theta*_i)^2 of equation 3, with theta*
    the current weights.

    Args:
        model: sharded, before its first step.
        fisher: diagonal of the Fisher information by parameter, sharded as the
            parameter.
        weight: lambda.
    """

    def __init__(
        self, model: nn.Module, fisher: dict[str, Tensor], weight: float
    ) -> None:
        self._model, self._fisher, self._weight = model, fisher, weight
        self._start = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }

    @torch.no_grad()
    def add_gradients(self) -> Tensor:
        """Add the penalty's gradients to the parameters' gradients; returns the penalty
        (a plain scalar).
        """
        penalty = None
        for name, parameter in self._model.named_parameters():
            assert parameter.grad is not None
            moved = parameter.detach() - self._start[name]
            pull = self._fisher[name] * moved
            local(parameter.grad).add_(local(pull), alpha=self._weight)
            term = total_sum(pull * moved)
            penalty = term if penalty is None else penalty + term
        assert penalty is not None
        return penalty * (self._weight / 2)


def fisher_diagonal(
    model: nn.Module, objective: Objective, rows: np.ndarray
) -> dict[str, Tensor]:
    """Diagonal of the Fisher information per token, by parameter and sharded as the
    parameter.

    Mean over rows of (d log p(row) / d theta)^2 / tokens with labels sampled from the
    model. The labels are independent given their prefix, so the expected squared
    gradient of a row is the sum of its tokens' (Martens 2020, section 5; the text's own
    labels would give the empirical Fisher). Every process computes every row: a sum
    over processes does not give gradients of single rows.

    Args:
        model: sharded, without gradients; it has none afterwards.
        objective: of the earlier data.
        rows: numbers of the rows.
    """
    fisher = {
        name: torch.zeros_like(parameter)
        for name, parameter in model.named_parameters()
    }
    for draw, row in enumerate(rows):
        batch = objective.prepare(np.array([row]))
        objective.loss(
            model, batch, objective.weight(np.array([row])) ** -0.5, draw
        ).loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                local(fisher[name]).addcmul_(gradient, gradient, value=1 / len(rows))
                parameter.grad = None
    return fisher
