"""Objective of preference optimisation: DPO and related losses over pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.core.object_stores import Warn
from gristmill.mixtures.schema.posttraining import Dpo
from gristmill.train.data.preference_rows import Drawn, PairRows
from gristmill.train.loop.batch_plan import or_first
from gristmill.train.loop.objective import Measured, Numbers
from gristmill.train.loop.prefetch import TensorBatch
from gristmill.train.objectives.losses import IGNORED, sequence_logps
from gristmill.train.objectives.preference_losses import (
    PairLogps,
    preference_loss,
)
from gristmill.train.objectives.preference_report import DeclineAlarm

MEANS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
    "fell/chosen",
    "fell/rejected",
    "log_ratio/chosen",
    "log_ratio/rejected",
)
"""Metrics that are means over pairs, in the order of the sums."""


@dataclass(frozen=True)
class PaddedPairs(TensorBatch):
    """A micro-batch of n pairs in host memory.

    Attributes:
        ids, targets: (2n, t) each, all chosen answers first.
        reference: (n, 2) float32, see Preferences.
        real: false for an empty micro-batch, whose rows are padding.
    """

    ids: Tensor
    targets: Tensor
    reference: Tensor
    real: bool


def measured_pairs(
    losses: Tensor, columns: Sequence[Tensor], scale: float, real: bool
) -> Measured:
    """Result of a micro-batch of pairs: `losses` (n,) and `columns` to sum, (n,) each;
    all zero unless `real`.
    """
    sums = torch.stack([column.detach().double().sum() for column in columns]) * real
    return Measured(losses.sum() * (scale * real), sums, losses.detach()[:, None])


class Preferences(Drawn):
    """Loss over pairs (see objective.Objective), with precomputed reference
    log-probabilities.

    Args:
        rows: the pairs.
        draws: int64 arrays of the pairs to train on, by set; duplicates are read
            repeatedly in an epoch.
        reference: (P, 2) float32 of all pairs, from reference_logps.pair_logps with the
            frozen reference.
        section: loss and its settings.
        seed: of the row order.
        flops_per_token: model FLOPs.
        device: of the policy.
        warn: receives warnings that chosen answers keep becoming less likely.
    """

    sums_length = len(MEANS)

    def __init__(
        self,
        rows: PairRows,
        draws: Sequence[np.ndarray],
        reference: np.ndarray,
        section: Dpo,
        seed: int,
        flops_per_token: float,
        device: torch.device,
        warn: Warn = lambda message: None,
    ) -> None:
        super().__init__(rows.ids, rows.num_tokens, draws, seed)
        self.fingerprint = self.digest(rows.fingerprint)
        self.flops_per_token = flops_per_token
        self.sequence_length = rows.packed.sequence_length
        self._rows = rows
        self._reference = reference
        self._section = section
        self._device = device
        self._alarm = DeclineAlarm(warn)

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> PaddedPairs:
        """Read a micro-batch of pairs; an empty one holds a pair of weight zero."""
        pairs = self.numbers[or_first(rows)]
        ids, targets = self._rows.read(pairs)
        reference = torch.from_numpy(self._reference[pairs])
        return PaddedPairs(ids, targets, reference, bool(len(rows))).pinned()

    def loss(self, model: nn.Module, batch: PaddedPairs, scale: float) -> Measured:
        """See objective.Objective.

        The sums are those of MEANS.
        """
        batch = batch.to(self._device)
        head = partial(sequence_logps, targets=batch.targets)
        chosen, rejected = model(batch.ids, head).chunk(2)
        tokens = (batch.targets != IGNORED).sum(dim=1).float().chunk(2)
        logps = PairLogps(chosen, rejected, *batch.reference.unbind(1), *tokens)
        losses, chosen_rewards, rejected_rewards = preference_loss(logps, self._section)
        measured = (
            losses,
            chosen_rewards,
            rejected_rewards,
            chosen_rewards > rejected_rewards,
            chosen,
            rejected,
            *(gain < 0 for gain in logps.gains),
            *(gain / n for gain, n in zip(logps.gains, tokens, strict=True)),
        )
        return measured_pairs(losses, measured, scale, batch.real)

    def report(self, sums: Sequence[float], weight: float) -> Numbers:
        """Means over pairs, with the names of TRL; ties count as ranked incorrectly.

        `fell/*` are shares of answers that are less likely than under the reference.
        `log_ratio/*` is log(policy / reference) per token: if the answers were sampled
        from the reference, its negative is an unbiased estimate of KL(reference ||
        policy) per token.
        """
        line = {name: value / weight for name, value in zip(MEANS, sums, strict=True)}
        line["rewards/margins"] = line["rewards/chosen"] - line["rewards/rejected"]
        self._alarm.look(line)
        return line
