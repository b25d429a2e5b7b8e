"""Interface between the training loop and an objective: rows, loss and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Required, TypedDict

import numpy as np

from gristmill.train.loop.batch_plan import RowOrder

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gristmill.tokenize.packed import PackedSet

HEAD_TOKENS = 64
"""Tokens of a document shown in a report of a loss spike."""
UNTRAINED = -1.0
"""Placeholder for positions without a loss; losses are never negative."""


Numbers = dict[str, float]
"""Metrics that are numbers."""
JsonObject = dict[str, object]
"""Numbers, texts, lists and objects by name."""
Metrics = Mapping[str, object]
"""Metrics by name, as JSON: numbers, texts, and mappings of them."""
GroupedMetrics = dict[str, Numbers]
"""Metrics of each source, task or layer."""


class ReadDocument(TypedDict, total=False):
    """Document, example or pair that a step has read, for a loss-spike report.

    Attributes:
        id: hexadecimal id of the document or example, or id of the pair.
        loss: mean loss of its trained tokens.
        source: name of the set's source.
        row: of the set.
        start: first token in the row.
        tokens: number of tokens.
        offset: first token in the document.
        head: first tokens.
        text: `head`, decoded.
    """

    id: Required[str]
    loss: Required[float]
    source: str
    row: int
    start: int
    tokens: int
    offset: int
    head: list[int]
    text: str


class Measured(NamedTuple):
    """Loss and metrics of a micro-batch.

    Attributes:
        loss: scaled, summed loss for the backward pass.
        sums: float64 vector on the device, without gradient, whose first entry is the
            plain summed loss; accumulated over micro-batches, ranks and logged steps.
        row_losses: (n, k) on the device, without gradient: plain losses within each row
            (of its tokens, or of the pair), UNTRAINED where nothing is trained.
    """

    loss: Tensor
    sums: Tensor
    row_losses: Tensor


class Objective(Protocol):
    """Training objective. Rows are numbers of rows, examples or pairs, as ordered by
    `order`.
    """

    fingerprint: str
    """Hash of the content of all rows; equal fingerprints mean equal content under
    every row number.
    """
    sums_length: int
    """Length of the vector of sums that `loss` returns."""
    flops_per_token: float
    """Model FLOPs per token counted by `num_tokens`."""
    sequence_length: int
    """Tokens of the longest row."""

    @property
    def order(self) -> RowOrder:
        """Row at each position."""

    def weight(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> float:
        """Divisor of the summed loss of these rows (a whole batch): their number of
        trained tokens, or of pairs.

        `cuts`: number of shorter rows that each row is split into (1 without a length
        ramp). `step`, from 0, matters if the trained tokens are drawn at random.
        """

    def num_tokens(self, rows: np.ndarray) -> int:
        """Number of tokens that the model processes for these rows."""

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> Any:
        """Read the rows of a micro-batch (possibly empty) into host memory, as input of
        `loss`.

        Called in a thread ahead of time, so it does not access the model or the device;
        tensors are pinned on a machine with a GPU.
        """

    def loss(self, model: nn.Module, batch: Any, scale: float) -> Measured:
        """Loss of a micro-batch from the result of `prepare`; `scale` multiplies the
        loss for the backward pass.
        """

    def report(self, sums: Sequence[float], weight: float) -> Metrics:
        """Metrics from the sums of some steps and the (positive) sum of their
        weights.
        """

    def describe(self, rows: np.ndarray) -> Metrics:
        """Names of the rows of a step, for the record of skipped steps."""

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[ReadDocument]:
        """Documents of a step with their losses.

        Args:
            rows: (B,) rows of the step.
            row_losses: (B, k) of all rows, as from `loss`; NaN if unknown.
        """


def mean_of_trained(losses: np.ndarray) -> float:
    """Mean of all trained losses; 0 if nothing was trained, NaN if any of them is
    NaN.
    """
    trained = losses[losses != UNTRAINED]
    return float(trained.astype(np.float64).mean()) if trained.size else 0.0


def read_pieces(
    packed: PackedSet, rows: np.ndarray, row_losses: np.ndarray, ahead: int
) -> Iterator[tuple[dict[str, Any], float, list[int]]]:
    """Pieces of documents in rows, each with its mean loss and first tokens.

    `row_losses` (B, t): a position holds the loss of the token `ahead` positions later.
    """
    tokens = packed.tokens(rows)
    places = {int(row): place for place, row in enumerate(rows)}
    for piece in packed.pieces(rows).to_pylist():
        place = places[piece["row"]]
        start = piece["start"]
        end = start + piece["length"]
        losses = row_losses[place, max(start - ahead, 0) : end - ahead]
        yield (
            piece,
            mean_of_trained(losses),
            tokens[place, start : min(end, start + HEAD_TOKENS)].tolist(),
        )
