"""The objective of distillation: the trained tokens of packed conversations, against labels and a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.mixtures.posttraining import Distill
from gristmill.train.loop.batches import pinned
from gristmill.train.loop.objective import UNTRAINED, Measured
from gristmill.train.objectives.assistant_turns import AssistantTurns, Turns
from gristmill.train.objectives.distillation import Taught, distilled_nll
from gristmill.train.objectives.teacher_rows import TeacherRows


@dataclass(frozen=True)
class TaughtBatch:
    """A micro-batch in host memory: rows, and the teacher's distributions over their trained tokens."""

    turns: Turns
    taught: Taught


class TaughtTurns:
    """Labels and a teacher mixed (see objective.Objective).

    Args:
        turns: the rows and their labels.
        teacher: of the same rows.
        settings: how both are mixed.
    """

    def __init__(self, turns: AssistantTurns, teacher: TeacherRows, settings: Distill) -> None:
        self._turns, self._teacher, self._settings = turns, teacher, settings
        self.order, self.fingerprint, self.sequence_length = turns.order, turns.fingerprint, turns.sequence_length
        self.flops_per_token = turns.flops_per_token
        self.sums_length = 2 + turns.sums_length
        self.weight, self.num_tokens = turns.weight, turns.num_tokens
        self.describe, self.blame = turns.describe, turns.blame

    def prepare(self, rows: np.ndarray, cuts: int = 1) -> TaughtBatch:
        """See AssistantTurns.prepare."""
        taught = self._teacher.read(rows if len(rows) else np.zeros(1, dtype=np.int64))
        return TaughtBatch(self._turns.prepare(rows, cuts), Taught(*(
            None if part is None else pinned(part) for part in (taught.logps, taught.ids, taught.rest))))  # type: ignore[arg-type]

    def loss(self, model: nn.Module, batch: TaughtBatch, scale: float | Tensor, draw: int | None = None) -> Measured:
        """See objective.Objective; the sums are the mixed loss and the divergence, and those of AssistantTurns."""
        placed = self._turns.place(batch.turns)
        weights = placed.counted * scale
        head = partial(distilled_nll, targets=placed.targets, weights=weights, taught=batch.taught.to(weights.device),
                       settings=self._settings)
        loss, nll, apart = model(placed.ids, head, positions=placed.positions, trained=weights.sum(dim=1))
        weight, square = self._settings.weight, self._settings.temperature**2
        mixed = (1 - weight) * nll + weight * square * apart
        both = torch.stack([(part * placed.counted).double().sum() for part in (mixed, apart)])
        return Measured(loss, torch.cat((both, self._turns.sums(placed, nll))),
                        torch.where(placed.counted > 0, mixed, UNTRAINED))

    def report(self, sums: Sequence[float], weight: float) -> dict[str, Any]:
        """The mixed loss, `divergence` from the teacher in nats per token at its temperature, and the labels' own
        `label_loss`, with what AssistantTurns reports of labels."""
        mixed, apart, *of_labels = sums
        labels = self._turns.report(of_labels, weight)
        return {**labels, "loss": mixed / weight, "label_loss": labels["loss"], "divergence": apart / weight}
