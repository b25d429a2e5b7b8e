"""Dion: momentum orthogonalised at low rank by a power iteration with error feedback
(Ahn et al. 2025, algorithm 1).

    B = M + G;  P = orthonormal(B Q);  R = B^T P
    M = B - (1 - mu) P R^T;  Q = R with columns of norm 1
    W -= lr (lambda W + 0.2 sqrt(max(rows, columns)) P Q^T)

The scale is that of our Muon, so AdamW's learning rate applies (the paper's is
sqrt(rows / columns)). Processes that share a matrix exchange P (rows x rank) and R
(columns x rank). PyTorch has no QR of a sharded matrix: every process orthonormalises
the whole P, where the paper has a randomised Cholesky QR of shards.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gristmill.train.models.initialisation import generator_of
from gristmill.train.optimizers.builder import EachParameter, Group, ZerosLike
from gristmill.train.optimizers.dtensor_sums import local
from gristmill.train.optimizers.normuon import ADAMWS_RMS, redistribute_as

SMALLEST_NORM = 1e-8


class Dion(EachParameter):
    """Low-rank orthonormal updates of plain and sharded matrices."""

    def hyperparameters(self, steps: int) -> dict[str, Any]:
        """Return that of the momentum."""
        return {"momentum": self.section.momentum}

    def moments(
        self, name: str, parameter: Tensor, zeros_like: ZerosLike
    ) -> dict[str, Tensor]:
        """Momentum, and a basis of random columns."""
        rank = max(1, round(self.section.rank_fraction * min(parameter.shape)))
        first = torch.randn(
            parameter.size(1), rank, generator=generator_of(0, f"dion:{name}")
        ).to(parameter.device)
        basis = zeros_like(first)
        basis.copy_(first / first.norm(dim=0))
        return {"momentum_buffer": zeros_like(parameter), "basis": basis}

    def update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        """Move along the low-rank part of the momentum."""
        state, weight = self.state[parameter], local(parameter)
        buffer, basis = state["momentum_buffer"], state["basis"]
        local(buffer).add_(local(gradient))
        rows = torch.linalg.qr(gather(buffer @ on_mesh(basis, parameter)))[0]
        right = gather(buffer.T @ on_mesh(rows, parameter))

        def low_rank(columns: Tensor) -> Tensor:
            product = on_mesh(rows, parameter) @ on_mesh(columns.T, parameter)
            return local(redistribute_as(product, parameter))

        local(buffer).sub_(low_rank(right), alpha=1.0 - group["momentum"])
        basis.copy_(right / right.norm(dim=0).clamp(min=SMALLEST_NORM))
        update = low_rank(basis)
        lr = group["lr"]
        weight.mul_(1.0 - lr * group["weight_decay"])
        weight.sub_(update, alpha=lr * ADAMWS_RMS * math.sqrt(max(parameter.shape)))


def on_mesh(tensor: Tensor, matrix: Tensor) -> Tensor:
    """Replicate a tensor on the mesh of a sharded matrix, so that the two can be
    multiplied.
    """
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(matrix, DTensor):
        return tensor
    return DTensor.from_local(
        tensor,
        matrix.device_mesh,
        [Replicate()] * matrix.device_mesh.ndim,
        run_check=False,
    )


def gather(tensor: Tensor) -> Tensor:
    """Gather a tensor from the processes that share it."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


build = Dion
