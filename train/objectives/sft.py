"""Objective of supervised fine-tuning: loss on the trained tokens of packed
conversations, with metrics per set.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.tokenize.loss_masks import LossMasks
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.batch import read_turns
from gristmill.train.loop.batch_plan import or_first
from gristmill.train.loop.objective import (
    UNTRAINED,
    JsonObject,
    Measured,
    ReadDocument,
    read_pieces,
)
from gristmill.train.loop.prefetch import TensorBatch, pinned
from gristmill.train.objectives.losses import IGNORED, next_tokens, weighted_nll
from gristmill.train.objectives.packed_objective import PackedObjective


@dataclass(frozen=True)
class Turns(TensorBatch):
    """A micro-batch in host memory.

    Attributes:
        ids: (n, t) int64.
        trained: (n, t) bool.
        sources: (n,) int64, set number of each row.
        positions: (n, t) int32, position of each token in its example; None if every
            row holds one example.
        real: false for an empty micro-batch, whose rows are padding.
    """

    ids: Tensor
    trained: Tensor
    sources: Tensor
    positions: Tensor | None
    real: bool


class AssistantTurns(PackedObjective):
    """Cross-entropy over trained tokens, for the arguments of PackedObjective: a packed
    set with loss masks (`train/data/example_rows.py`), and its settings.
    """

    def __init__(self, packed: PackedSet, *arguments: Any) -> None:
        super().__init__(packed, *arguments)
        self.masks = LossMasks(packed)
        self.fingerprint = self.masks.fingerprint

    def weight(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> float:
        """Number of trained tokens."""
        return float(self.masks.trained_per_row[rows].sum())

    def num_tokens(self, rows: np.ndarray) -> int:
        """Number of tokens without padding."""
        return int(self.packed.boundaries(rows).filled().sum())

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> Turns:
        """Read a micro-batch, cut to its longest row; an empty one holds a row of
        weight zero.
        """
        real = bool(len(rows))
        rows = or_first(rows)
        ids, trained, positions = read_turns(self.packed, self.masks, rows)
        return Turns(
            pinned(ids),
            pinned(trained),
            pinned(self.packed.source_of(rows)),
            None if positions is None else pinned(positions),
            real,
        )

    def loss(self, model: nn.Module, batch: Turns, scale: float) -> Measured:
        """See objective.Objective; the sums are the total loss, and loss, trained
        tokens and bytes per set.
        """
        batch, targets, counted = self.place(batch)
        weights = counted * scale
        head = partial(
            weighted_nll,
            targets=targets,
            weights=weights,
            fused=bool(getattr(model, "is_compiled", False)),
        )
        loss, nll = model(
            batch.ids, head, positions=batch.positions, trained=weights.sum(dim=1)
        )
        return Measured(
            loss,
            self.sums(batch.sources, targets, counted, nll),
            torch.where(counted > 0, nll, UNTRAINED),
        )

    def place(self, batch: Turns) -> tuple[Turns, Tensor, Tensor]:
        """Micro-batch on the device, its targets, IGNORED where nothing is trained, and
        1 for trained tokens that count, else 0, (n, t) each.
        """
        batch = batch.to(self._token_bytes.device)
        targets = next_tokens(batch.ids, batch.trained)
        return batch, targets, (targets != IGNORED).float() * float(batch.real)

    def describe(self, rows: np.ndarray) -> JsonObject:
        """Examples of rows."""
        return {
            "examples": [
                piece["id"].hex() for piece in self.packed.pieces(rows).to_pylist()
            ]
        }

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[ReadDocument]:
        """Examples of rows, with the mean loss of their trained tokens."""
        return [
            {
                "id": piece["id"].hex(),
                "loss": loss,
                "tokens": piece["length"],
                "head": head,
            }
            for piece, loss, head in read_pieces(self.packed, rows, row_losses, ahead=1)
        ]
