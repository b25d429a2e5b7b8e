"""Rows that a pre-training has read, for the search for leaked items and for replay in
fine-tuning.

Less than one epoch and early stopping leave rows unread, and rollbacks skip rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from gristmill.mixtures.sections.pretrain import Pretrain
from gristmill.tokenize.order import Order, order_key, permute
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.batch_plan import plan_of
from gristmill.train.loop.metrics_log import METRICS
from gristmill.train.loop.rollback import plan_after, read_rollbacks

READS = "reads"
"""Config key for the keys of the section `pretrain` that determine the rows: see
mixtures.training.READING_KEYS.
"""


@dataclass(frozen=True)
class RowsRead:
    """Rows of a packed set that a training has read in its first epoch, in reading
    order.

    Attributes:
        packed: the set.
        order: reading order of the training.
        spans: int64 of shape (n, 2), first position and end (exclusive), ascending.
    """

    packed: PackedSet
    order: Order
    spans: np.ndarray

    @property
    def count(self) -> int:
        """Number of rows."""
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())

    def first(self, count: int) -> np.ndarray:
        """First `count` rows (int64), repeated if there are fewer."""
        return self._rows(np.arange(count, dtype=np.int64) % self.count)

    def drawn(self, count: int, seed: int) -> np.ndarray:
        """At most `count` distinct rows, chosen by hash; int64, ascending."""
        indices = np.arange(min(count, self.count), dtype=np.int64)
        return np.sort(
            self._rows(permute(indices, self.count, order_key(seed, "rows read")))
        )

    def _rows(self, numbers: np.ndarray) -> np.ndarray:
        ends = np.cumsum(self.spans[:, 1] - self.spans[:, 0])
        span = np.searchsorted(ends, numbers, side="right")
        rows: np.ndarray = self.order.rows(self.spans[span, 1] - ends[span] + numbers)
        return rows


def rows_read(packed: PackedSet, section: Pretrain, folder: Path | None) -> RowsRead:
    """Rows that a pre-training has read of a packed set.

    Args:
        packed: the set.
        section: of the pre-training, at least its READING_KEYS.
        folder: output of the pre-training, which records an early end and rollbacks;
            None to use the plan alone.
    """
    plan = plan_of(section, packed.sequence_length)
    steps = section.steps
    if folder is not None:
        plan = plan_after(plan, read_rollbacks(folder))
        steps = max(
            json.loads(line)["step"]
            for line in (folder / METRICS).read_text().splitlines()
        )
    order = packed.order(section.key_seed)
    bounds = sorted({0, steps, *(step for step, _ in plan.jumps if step < steps)})
    spans = np.minimum(
        np.array(
            [
                (plan.positions(first)[0], sum(plan.positions(end - 1)))
                for first, end in pairwise(bounds)
            ],
            dtype=np.int64,
        ).reshape(-1, 2),
        order.total,
    )
    return RowsRead(packed, order, spans[spans[:, 0] < spans[:, 1]])
