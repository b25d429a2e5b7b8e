"""Orthogonalised momentum: NorMuon, and decay only where the update agrees with it, for NorMuon and for Muon.

    M = beta M + (1 - beta) G;  O = Newton-Schulz(M)                       Muon: Jordan et al. 2024
    v = beta2 v + (1 - beta2) row means of O * O;  O = O / (sqrt(v) + eps)    NorMuon: Li et al. 2025, algorithm 1
    W -= lr (lambda W + 0.2 sqrt(rows columns) O / |O|)

Cautious decay keeps lambda W only where it has the sign of the update (Chen et al. 2025, "Cautious Weight Decay").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from gristmill.train.optim.sharded import local, sum_along, whole_sum

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5
"""Jordan et al. 2024: the quintic iteration, and how often."""
ADAMWS_RMS = 0.2
"""Root mean square of an update, as AdamW's are (Liu et al. 2025, "Muon is scalable for LLM training", section 2.2)."""
SMALLEST_NORM = 1e-7
NEURON_EPS = 1e-8


class OrthogonalMomentum(torch.optim.Optimizer):
    """Muon, or NorMuon, on whole and sharded matrices: its products gather what they need.

    Args:
        matrices: parameters of two dimensions.
        lr: learning rate, AdamW's.
        weight_decay: of all of them.
        momentum: beta.
        neuron_beta: beta2, of the rows' second moments; None: Muon, whose step looks ahead along the gradient
            (Nesterov).
        cautious: whether decay that works against the update is left out.
        zeros_like: makes a parameter's moments.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        momentum: float,
        neuron_beta: float | None,
        cautious: bool,
        zeros_like: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        super().__init__(
            matrices,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "neuron_beta": neuron_beta,
                "cautious": cautious,
            },
        )
        for group in self.param_groups:
            for matrix in group["params"]:
                self.state[matrix]["momentum_buffer"] = zeros_like(matrix)
                if neuron_beta is not None:
                    self.state[matrix]["row_var"] = zeros_like(sum_along(torch.zeros_like(matrix), -1))

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
                    update = local(placed_as(direction, matrix)).to(matrix.dtype) * scale
                else:
                    update = _balanced(newton_schulz(buffer), matrix, state["row_var"], group["neuron_beta"])
                weight = local(matrix)
                kept = weight * (update * weight >= 0) if group["cautious"] else weight
                weight.sub_(kept * group["weight_decay"] + update, alpha=lr)


def _balanced(orthogonal: Tensor, matrix: Tensor, row_var: Tensor, beta: float) -> Tensor:
    """This process's share of an update whose rows have the same size on average, at AdamW's size as a whole."""
    update = placed_as(orthogonal, matrix).to(matrix.dtype)
    squares = sum_along(update * update, -1)
    local(row_var).lerp_(local(placed_as(squares, row_var)) / matrix.size(-1), 1.0 - beta)
    update = update / (row_var.sqrt() + NEURON_EPS)
    norm = whole_sum(update * update).sqrt().clamp(min=SMALLEST_NORM)
    return local(update) * (ADAMWS_RMS * math.sqrt(matrix.numel()) / norm)


def newton_schulz(matrix: Tensor) -> Tensor:
    """Nearly U V^T of a matrix U S V^T, in bfloat16: its singular values come to lie around 1 (Jordan et al. 2024)."""
    a, b, c = COEFFICIENTS
    found = matrix.bfloat16()
    is_tall = matrix.size(0) > matrix.size(1)
    if is_tall:
        found = found.T
    found = found / found.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = a * found + (b * gram + c * (gram @ gram)) @ found
    return found.T if is_tall else found


def placed_as(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor split as another one of the same shape is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    return tensor.redistribute(placements=like.placements)
