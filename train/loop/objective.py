"""What the loop asks of an objective: what to read, what the loss is, and what to say about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from gristmill.train.loop.row_plan import RowOrder

if TYPE_CHECKING:
    from torch import Tensor, nn

UNTRAINED = -1.0
"""In place of a loss where there is none; a loss is never negative."""


class Measured(NamedTuple):
    """What an objective finds out about a micro-batch.

    Attributes:
        loss: the scaled, summed loss, to call backward on.
        sums: float64 vector on the device, without gradient, whose first entry is the plain summed loss; added up
            over micro-batches, ranks and logged steps.
        row_losses: (n, k) on the device, without gradient: the plain losses within each row (of its tokens, or of
            the pair), UNTRAINED where nothing is trained.
    """

    loss: Tensor
    sums: Tensor
    row_losses: Tensor


class Objective(Protocol):
    """What a training optimises. Rows are numbers of rows, examples or pairs: whatever `order` orders."""

    fingerprint: str
    """Of what the rows hold: the same one, the same content under every number."""
    sums_length: int
    """Length of the vector of sums that `loss` returns."""
    flops_per_token: float
    """Model arithmetic per token that `num_tokens` counts."""
    sequence_length: int
    """Tokens of the longest row."""

    @property
    def order(self) -> RowOrder:
        """Which row is read at each position."""

    def weight(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> float:
        """What the summed loss of these rows (a whole batch) is divided by: their trained tokens, or pairs.

        `cuts`: into how many shorter rows each row is cut (1 wherever there is no ramp of lengths). `step`, from 0,
        counts where what is trained of a row is drawn.
        """

    def num_tokens(self, rows: np.ndarray) -> int:
        """Tokens that go through the model for these rows."""

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> Any:
        """Read the rows of a step's micro-batch (perhaps an empty one) into host memory, as `loss` wants them.

        Called ahead of time in a thread, so it touches neither the model nor the device; on a machine with a GPU its
        tensors are pinned.
        """

    def loss(self, model: nn.Module, batch: Any, scale: float | Tensor, draw: int | None = None) -> Measured:
        """The loss of a micro-batch, from what `prepare` made of its rows; `scale` multiplies what is differentiated.

        `draw`: take labels that the model itself draws in place of the true ones, by random numbers that depend on
        this one and on the tokens alone (for Sophia; an objective over pairs has no labels and is never asked).
        """

    def report(self, sums: Sequence[float], weight: float) -> dict[str, Any]:
        """Metrics from the sums of some steps, and the sum of their weights (positive)."""

    def describe(self, rows: np.ndarray) -> dict[str, Any]:
        """Names what a step read, for the record of skipped steps."""

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[dict[str, Any]]:
        """What a step read with the loss that each part of it had: `id`, `loss`, and what else tells it apart.

        Args:
            rows: (B,) the step's rows.
            row_losses: (B, k) of all of them, as from `loss`; NaN where they are not known.
        """


def mean_of_trained(losses: np.ndarray) -> float:
    """The mean of those that are losses; 0 where nothing was trained, NaN where one of them is."""
    trained = losses[losses != UNTRAINED]
    return float(trained.astype(np.float64).mean()) if trained.size else 0.0
