"""The objective of supervised fine-tuning: the next token where the assistant speaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.tokenize.order import Order
from gristmill.train.evaluation.held_out import loss_metrics
from gristmill.train.loop.batches import pinned
from gristmill.train.loop.objective import UNTRAINED, Measured, mean_of_trained
from gristmill.train.objectives.conversations import Conversation, fingerprint_of, padded
from gristmill.train.objectives.losses import IGNORED, drawn_nll, next_tokens, uniforms, weighted_nll


@dataclass(frozen=True)
class Turns:
    """A micro-batch in host memory: ids and which of them are trained, both (n, t), and whether it counts."""

    ids: Tensor
    trained: Tensor
    real: bool


HEAD_TOKENS = 64
"""Tokens of each example that an autopsy shows as text."""


class AssistantTurns:
    """Cross-entropy over the assistant's tokens (see objective.Objective).

    Args:
        examples: what to train on.
        seed: of the order.
        pad: the padding id.
        length: the longest row.
        token_bytes: (vocab,) bytes per id, on the device.
        flops_per_token: model arithmetic.
    """

    sums_length = 3

    def __init__(
        self, examples: Sequence[Conversation], seed: int, pad: int, length: int, token_bytes: Tensor,
        flops_per_token: float,
    ) -> None:
        self.order = Order([len(examples)], seed)
        self.fingerprint = fingerprint_of(examples)
        self.flops_per_token = flops_per_token
        self.sequence_length = length
        self._examples, self._pad, self._token_bytes = examples, pad, token_bytes
        self._trained = np.array([int(one.trained.sum()) for one in examples], dtype=np.int64)
        self._lengths = np.array([len(one.ids) for one in examples], dtype=np.int64)

    def weight(self, rows: np.ndarray, cuts: int = 1) -> float:
        """Trained tokens."""
        return float(self._trained[rows].sum())

    def num_tokens(self, rows: np.ndarray) -> int:
        """All tokens but padding."""
        return int(self._lengths[rows].sum())

    def prepare(self, rows: np.ndarray, cuts: int = 1) -> Turns:
        """Pad a micro-batch; for no rows any one, with no weight."""
        # An empty micro-batch computes too: its passes are collective operations.
        chosen = [self._examples[row] for row in (rows if len(rows) else [0])]
        ids, trained = padded(chosen, self._pad, self.sequence_length)
        return Turns(pinned(ids), pinned(trained), bool(len(rows)))

    def loss(self, model: nn.Module, batch: Turns, scale: float | Tensor, draw: int | None = None) -> Measured:
        """See objective.Objective; the sums are loss, trained tokens and their bytes."""
        device, real = self._token_bytes.device, float(batch.real)
        ids, trained = (part.to(device, non_blocking=True) for part in (batch.ids, batch.trained))
        targets = next_tokens(ids, trained)
        counted = (targets != IGNORED).float() * real
        weights = counted * scale
        head = partial(weighted_nll, targets=targets, weights=weights)
        if draw is not None:
            head = partial(drawn_nll, targets=targets, weights=weights, uniforms=uniforms(ids, draw))
        loss, nll = model(ids, head, trained=weights.sum(dim=1))
        num_bytes = self._token_bytes[targets.clamp(min=0)]
        sums = torch.stack([(part * counted).double().sum() for part in (nll, counted, num_bytes)])
        return Measured(loss, sums, torch.where(counted > 0, nll, UNTRAINED))

    def report(self, sums: Sequence[float], weight: float) -> dict[str, Any]:
        """Loss per trained token, and bits per byte of the answers."""
        return loss_metrics(sums[0], weight, sums[2])

    def describe(self, rows: np.ndarray) -> dict[str, Any]:
        """The examples' place among those used."""
        return {"examples": rows.tolist()}

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[dict[str, Any]]:
        """Every example with the mean loss of its trained tokens."""
        return [{"id": self._examples[row].example, "loss": mean_of_trained(losses),
                 "tokens": int(self._lengths[row]), "head": self._examples[row].ids[:HEAD_TOKENS].tolist()}
                for row, losses in zip(rows.tolist(), row_losses, strict=True)]
