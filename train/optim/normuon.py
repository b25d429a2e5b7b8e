"""NorMuon: Muon with rows of equal size (Li et al. 2025, algorithm 1).

M = beta M + (1 - beta) G;  O = Newton-Schulz(M)
v = beta2 v + (1 - beta2) row means of O * O;  O = O / (sqrt(v) + eps)
W -= lr (lambda W + 0.2 sqrt(rows columns) O / |O|)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gristmill.train.optim.builder import Group, Moments, Parameters
from gristmill.train.optim.dtensor_sums import local, sum_along
from gristmill.train.optim.muon import SMALLEST_NORM, Muon, orthogonalised
from gristmill.train.optim.shared_stacks import give_back, share_out

NEURON_EPS = 1e-8


class NorMuon(Muon):
    """Muon without Nesterov momentum whose rows are divided by their running size."""

    def hyperparameters(self) -> dict[str, Any]:
        """Add that of the rows."""
        return {**super().hyperparameters(), "neuron_beta": self.section.decays[1]}

    def moments(self, parameter: Tensor) -> Moments:
        """Momentum, and variances of rows."""
        rows = sum_along(torch.zeros_like(parameter), -1)
        return {**super().moments(parameter), "row_var": torch.zeros_like(rows)}

    def directions(self, matrices: Parameters, group: Group, good: Tensor) -> Tensor:
        """Orthogonalised momentum with rows of equal size, with the norm of the largest
        side's root.
        """
        states = [self.state[matrix] for matrix in matrices]
        momenta = [state["momentum_buffer"] for state in states]
        row_vars = [state["row_var"] for state in states]
        aligned = orthogonalised(momenta).float()
        row_var = share_out(row_vars)
        row_var.lerp_(
            aligned.square().mean(dim=-1, keepdim=True),
            (1.0 - group["neuron_beta"]) * good,
        )
        for moment, shard in zip(row_vars, give_back(row_var, row_vars), strict=True):
            local(moment).copy_(shard)
        aligned /= row_var.sqrt() + NEURON_EPS
        norms = aligned.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
        return aligned * (math.sqrt(min(matrices[0].shape)) / norms)


build = NorMuon
