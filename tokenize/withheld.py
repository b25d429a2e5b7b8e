"""The order of a set of which some rows are withheld: the same order without them.

What comes before the first of them stays as it was.

A training that has read none of the withheld rows yet has read exactly a beginning of the shorter order. So it can go
on from its checkpoint as if they had never been there.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from gristmill.tokenize.order import Order


class OrderWithout(Order):
    """An order from which rows are left out; those behind a gap move up. Memory is proportional to their number.

    Args:
        whole: the order of all rows.
        withheld: int64, the rows that are never read.

    Attributes:
        total: rows of an epoch, those that are left.

    Raises:
        ValueError: no row is left.
    """

    def __init__(self, whole: Order, withheld: np.ndarray) -> None:
        self._whole = whole
        self._withheld = np.unique(np.asarray(withheld, dtype=np.int64))
        self.seed, self.staged = whole.seed, whole.staged
        self.total = whole.total - len(self._withheld)
        if self.total <= 0:
            raise ValueError(f"all {whole.total} rows are withheld; there is nothing left to read")
        self._gaps: dict[int, np.ndarray] = {}

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """See Order.rows; no row is a withheld one."""
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and positions.min() < 0:
            raise ValueError(f"positions start at 0, not {positions.min()}")
        epochs, places = np.divmod(positions.ravel(), self.total)
        if self.staged and epochs.any():
            raise ValueError(f"position {positions.max()} is beyond the {self.total} rows of a staged set, which is "
                             "read once; train for fewer steps, or mix more tokens (mix.tokens)")
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            gaps = self._gaps_of(epoch)
            # Gap g moves every place from g - (number of gaps before it) on up by one.
            moved = np.searchsorted(gaps - self._numbers, places[chosen], side="right")
            places[chosen] += moved + epoch * self._whole.total
        return self._whole.rows(places).reshape(positions.shape)

    def span(self, first: int, count: int) -> np.ndarray:
        """See Order.span."""
        epoch, place = divmod(first, self.total)
        if first >= 0 and 0 < count <= self.total - place and not (self.staged and epoch):
            moved = np.searchsorted(self._gaps_of(epoch) - self._numbers, [place, place + count - 1], side="right")
            if moved[0] == moved[1]:  # no gap lies within
                return self._whole.span(epoch * self._whole.total + place + int(moved[0]), count)
        return self.rows(np.arange(first, first + count, dtype=np.int64))

    def positions(self, rows: np.ndarray, epoch: int = 0) -> np.ndarray:
        """See Order.positions; raises ValueError for a withheld row, which has none."""
        rows = np.asarray(rows, dtype=np.int64)
        never = rows[np.isin(rows, self._withheld)]
        if never.size:
            raise ValueError(f"row {never.flat[0]} is withheld: no position reads it")
        places = self._whole.positions(rows, epoch) - epoch * self._whole.total
        return places - np.searchsorted(self._gaps_of(epoch), places) + epoch * self.total

    @cached_property
    def _numbers(self) -> np.ndarray:
        return np.arange(len(self._withheld))

    def _gaps_of(self, epoch: int) -> np.ndarray:
        """The places within an epoch of the whole order that are left out, ascending."""
        if epoch not in self._gaps:
            places = self._whole.positions(self._withheld, epoch) - epoch * self._whole.total
            self._gaps = {epoch: np.sort(places)}
        return self._gaps[epoch]
