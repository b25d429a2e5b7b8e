"""NorMuon, and Muon and NorMuon with cautious decay.

    M = beta M + (1 - beta) G;  O = Newton-Schulz(M)
    v = beta2 v + (1 - beta2) row means of O * O;  O = O / (sqrt(v) + eps)
    W -= lr (lambda W + 0.2 sqrt(rows columns) O / |O|)

The first line is Muon (Jordan et al. 2024), the second NorMuon's (Li et al. 2025,
algorithm 1).

Cautious decay applies lambda W only where it has the sign of the update (Chen et al.
2025, "Cautious Weight Decay").
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gristmill.train.optim.builder import EachParameter, Group
from gristmill.train.optim.dtensor_sums import local, sum_along, total_sum

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Coefficients and number of the quintic iterations (Jordan et al. 2024)."""
ADAMWS_RMS = 0.2
"""Root mean square of AdamW's updates (Liu et al. 2025, "Muon is scalable for LLM
training", section 2.2).
"""
SMALLEST_NORM = 1e-7
NEURON_EPS = 1e-8


class NorMuon(EachParameter):
    """NorMuon, or Muon with Nesterov momentum, on plain and sharded matrices; its
    products gather what they need.
    """

    def hyperparameters(self) -> dict[str, Any]:
        """Return those of the momentum, and of NorMuon that of the rows."""
        section = self.section
        return {
            "momentum": section.momentum,
            "neuron_beta": section.decays[1] if section.kind == "normuon" else None,
            "cautious": section.cautious_decay,
        }

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Momentum, and of NorMuon the variances of rows."""
        moments = {"momentum_buffer": torch.zeros_like(parameter)}
        if self.section.kind == "normuon":
            rows = sum_along(torch.zeros_like(parameter), -1)
            moments["row_var"] = torch.zeros_like(rows)
        return moments

    def update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        """Move along the orthogonalised momentum."""
        momentum, neuron_beta = group["momentum"], group["neuron_beta"]
        state, weight = self.state[parameter], local(parameter)
        buffer = state["momentum_buffer"]
        local(buffer).lerp_(local(gradient), 1.0 - momentum)
        if neuron_beta is not None:
            row_var = state["row_var"]
            aligned = redistribute_as(newton_schulz(buffer), parameter).to(
                parameter.dtype
            )
            squares = sum_along(aligned * aligned, -1)
            local(row_var).lerp_(
                local(redistribute_as(squares, row_var)) / parameter.size(-1),
                1.0 - neuron_beta,
            )
            aligned = aligned / (row_var.sqrt() + NEURON_EPS)
            norm = total_sum(aligned * aligned).sqrt().clamp(min=SMALLEST_NORM)
            update = local(aligned) * (ADAMWS_RMS * math.sqrt(parameter.numel()) / norm)
        else:
            direction = newton_schulz(torch.lerp(gradient, buffer, momentum))
            scale = ADAMWS_RMS * math.sqrt(max(parameter.shape))
            update = (
                local(redistribute_as(direction, parameter)).to(parameter.dtype) * scale
            )
        decayed = weight * (update * weight >= 0) if group["cautious"] else weight
        weight.sub_(decayed * group["weight_decay"] + update, alpha=group["lr"])


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
