"""Gradient noise scale, the batch size up to which larger batches pay (McCandlish et
al. 2018, appendix A.1).

The expected squared norm of a gradient over B rows is |G|^2 + tr(Sigma) / B.
Micro-batches and the whole batch give two values of B, which determine both unknowns;
the simple noise scale is tr(Sigma) / |G|^2, in rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.train.optimizers.dtensor_sums import gradients_of, squared_norm

DECAY = 0.9
"""Decay of the running means. The two unknowns are averaged separately: their ratio is
biased (appendix A.1).
"""


class PartNorms:
    """Squared norms of the micro-batches' mean gradients, from gradients accumulated on
    the parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: list[Tensor] | None = None
        self._squares: list[Tensor] = []
        self._rows: list[int] = []

    @torch.no_grad()
    def take(self, share: float, rows: int) -> None:
        """Measure a micro-batch after its backward pass and gradient reduction.

        Args:
            share: its fraction of the batch's weight; it added its mean gradient times
                this.
            rows: number of its rows over all ranks.
        """
        gradients = gradients_of(self._model)
        added = (
            gradients
            if self._before is None
            else [a - b for a, b in zip(gradients, self._before, strict=True)]
        )
        self._before = [gradient.clone() for gradient in gradients]
        self._squares.append(squared_norm(added) / share**2)
        self._rows.append(rows)

    def estimate(self) -> Tensor:
        """(tr Sigma, |G|^2) as a float64 vector on the device."""
        assert self._before is not None
        return noise_and_signal(
            torch.stack(self._squares), self._rows, squared_norm(self._before)
        )


def noise_and_signal(
    part_squares: Tensor, part_rows: Sequence[int], whole_square: Tensor
) -> Tensor:
    """Solve for (tr Sigma, |G|^2), float64; either may be negative by chance.

    Args:
        part_squares: (m,) squared norms of the micro-batches' mean gradients.
        part_rows: rows of each.
        whole_square: squared norm of the whole batch's mean gradient.
    """
    inverse_part = sum(1.0 / rows for rows in part_rows) / len(part_rows)
    inverse_whole = 1.0 / sum(part_rows)
    square = whole_square.double()
    noise = (part_squares.double().mean() - square) / (inverse_part - inverse_whole)
    return torch.stack((noise, square - noise * inverse_whole))


class NoiseScale:
    """Running means of the two unknowns.

    Args:
        device: of the training.
    """

    def __init__(self, device: torch.device) -> None:
        self._means = torch.zeros(2, dtype=torch.float64, device=device)
        self._weight = torch.zeros((), dtype=torch.float64, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint, loaded in place."""
        return {"means": self._means, "weight": self._weight}

    def follow(self, estimate: Tensor, bad: Tensor) -> None:
        """Add a measurement unless its step was bad."""
        share = torch.where(bad, 0.0, 1.0 - DECAY).double()
        self._means.copy_(
            torch.where(bad, self._means, self._means.lerp(estimate, share))
        )
        self._weight.lerp_(torch.ones_like(self._weight), share)

    def report(self) -> dict[str, Any]:
        """`gradient_noise_scale` in rows: absent before the first measurement, None
        while |G|^2 is not positive.
        """
        noise, signal, weight = (*self._means.tolist(), self._weight.item())
        if not weight:
            return {}
        return {
            "gradient_noise_scale": noise / signal if signal > 0 else None,
            "gradient_noise": noise / weight,
            "gradient_signal": signal / weight,
        }
