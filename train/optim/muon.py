"""Muon: orthogonalised momentum for the layers' matrices (Jordan et al. 2024).

    M = beta M + (1 - beta) G;  O = Newton-Schulz(beta M + (1 - beta) G)
    W -= lr (lambda W + 0.2 sqrt(max(rows, columns)) O)

Updates have the root mean square of AdamW's (Liu et al. 2025, "Muon is scalable for LLM
training", section 2.2), so both share learning rate and decay. Cautious decay applies
lambda W only where it has the sign of the update (Chen et al. 2025, "Cautious Weight
Decay").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.train.optim.builder import Group, GuardedOptimizer, Moments, Parameters
from gristmill.train.optim.dtensor_sums import gradient_of, local
from gristmill.train.optim.shared_stacks import give_back, share_out, stacks_of

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Coefficients and number of the quintic iterations (Jordan et al. 2024)."""
ADAMWS_RMS = 0.2
"""Root mean square of AdamW's updates (Liu et al. 2025, section 2.2)."""
SMALLEST_NORM = 1e-7


class Muon(GuardedOptimizer):
    """Muon with Nesterov momentum, on plain and sharded matrices.

    Matrices of one shape are orthogonalised together, each process its share of them.
    Gradients are overwritten.
    """

    def hyperparameters(self) -> dict[str, Any]:
        """Return those of the momentum and of the decay."""
        return {
            "momentum": self.section.momentum,
            "cautious": self.section.cautious_decay,
        }

    def moments(self, parameter: Tensor) -> Moments:
        """Momentum."""
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def update(self, parameters: Parameters, group: Group, good: Tensor) -> None:
        """Move along the orthogonalised momentum."""
        for matrices in stacks_of(parameters):
            for matrix in matrices:
                momentum = local(self.state[matrix]["momentum_buffer"])
                momentum.lerp_(
                    local(gradient_of(matrix)), (1.0 - group["momentum"]) * good
                )
            move(matrices, self.directions(matrices, group, good), group, good)

    def directions(self, matrices: Parameters, group: Group, good: Tensor) -> Tensor:
        """Directions of this process's share of matrices of one shape, (k, m, n); see
        `move`.
        """
        for matrix in matrices:
            local(gradient_of(matrix)).lerp_(
                local(self.state[matrix]["momentum_buffer"]), group["momentum"]
            )
        return orthogonalised([gradient_of(matrix) for matrix in matrices])


def move(matrices: Parameters, directions: Tensor, group: Group, good: Tensor) -> None:
    """Decay matrices of one shape, and move them along directions with singular values
    near 1, of which each process has its share (k, m, n).
    """
    scale = ADAMWS_RMS * math.sqrt(max(matrices[0].shape))
    rate = group["lr"] * good
    for matrix, direction in zip(
        matrices, give_back(directions, matrices), strict=True
    ):
        weight = local(matrix)
        decay = weight * group["weight_decay"]
        if group.get("cautious"):
            decay *= direction * weight >= 0
        weight.addcmul_(decay.add_(direction, alpha=scale), rate, value=-1.0)


def orthogonalised(tensors: Sequence[Tensor]) -> Tensor:
    """Orthogonalise this process's share of sharded matrices of one shape, (k, m, n);
    they are exchanged in bfloat16.
    """
    return newton_schulz(share_out(tensors, torch.bfloat16))


def newton_schulz(matrices: Tensor) -> Tensor:
    """Approximate U V^T of each matrix U S V^T of a stack (k, m, n) in bfloat16: its
    singular values end near 1 (Jordan et al. 2024).
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    is_tall = x.size(-2) > x.size(-1)
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        quadratic = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, quadratic, x, beta=a)
    return x.mT if is_tall else x


build = Muon
