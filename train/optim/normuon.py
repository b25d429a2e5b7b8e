"""NorMuon, and Muon and NorMuon with cautious decay.

    M = beta M + (1 - beta) G;  O = Newton-Schulz(M)                       Muon: Jordan
    et al. 2024 v = beta2 v + (1 - beta2) row means of O * O;  O = O / (sqrt(v) + eps)
    NorMuon: Li et al. 2025, algorithm 1 W -= lr (lambda W + 0.2 sqrt(rows columns) O /
    |O|)

Cautious decay applies lambda W only where it has the sign of the update (Chen et al.
2025, "Cautious Weight Decay").
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gristmill.mixtures.optimizers import Optimizer
from gristmill.train.optim.builder import NamedParameters, ZerosLike
from gristmill.train.optim.dtensor_sums import local, sum_along, total_sum

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Coefficients and number of the quintic iterations (Jordan et al. 2024)."""
ADAMWS_RMS = 0.2
"""Root mean square of AdamW's updates (Liu et al. 2025, "Muon is scalable for LLM
training", section 2.2).
"""
SMALLEST_NORM = 1e-7
NEURON_EPS = 1e-8


class NorMuon(torch.optim.Optimizer):
    """NorMuon, or Muon with Nesterov momentum, on plain and sharded matrices; its
    products gather what they need.
    """

    def __init__(
        self,
        named: NamedParameters,
        section: Optimizer,
        zeros_like: ZerosLike = torch.zeros_like,
        steps: int = 0,
    ) -> None:
        neuron_beta = section.decays[1] if section.kind == "normuon" else None
        super().__init__(
            [matrix for _, matrix in named],
            {
                "lr": section.learning_rate,
                "weight_decay": section.weight_decay,
                "momentum": section.momentum,
                "neuron_beta": neuron_beta,
                "cautious": section.cautious_decay,
            },
        )
        for group in self.param_groups:
            for matrix in group["params"]:
                self.state[matrix]["momentum_buffer"] = zeros_like(matrix)
                if neuron_beta is not None:
                    self.state[matrix]["row_var"] = zeros_like(
                        sum_along(torch.zeros_like(matrix), -1)
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state, momentum, lr = self.state[matrix], group["momentum"], group["lr"]
                buffer = state["momentum_buffer"]
                local(buffer).lerp_(local(matrix.grad), 1.0 - momentum)
                if group["neuron_beta"] is None:
                    direction = newton_schulz(torch.lerp(matrix.grad, buffer, momentum))
                    scale = ADAMWS_RMS * math.sqrt(max(matrix.shape))
                    update = (
                        local(redistribute_as(direction, matrix)).to(matrix.dtype)
                        * scale
                    )
                else:
                    update = _balanced(
                        newton_schulz(buffer),
                        matrix,
                        state["row_var"],
                        group["neuron_beta"],
                    )
                weight = local(matrix)
                decayed = (
                    weight * (update * weight >= 0) if group["cautious"] else weight
                )
                weight.sub_(decayed * group["weight_decay"] + update, alpha=lr)


def _balanced(
    orthogonal: Tensor, matrix: Tensor, row_var: Tensor, beta: float
) -> Tensor:
    """Local shard of an update with rows of equal average size, scaled to AdamW's root
    mean square.
    """
    update = redistribute_as(orthogonal, matrix).to(matrix.dtype)
    squares = sum_along(update * update, -1)
    local(row_var).lerp_(
        local(redistribute_as(squares, row_var)) / matrix.size(-1), 1.0 - beta
    )
    update = update / (row_var.sqrt() + NEURON_EPS)
    norm = total_sum(update * update).sqrt().clamp(min=SMALLEST_NORM)
    return local(update) * (ADAMWS_RMS * math.sqrt(matrix.numel()) / norm)


def newton_schulz(matrix: Tensor) -> Tensor:
    """Approximate U V^T of a matrix U S V^T in bfloat16: its singular values end near 1
    (Jordan et al. 2024).
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    is_tall = matrix.size(0) > matrix.size(1)
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if is_tall else x


def redistribute_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Redistribute a tensor to the placements of another one of the same shape."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    return tensor.redistribute(placements=like.placements)


build = NorMuon
