"""The objective of supervised fine-tuning: the next token where the assistant speaks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.tokenize.order import Order
from gristmill.train.evaluation.held_out import loss_metrics
from gristmill.train.objectives.conversations import Conversation, fingerprint_of, padded
from gristmill.train.objectives.losses import IGNORED, next_tokens, weighted_nll


class AssistantTurns:
    """Cross-entropy over the assistant's tokens (see loop.Objective).

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
        self._examples, self._pad, self._length, self._token_bytes = examples, pad, length, token_bytes
        self._trained = np.array([int(one.trained.sum()) for one in examples], dtype=np.int64)
        self._lengths = np.array([len(one.ids) for one in examples], dtype=np.int64)

    def weight(self, rows: np.ndarray) -> float:
        """Trained tokens."""
        return float(self._trained[rows].sum())

    def num_tokens(self, rows: np.ndarray) -> int:
        """All tokens but padding."""
        return int(self._lengths[rows].sum())

    def loss(self, model: nn.Module, rows: np.ndarray, scale: float) -> tuple[Tensor, Tensor]:
        """See loop.Objective; the sums are loss, trained tokens and their bytes."""
        # An empty micro-batch computes on any row, with no weight: its passes are collective operations.
        real = float(len(rows) > 0)
        chosen = [self._examples[row] for row in (rows if len(rows) else [0])]
        ids, trained = (part.to(self._token_bytes.device) for part in padded(chosen, self._pad, self._length))
        targets = next_tokens(ids, trained)
        counted = (targets != IGNORED).float() * real
        weights = counted * scale
        loss, nll = model(ids, partial(weighted_nll, targets=targets, weights=weights), trained=weights.sum(dim=1))
        num_bytes = self._token_bytes[targets.clamp(min=0)]
        return loss, torch.stack([(part * counted).double().sum() for part in (nll, counted, num_bytes)])

    def report(self, sums: Sequence[float], weight: float) -> dict[str, Any]:
        """Loss per trained token, and bits per byte of the answers."""
        return loss_metrics(sums[0], weight, sums[2])

    def describe(self, rows: np.ndarray) -> dict[str, Any]:
        """The examples' place among those used."""
        return {"examples": rows.tolist()}
