"""The objective of supervised fine-tuning: the trained tokens of packed conversations, measured per set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.tokenize.loss_masks import LossMasks
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.trained_rows import read_turns
from gristmill.train.evaluation.held_out import loss_metrics
from gristmill.train.loop.objective import UNTRAINED, Measured, mean_of_trained
from gristmill.train.loop.prefetch import pinned
from gristmill.train.objectives.losses import IGNORED, drawn_nll, next_tokens, uniforms, weighted_nll

HEAD_TOKENS = 64
"""Tokens of each example that a loss-spike report shows as text."""
SUMS_PER_SET = 3


@dataclass(frozen=True)
class Turns:
    """A micro-batch in host memory.

    Attributes:
        ids: (n, t) int64.
        trained: (n, t) bool.
        sources: (n,) int64, the number of each row's set.
        positions: (n, t) int32, each token's number within its example; None where every row holds one example.
        real: whether it counts.
    """

    ids: Tensor
    trained: Tensor
    sources: Tensor
    positions: Tensor | None
    real: bool


@dataclass(frozen=True)
class PlacedTurns:
    """A micro-batch on the device.

    Attributes:
        ids: (n, t) int64.
        targets: (n, t) int64, IGNORED where nothing is trained.
        counted: (n, t) float32, 1 where something is trained that counts.
        sources, positions: as of Turns.
    """

    ids: Tensor
    targets: Tensor
    counted: Tensor
    sources: Tensor
    positions: Tensor | None


class AssistantTurns:
    """Cross-entropy over the tokens that have a loss (see objective.Objective).

    Args:
        packed: the rows, with masks beside them (`train/data/example_rows.py`).
        seed: of the order.
        token_bytes: (vocab,) bytes per id, on the device.
        flops_per_token: model arithmetic.
    """

    def __init__(self, packed: PackedSet, seed: int, token_bytes: Tensor, flops_per_token: float) -> None:
        self.packed, self.masks = packed, LossMasks(packed)
        self.order = packed.order(seed)
        self.fingerprint, self.sequence_length = self.masks.fingerprint, packed.sequence_length
        self.flops_per_token = flops_per_token
        self.sums_length = 1 + SUMS_PER_SET * len(packed.sources)
        self._token_bytes = token_bytes

    def weight(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> float:
        """Trained tokens."""
        return float(self.masks.trained_per_row[rows].sum())

    def num_tokens(self, rows: np.ndarray) -> int:
        """All tokens but padding."""
        return int(self.packed.boundaries(rows).filled().sum())

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> Turns:
        """Read a micro-batch, no longer than it needs to be; for no rows any one, with no weight."""
        # An empty micro-batch computes too: its passes are collective operations.
        real, rows = bool(len(rows)), rows if len(rows) else np.zeros(1, dtype=np.int64)
        ids, trained, found = read_turns(self.packed, self.masks, rows)
        positions = None if found is None else pinned(torch.from_numpy(found))
        return Turns(
            pinned(torch.from_numpy(ids)),
            pinned(torch.from_numpy(trained)),
            pinned(torch.from_numpy(self.packed.source_of(rows))),
            positions,
            real,
        )

    def loss(self, model: nn.Module, batch: Turns, scale: float | Tensor, draw: int | None = None) -> Measured:
        """See objective.Objective; the sums are the total loss, and loss, trained tokens and bytes of each set."""
        placed = self.place(batch)
        weights = placed.counted * scale
        fused = bool(getattr(model, "is_compiled", False))
        head = partial(weighted_nll, targets=placed.targets, weights=weights, fused=fused)
        if draw is not None:
            head = partial(
                drawn_nll, targets=placed.targets, weights=weights, uniforms=uniforms(placed.ids, draw), fused=fused
            )
        loss, nll = model(placed.ids, head, positions=placed.positions, trained=weights.sum(dim=1))
        return Measured(loss, self.sums(placed, nll), torch.where(placed.counted > 0, nll, UNTRAINED))

    def place(self, batch: Turns) -> PlacedTurns:
        """A micro-batch on the device, with its targets."""
        device = self._token_bytes.device
        ids, trained, sources = (
            part.to(device, non_blocking=True) for part in (batch.ids, batch.trained, batch.sources)
        )
        positions = None if batch.positions is None else batch.positions.to(device, non_blocking=True)
        targets = next_tokens(ids, trained)
        return PlacedTurns(ids, targets, (targets != IGNORED).float() * float(batch.real), sources, positions)

    def sums(self, placed: PlacedTurns, nll: Tensor) -> Tensor:
        """From the loss of each token (n, t): the total, and loss, trained tokens and bytes of each set."""
        num_bytes = self._token_bytes[placed.targets.clamp(min=0)]
        per_row = torch.stack(
            [(part * placed.counted).double().sum(dim=1) for part in (nll, placed.counted, num_bytes)], dim=1
        )
        # A product with one-hot columns instead of index_add_, whose order is not fixed on GPUs.
        per_set = torch.nn.functional.one_hot(placed.sources, len(self.packed.sources)).double().T @ per_row
        return torch.cat((per_set[:, :1].sum(dim=0), per_set.flatten()))

    def report(self, sums: Sequence[float], weight: float) -> dict[str, Any]:
        """Loss per trained token and bits per byte, over all sets and of each one that was read."""
        by_set = {
            name: sums[1 + SUMS_PER_SET * n : 1 + SUMS_PER_SET * (n + 1)] for n, name in enumerate(self.packed.sources)
        }
        return {
            **loss_metrics(sums[0], weight, sum(part[2] for part in by_set.values())),
            "sources": {
                name: {**loss_metrics(*part), "tokens": int(part[1])} for name, part in by_set.items() if part[1]
            },
        }

    def describe(self, rows: np.ndarray) -> dict[str, Any]:
        """The examples of some rows."""
        return {"examples": [piece["id"].hex() for piece in self.packed.pieces(rows).to_pylist()]}

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[dict[str, Any]]:
        """Every example of some rows with the mean loss of its trained tokens."""
        tokens = self.packed.tokens(rows)
        places = {int(row): place for place, row in enumerate(rows)}
        found = []
        for piece in self.packed.pieces(rows).to_pylist():
            place, start, end = places[piece["row"]], piece["start"], piece["start"] + piece["length"]
            # What is at a position is the loss of the token after it.
            losses = row_losses[place, max(start - 1, 0) : end - 1]
            found.append(
                {
                    "id": piece["id"].hex(),
                    "loss": mean_of_trained(losses),
                    "tokens": piece["length"],
                    "head": tokens[place, start : min(end, start + HEAD_TOKENS)].tolist(),
                }
            )
        return found
