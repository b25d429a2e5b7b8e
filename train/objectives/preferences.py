"""The objective of preference optimisation: the DPO loss over pairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.tokenize.order import Order
from gristmill.train.objectives.conversations import fingerprint_of
from gristmill.train.objectives.losses import dpo_loss, sequence_logps
from gristmill.train.objectives.pairs import Pair, padded_pairs


class Preferences:
    """The DPO loss over pairs (see loop.Objective), against log-probabilities that were computed once.

    Args:
        pairs: what to train on.
        reference: (n, 2) float32, as from pairs.pair_logps under the frozen reference.
        beta: strength of the KL constraint.
        seed: of the order.
        pad: the padding id.
        length: the longest conversation.
        flops_per_token: model arithmetic.
        device: where the policy computes.
    """

    sums_length = 6

    def __init__(
        self, pairs: Sequence[Pair], reference: np.ndarray, beta: float, seed: int, pad: int, length: int,
        flops_per_token: float, device: torch.device,
    ) -> None:
        self.order = Order([len(pairs)], seed)
        self.fingerprint = fingerprint_of(part for pair in pairs for part in (pair.chosen, pair.rejected))
        self.flops_per_token = flops_per_token
        self._pairs, self._beta, self._pad, self._length, self._device = pairs, beta, pad, length, device
        self._reference = torch.from_numpy(reference).to(device)
        self._lengths = np.array([len(pair.chosen.ids) + len(pair.rejected.ids) for pair in pairs], dtype=np.int64)

    def weight(self, rows: np.ndarray) -> float:
        """Pairs: every one counts the same, however long its answers are."""
        return float(len(rows))

    def num_tokens(self, rows: np.ndarray) -> int:
        """All tokens of both conversations but padding."""
        return int(self._lengths[rows].sum())

    def loss(self, model: nn.Module, rows: np.ndarray, scale: float) -> tuple[Tensor, Tensor]:
        """See loop.Objective; the sums are loss, rewards (chosen, rejected), ranked right, log-probs (both)."""
        # An empty micro-batch computes on any pair, with no weight: its passes are collective operations.
        real = float(len(rows) > 0)
        rows = rows if len(rows) else np.zeros(1, dtype=np.int64)
        ids, targets = padded_pairs([self._pairs[row] for row in rows], self._pad, self._length, self._device)
        chosen, rejected = model(ids, partial(sequence_logps, targets=targets)).chunk(2)
        reference = self._reference[torch.from_numpy(rows).to(self._device)]
        losses, chosen_rewards, rejected_rewards = dpo_loss(
            chosen, rejected, reference[:, 0], reference[:, 1], self._beta)
        measured = (losses, chosen_rewards, rejected_rewards, chosen_rewards > rejected_rewards, chosen, rejected)
        sums = torch.stack([part.detach().double().sum() for part in measured]) * real
        return losses.sum() * (scale * real), sums

    def report(self, sums: Sequence[float], weight: float) -> dict[str, Any]:
        """Means over pairs, by the names that TRL gives them; ties are not ranked right."""
        loss, chosen, rejected, right, chosen_logp, rejected_logp = (value / weight for value in sums)
        return {"loss": loss, "rewards/chosen": chosen, "rewards/rejected": rejected,
                "rewards/margins": chosen - rejected, "rewards/accuracies": right,
                "logps/chosen": chosen_logp, "logps/rejected": rejected_logp}

    def describe(self, rows: np.ndarray) -> dict[str, Any]:
        """The ids of the pairs."""
        return {"examples": [self._pairs[row].example["id"] for row in rows]}
