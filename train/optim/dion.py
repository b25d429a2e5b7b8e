"""Dion: momentum orthogonalised at low rank by a power iteration with error feedback
(Ahn et al. 2025, algorithm 1).

    B = M + G;  P = orthonormal(B Q);  R = B^T P;  M = B - (1 - mu) P R^T;  Q = R with
    columns of norm 1 W -= lr (lambda W + 0.2 sqrt(max(rows, columns)) P Q^T)

The scale is that of our Muon, so AdamW's learning rate applies (the paper's is
sqrt(rows / columns)). Processes that share a matrix exchange P (rows x rank) and R
(columns x rank). PyTorch has no QR of a sharded matrix: every process orthonormalises
the whole P, where the paper has a randomised Cholesky QR of shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gristmill.mixtures.optimizers import Optimizer
from gristmill.train.models.initialisation import generator_of
from gristmill.train.optim.builder import NamedParameters, ZerosLike
from gristmill.train.optim.dtensor_sums import local
from gristmill.train.optim.normuon import ADAMWS_RMS, redistribute_as

SMALLEST_NORM = 1e-8


class Dion(torch.optim.Optimizer):
    """Low-rank orthonormal updates of plain and sharded matrices."""

    def __init__(
        self,
        named: NamedParameters,
        section: Optimizer,
        zeros_like: ZerosLike = torch.zeros_like,
        steps: int = 0,
    ) -> None:
        super().__init__(
            [matrix for _, matrix in named],
            {
                "lr": section.learning_rate,
                "weight_decay": section.weight_decay,
                "momentum": section.momentum,
            },
        )
        for name, matrix in named:
            rank = max(1, round(section.rank_fraction * min(matrix.shape)))
            first = torch.randn(
                matrix.size(1), rank, generator=generator_of(0, f"dion:{name}")
            ).to(matrix.device)
            basis = zeros_like(first)
            basis.copy_(first / first.norm(dim=0))
            self.state[matrix].update(momentum_buffer=zeros_like(matrix), basis=basis)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state, weight = self.state[matrix], local(matrix)
                buffer, basis = state["momentum_buffer"], state["basis"]
                local(buffer).add_(local(matrix.grad))
                left = torch.linalg.qr(gather(buffer @ on_mesh(basis, matrix)))[0]
                right = gather(buffer.T @ on_mesh(left, matrix))
                low_rank = redistribute_as(
                    on_mesh(left, matrix) @ on_mesh(right.T, matrix), matrix
                )
                local(buffer).sub_(local(low_rank), alpha=1.0 - group["momentum"])
                basis.copy_(right / right.norm(dim=0).clamp(min=SMALLEST_NORM))
                update = local(
                    redistribute_as(
                        on_mesh(left, matrix) @ on_mesh(basis.T, matrix), matrix
                    )
                )
                weight.mul_(1.0 - group["lr"] * group["weight_decay"])
                weight.sub_(
                    update,
                    alpha=group["lr"] * ADAMWS_RMS * math.sqrt(max(matrix.shape)),
                )


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
