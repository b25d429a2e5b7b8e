"""The gradient noise scale: how large a batch still pays (McCandlish et al. 2018, appendix A.1).

The squared norm of a gradient over B rows is on average |G|^2 + tr(Sigma) / B. Micro-batches and the whole batch are
two values of B, which gives both unknowns; the simple noise scale is tr(Sigma) / |G|^2, in rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.train.optim.sharded import squared_norm

DECAY = 0.9
"""Of the running means over measurements; the two are averaged apart, since only they are unbiased (appendix A.1)."""


class PartNorms:
    """Squared norms of the mean gradients of micro-batches, from gradients that accumulate on the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: list[Tensor] | None = None
        self._squares: list[Tensor] = []
        self._rows: list[int] = []

    @torch.no_grad()
    def take(self, share: float, rows: int) -> None:
        """After the backward pass of a micro-batch, its gradients being reduced already.

        Args:
            share: of the whole batch's weight; what it added is its mean gradient times this.
            rows: it has, over all ranks.
        """
        now = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        added = now if self._before is None else [a - b for a, b in zip(now, self._before, strict=True)]
        self._before = [gradient.clone() for gradient in now]
        self._squares.append(squared_norm(added) / share**2)
        self._rows.append(rows)

    def estimate(self) -> Tensor:
        """(tr Sigma, |G|^2) as a float64 vector on the device."""
        assert self._before is not None
        return noise_and_signal(torch.stack(self._squares), self._rows, squared_norm(self._before))


def noise_and_signal(part_squares: Tensor, part_rows: Sequence[int], whole_square: Tensor) -> Tensor:
    """Solve for both unknowns: (tr Sigma, |G|^2), float64; either may come out negative by chance.

    Args:
        part_squares: (m,) squared norms of the micro-batches' mean gradients.
        part_rows: rows of each.
        whole_square: squared norm of the whole batch's mean gradient.
    """
    inverse_part = sum(1.0 / rows for rows in part_rows) / len(part_rows)
    inverse_whole = 1.0 / sum(part_rows)
    whole = whole_square.double()
    noise = (part_squares.double().mean() - whole) / (inverse_part - inverse_whole)
    return torch.stack((noise, whole - noise * inverse_whole))


class NoiseScale:
    """Running means of the two unknowns.

    Args:
        device: where the training computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._means = torch.zeros(2, dtype=torch.float64, device=device)
        self._weight = torch.zeros((), dtype=torch.float64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """The state, for a checkpoint; filled in place when one is loaded."""
        return {"means": self._means, "weight": self._weight}

    def follow(self, estimate: Tensor, bad: Tensor) -> None:
        """Take in a measurement, unless its step was a bad one."""
        share = torch.where(bad, 0.0, 1.0 - DECAY).double()
        self._means.copy_(torch.where(bad, self._means, self._means.lerp(estimate, share)))
        self._weight.lerp_(torch.ones_like(self._weight), share)

    def report(self) -> dict[str, Any]:
        """`gradient_noise_scale` in rows; nothing before the first measurement, None while |G|^2 is not positive."""
        noise, signal, weight = (*self._means.tolist(), self._weight.item())
        if not weight:
            return {}
        return {
            "gradient_noise_scale": noise / signal if signal > 0 else None,
            "gradient_noise": noise / weight,
            "gradient_signal": signal / weight,
        }
