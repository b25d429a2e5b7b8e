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

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.train.optim.builder import Group, GuardedOptimizer, Moments, Parameters
from gristmill.train.optim.dtensor_sums import gradient_of, local
from gristmill.train.optim.muon import move, newton_schulz
from gristmill.train.optim.shared_stacks import give_back, share_out, stacks_of

EPS = 1e-15


class SoapMuon(GuardedOptimizer):
    """SOAP-Muon on plain and sharded matrices; matrices of one shape are computed
    together, each process its share of them.

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

    def moments(self, parameter: Tensor) -> Moments:
        """Step, mean and mean square, and the covariance with its basis."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        square = torch.zeros((min(parameter.shape),) * 2, device=parameter.device)
        if isinstance(parameter, DTensor):
            square = distribute_tensor(
                square, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
            "covariance": torch.zeros_like(square),
            "basis": torch.zeros_like(square),
        }

    def update(self, parameters: Parameters, group: Group, good: Tensor) -> None:
        """Move along the orthogonalised, whitened mean, and follow the covariance."""
        for matrices in stacks_of(parameters):
            self._update_stack(matrices, group, good)

    def _update_stack(
        self, matrices: list[nn.Parameter], group: Group, good: Tensor
    ) -> None:
        states = [self.state[matrix] for matrix in matrices]
        steps = self._steps_done(matrices[0], group["every"])
        rows, columns = matrices[0].shape

        def turned(stack: Tensor) -> Tensor:
            """Turn matrices so that their columns are the shorter side, or back."""
            return stack if columns <= rows else stack.mT

        def share(name: str) -> Tensor:
            return share_out([state[name] for state in states])

        def keep(name: str, stack: Tensor) -> None:
            moments = [state[name] for state in states]
            for moment, shard in zip(moments, give_back(stack, moments), strict=True):
                local(moment).copy_(shard)

        decay = (1.0 - group["beta2"]) * good
        gradients = turned(share_out([gradient_of(matrix) for matrix in matrices]))
        covariance = share("covariance")
        covariance.lerp_(gradients.mT @ gradients, decay)
        basis = share("basis")
        squares = turned(share("exp_avg_sq"))
        if steps:
            for matrix, state in zip(matrices, states, strict=True):
                local(state["exp_avg"]).lerp_(
                    local(gradient_of(matrix)), (1.0 - group["momentum"]) * good
                )
            squares.lerp_((gradients @ basis).square(), decay)
            whitened = turned(share("exp_avg")) @ basis / (squares.sqrt() + EPS)
            directions = newton_schulz(turned(whitened @ basis.mT))
            move(matrices, directions, group, good)
        if steps == 0:
            basis = torch.where(
                good > 0, torch.linalg.eigh(covariance)[1].flip(-1), basis
            )
        elif steps % group["every"] == 0:
            # Follow the covariance by one power iteration; columns are sorted by their
            # eigenvalues, and the second moments with them.
            products = covariance @ basis
            order = (
                (basis * products).sum(dim=-2, keepdim=True).argsort(descending=True)
            )
            basis = torch.where(
                good > 0, torch.linalg.qr(products.take_along_dim(order, -1))[0], basis
            )
            squares = torch.where(good > 0, squares.take_along_dim(order, -1), squares)
        keep("covariance", covariance)
        keep("basis", basis)
        keep("exp_avg_sq", turned(squares))
        for state in states:
            state["step"] += good

    def _steps_done(self, matrix: nn.Parameter, every: int) -> int:
        steps = self._counts.get(matrix)
        if steps is None or steps % every in (0, 1 % every):
            steps = int(self.state[matrix]["step"].item())
        self._counts[matrix] = steps + 1
        return steps


build = SoapMuon
