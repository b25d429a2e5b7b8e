"""Which rows a pre-training has really read: what probes ask about, and what fine-tuning replays or holds on to.

Less than one epoch leaves rows unread, early stopping more of them, and a rollback leaves out what was read before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.mixtures.training import Pretrain
from gristmill.tokenize.order import Order, order_key, permute
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.record import METRICS
from gristmill.train.loop.rollback import plan_after, read_rollbacks
from gristmill.train.loop.row_plan import RowPlan, plan_of

READS = "reads"
"""What a stage that asks about these rows gets of the section `pretrain`: see mixtures.training.READING_KEYS."""


@dataclass(frozen=True)
class RowsRead:
    """The rows of a packed set that a training has read in its first epoch, in the order in which it did.

    Attributes:
        packed: the set.
        order: in which the training reads it.
        spans: int64 of shape (n, 2), first position and the one behind the last, ascending.
    """

    packed: PackedSet
    order: Order
    spans: np.ndarray

    @property
    def count(self) -> int:
        """How many there are."""
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    def first(self, count: int) -> np.ndarray:
        """The first `count` rows that were read (int64); from the first one again where there are fewer."""
        return self._rows(np.arange(count, dtype=np.int64) % self.count)

    def drawn(self, count: int, seed: int) -> np.ndarray:
        """At most `count` of the rows, chosen by hash, each once; int64, ascending."""
        chosen = np.arange(min(count, self.count), dtype=np.int64)
        return np.sort(self._rows(permute(chosen, self.count, order_key(seed, "rows read"))))

    def holds(self, rows: np.ndarray) -> np.ndarray:
        """Whether each of some rows (int64, shape (n,)) is among them: bool of shape (n,)."""
        found = ~np.isin(rows, self.packed.withheld)
        positions = self.order.positions(rows[found])
        span = np.searchsorted(self.spans[:, 0], positions, side="right") - 1
        found[found] = (span >= 0) & (positions < self.spans[np.maximum(span, 0), 1])
        return found

    def _rows(self, numbers: np.ndarray) -> np.ndarray:
        ends = np.cumsum(self.spans[:, 1] - self.spans[:, 0])
        span = np.searchsorted(ends, numbers, side="right")
        rows: np.ndarray = self.order.rows(self.spans[span, 1] - ends[span] + numbers)
        return rows


def rows_read(packed: PackedSet, reads: Mapping[str, Any], folder: Path | None) -> RowsRead:
    """What a pre-training has read of a packed set.

    Args:
        packed: the set that it read.
        reads: see READS.
        folder: its output, which knows where it ended early or went back; None where the plan alone decides.
    """
    section = Pretrain.model_validate(reads)
    plan, steps = plan_of(section, packed.sequence_length), section.steps
    if folder is not None:
        plan = plan_after(plan, read_rollbacks(folder))
        steps = max(json.loads(line)["step"] for line in (folder / METRICS).read_text().splitlines())
    order = packed.order(section.key_seed)
    spans = np.minimum(_spans(plan, steps), order.total)
    return RowsRead(packed, order, spans[spans[:, 0] < spans[:, 1]])


def _spans(plan: RowPlan, steps: int) -> np.ndarray:
    """The positions that so many steps read: int64 of shape (n, 2), see RowsRead."""
    bounds = sorted({0, steps, *(step for step, _ in plan.jumps if step < steps)})
    return np.array(
        [(plan.positions(first)[0], sum(plan.positions(end - 1))) for first, end in pairwise(bounds)], dtype=np.int64
    ).reshape(-1, 2)
