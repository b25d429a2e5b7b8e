"""SOAP-Muon: momentum that is whitened in the eigenbasis of the gradients' covariance,
then orthogonalised (Vyas et al. 2025, "Improving SOAP using Iterative Whitening and
Muon"; code: nikhilvyas/SOAP_MUON, `olmo_optimimzer.py`).

    C = beta2 C + (1 - beta2) G^T G;  Q = eigenvectors of C
    M = beta M + (1 - beta) G;  V = beta2 V + (1 - beta2) (G Q)^2
    O = Newton-Schulz((M Q / (sqrt(V) + eps)) Q^T)
    W -= lr (lambda W + 0.2 sqrt(max(rows, columns)) O)

C and Q are of the shorter side: a matrix with fewer rows has G G^T and Q^T G. As in
SOAP (Vyas et al. 2024, algorithm 4), the first step only makes the basis, and every
`precondition_every` steps one power iteration follows C. The scale is that of our Muon,
so AdamW's learning rate applies.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gristmill.train.distributed.fsdp import gathered
from gristmill.train.optim.builder import EachParameter, Group
from gristmill.train.optim.dtensor_sums import local
from gristmill.train.optim.normuon import ADAMWS_RMS, newton_schulz

EPS = 1e-15


class SoapMuon(EachParameter):
    """SOAP-Muon on plain and sharded matrices; its products gather what they need.

    The host reads the step count in two of `precondition_every` steps: before a power
    iteration, and after it, since the step may have been skipped.
    """

    @cached_property
    def _counts(self) -> dict[Tensor, int]:
        return {}

    def hyperparameters(self) -> dict[str, Any]:
        """Return those of the means, and the steps between power iterations."""
        section = self.section
        return {
            "momentum": section.momentum,
            "beta2": section.decays[1],
            "every": section.precondition_every,
        }

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """Step, mean and mean square, and the covariance with its basis."""
        side = torch.zeros((min(parameter.shape),) * 2, device=parameter.device)
        square = _sharded(side, parameter)
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
            "covariance": torch.zeros_like(square),
            "basis": torch.zeros_like(square),
        }

    def update(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        """Move along the orthogonalised, whitened mean, and follow the covariance."""
        state, every = self.state[parameter], group["every"]
        steps = self._counts.get(parameter)
        if steps is None or steps % every in (0, 1 % every):
            steps = int(state["step"].item())
        self._counts[parameter] = steps + 1
        full = gathered(gradient)
        turned = full if _has_fewer_columns(parameter) else full.T
        if steps:
            local(state["exp_avg"]).lerp_(local(gradient), 1.0 - group["momentum"])
            self._move(parameter, turned, group)
        covariance = _sharded(turned.T @ turned, parameter)
        local(state["covariance"]).lerp_(local(covariance), 1.0 - group["beta2"])
        if steps == 0:
            # of a bad step, which is skipped, no basis could be made
            finite = gathered(state["covariance"]).nan_to_num(0.0, 0.0, 0.0)
            vectors = torch.linalg.eigh(finite)[1]
            _fill(state["basis"], vectors.flip(1), parameter)
        elif steps % every == 0:
            # Follow the covariance by one power iteration; columns are sorted by their
            # eigenvalues, and the second moments with them.
            covariance = gathered(state["covariance"])
            basis = gathered(state["basis"])
            order = (basis * (covariance @ basis)).sum(dim=0).argsort(descending=True)
            squares = gathered(state["exp_avg_sq"]).index_select(
                1 if _has_fewer_columns(parameter) else 0, order
            )
            rotated = torch.linalg.qr(covariance @ basis[:, order])[0]
            _fill(state["exp_avg_sq"], squares, parameter)
            _fill(state["basis"], rotated, parameter)
        state["step"] += 1

    def _move(self, matrix: Tensor, gradient: Tensor, group: Group) -> None:
        """Update a matrix; `gradient` is turned so that its columns are the shorter
        side.
        """
        state, weight = self.state[matrix], local(matrix)
        is_turned = not _has_fewer_columns(matrix)
        basis = gathered(state["basis"])

        def rotated(full: Tensor) -> Tensor:
            return _sharded((full @ basis).T if is_turned else full @ basis, matrix)

        squares = local(rotated(gradient)) ** 2
        local(state["exp_avg_sq"]).lerp_(squares, 1.0 - group["beta2"])
        mean = gathered(state["exp_avg"])
        whitened = gathered(
            rotated(mean.T if is_turned else mean) / (state["exp_avg_sq"].sqrt() + EPS)
        )
        direction = basis @ whitened if is_turned else whitened @ basis.T
        update = local(_sharded(newton_schulz(direction).to(matrix.dtype), matrix))
        lr = group["lr"]
        weight.mul_(1.0 - lr * group["weight_decay"])
        weight.sub_(update, alpha=lr * ADAMWS_RMS * math.sqrt(max(matrix.shape)))


def _has_fewer_columns(matrix: Tensor) -> bool:
    return matrix.size(1) <= matrix.size(0)


def _sharded(full: Tensor, matrix: Tensor) -> Tensor:
    """Distribute a tensor that every process has like a matrix."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(matrix, DTensor):
        return full
    mesh = matrix.device_mesh
    replicated = DTensor.from_local(
        full, mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return replicated.redistribute(placements=matrix.placements)


def _fill(moment: Tensor, full: Tensor, matrix: Tensor) -> None:
    local(moment).copy_(local(_sharded(full, matrix)))


build = SoapMuon
