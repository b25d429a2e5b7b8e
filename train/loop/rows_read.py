"""Rows that a pre-training has read, for the search for leaked items and for replay in
fine-tuning.

Less than one epoch and early stopping leave rows unread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.core.files import read_json_lines
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.shuffle import Order, order_key, permute
from gristmill.train.loop.batch_plan import plan_of, slices
from gristmill.train.loop.metrics_log import METRICS

DecodeRows = Callable[[Sequence[Sequence[int]]], list[str]]
"""Function from rows of ids to their texts."""
ROWS_AT_A_TIME = 256
"""Rows that are decoded together."""
READS = "reads"
"""Config key for the keys of the section `pretrain` that determine the rows: see
mixtures.schema.pretrain.READING_KEYS.
"""


@dataclass(frozen=True)
class RowsRead:
    """Rows of a packed set that a training has read in its first epoch, in reading
    order.

    Attributes:
        packed: the set.
        order: reading order of the training.
        count: number of rows.
    """

    packed: PackedSet
    order: Order
    count: int

    def first(self, count: int) -> np.ndarray:
        """First `count` rows (int64), repeated if there are fewer."""
        return self.order.rows(np.arange(count, dtype=np.int64) % self.count)

    def texts(self, rows: np.ndarray, decode: DecodeRows) -> Iterator[list[str]]:
        """Yield the texts of some rows, ROWS_AT_A_TIME together."""
        for part in slices(len(rows), ROWS_AT_A_TIME):
            yield decode(self.packed.read(rows[part]).tolist())

    def drawn(self, count: int, seed: int) -> np.ndarray:
        """At most `count` distinct rows, chosen by hash; int64, ascending."""
        indices = np.arange(min(count, self.count), dtype=np.int64)
        return np.sort(
            self.order.rows(permute(indices, self.count, order_key(seed, "rows read")))
        )


def rows_read(packed: PackedSet, section: Pretrain, folder: Path | None) -> RowsRead:
    """Rows that a pre-training has read of a packed set.

    Args:
        packed: the set.
        section: of the pre-training, at least its READING_KEYS.
        folder: output of the pre-training, which records an early end; None to use the
            plan alone.
    """
    plan = plan_of(section, packed.sequence_length)
    steps = section.steps
    if folder is not None:
        steps = max(line["step"] for line in read_json_lines(folder / METRICS))
    order = packed.order(section.key_seed)
    return RowsRead(packed, order, min(plan.end(steps), order.total))
