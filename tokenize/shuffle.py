"""The order in which a training set is read: a keyed permutation that keeps the mixture
in every prefix.

Rows belong to sources; source s has n_s of the R rows. Its row j has the virtual time
(2j + 1) / (2 n_s), and the rows of all sources are merged by virtual time (ties: the
source named first). So each source's rows lie evenly over the whole, and among the
first n rows source s has n n_s / R of them, within

    (1 - n_s / R) / 2  +  (n_s / R) (S - 1) / 2          for S sources,

which is half a row for two sources: up to time t a source has n_s t rows, rounded to
half a row, and n is the sum of those. Within each source the rows are shuffled by a
keyed permutation, again in every epoch. Everything is computed from the position alone,
exactly, in memory proportional to the number of sources.

A set with phases is read phase after phase, each in such an order over its own rows, so
the bound holds within every phase. It is read once: its last phase ends the training.

Withheld rows are skipped, and the order of all other rows is unchanged. A training that
has read none of the withheld rows has read exactly a prefix of the shorter order, so it
can resume from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import numpy as np

from gristmill.core.seeds import seeded_key
from gristmill.tokenize.shuffle_kernels import (
    permute_source,
    rank_source,
    reorder,
    rows_of_span,
    unrank_all,
)

MAX_ROWS = 2**40
FEISTEL_ROUNDS = 6
"""Luby & Rackoff 1988 prove 4 sufficient for ideal round functions; two more because
ours is only a good mixer.
"""
MIN_HALF_BITS = 3
"""Below 3 bits a half has too few values for the rounds to mix a tiny domain."""

ROWS_AHEAD = 4096
"""Rows computed per span: a tenth of a millisecond and 32 KB."""


class ReadOnceError(ValueError):
    """A read beyond the end of a set with phases, which is read once."""


class Order:
    """Row at each reading position, epoch after epoch.

    Args:
        rows_per_source: rows of each source; the mixture's proportions.
        seed: of the shuffle.

    Attributes:
        total: rows of an epoch.
        has_phases: more than one phase, and thus a single epoch.

    Raises:
        ValueError: a negative count, no rows at all, or more than 2**40.
    """

    def __init__(self, rows_per_source: Sequence[int], seed: int) -> None:
        self._set_phases([rows_per_source])
        self.seed = int(seed)
        self.total = int(self._ends[-1])
        self.has_phases = False
        self._ahead = (0, np.empty(0, np.int64))

    def _set_phases(self, phases: Sequence[Sequence[int]]) -> None:
        self._phases = [checked_counts(counts) for counts in phases]
        rows = [int(counts.sum()) for counts in self._phases]
        if not all(rows):
            raise ValueError(
                f"an order needs at least one row in every phase, not {rows}"
            )
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._half_bits = [
            np.array([half_bits_of(count) for count in counts.tolist()])
            for counts in self._phases
        ]

    @classmethod
    def of_phases(cls, phases: Sequence[Sequence[int]], seed: int) -> Order:
        """Order of a set with phases: rows of each source, by phase. Phases are stored
        one after another.

        A single phase is an order without phases.

        Raises:
            ValueError: no phase, a phase without rows, unequal numbers of sources, or
                more than 2**40 rows.
        """
        order = cls([sum(column) for column in zip(*phases, strict=True)], seed)
        order._set_phases(phases)
        order.has_phases = len(phases) > 1
        return order

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Physical rows at global positions (position p is place p % R of epoch p //
        R).

        Args:
            positions: int64, any shape, not negative.

        Returns:
            int64 rows in [0, R), of the same shape; each epoch is a permutation of all
            rows.

        Raises:
            ValueError: a negative position.
            ReadOnceError: a position beyond the end of a set with phases.
        """
        positions = np.asarray(positions, np.int64)
        return self._shuffle(*self._places(positions), inverse=False).reshape(
            positions.shape
        )

    def check_reads(self, positions: int) -> None:
        """Check that `positions` positions can be read: a set with phases has a single
        epoch.

        Raises:
            ReadOnceError: it has fewer.
        """
        if self.has_phases and positions > self.total:
            raise ReadOnceError(
                f"{positions} rows would be read, but the set with phases has "
                f"{self.total}, and is "
                "read once; train for fewer steps, or mix more tokens (mix.tokens)"
            )

    def _places(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Epochs, and places within them (both int64 of shape (n,)), of positions of
        any shape.
        """
        if positions.size:
            if (low := int(positions.min())) < 0:
                raise ValueError(f"positions start at 0, not {low}")
            self.check_reads(int(positions.max()) + 1)
        return np.divmod(positions.ravel(), self.total)

    def span(self, first: int, count: int) -> np.ndarray:
        """Rows of `count` consecutive positions, as a batch reads them; much cheaper
        than `rows`.

        Returns:
            int64 of shape (count,), read-only: it may share memory with later spans.
        """
        self.check_reads(first + count)
        begin, ahead = self._ahead
        if begin <= first and first + count <= begin + len(ahead):
            return ahead[first - begin : first - begin + count]
        epoch, place = divmod(first, self.total)
        phase = int(np.searchsorted(self._ends, place, side="right"))
        end = int(self._ends[phase])
        if first < 0 or place + count > end:
            return self.rows(np.arange(first, first + count, dtype=np.int64))
        before = int(self._ends[phase - 1]) if phase else 0
        counts = self._phases[phase]
        # Compute the next batches' spans too: the overhead of a call is half the cost
        # of a batch.
        rows = np.empty(max(count, min(ROWS_AHEAD, end - place)), np.int64)
        keys = _epoch_keys(self.seed, phase, epoch, len(counts), False)
        rows_of_span(counts, self._half_bits[phase], keys, place - before, rows)
        if before:
            rows += before
        self._ahead = (first, rows)
        return rows[:count]

    def positions(self, rows: np.ndarray, epoch: int = 0) -> np.ndarray:
        """Global position of each row in an epoch, the inverse of `rows`.

        Args:
            rows: int64 in [0, R), any shape.
            epoch: from 0, the only one of a set with phases.

        Returns:
            int64 in [epoch R, (epoch + 1) R), of the same shape.

        Raises:
            ReadOnceError: a later epoch of a set with phases.
        """
        rows = np.asarray(rows, np.int64)
        self.check_reads((epoch + 1) * self.total)
        epochs = np.full(rows.size, epoch, np.int64)
        return epoch * self.total + self._shuffle(
            epochs, rows.ravel(), inverse=True
        ).reshape(rows.shape)

    def _shuffle(
        self, epochs: np.ndarray, places: np.ndarray, inverse: bool
    ) -> np.ndarray:
        """Permute the rows of each source among themselves, phase by phase; or invert
        it.
        """
        phases = np.searchsorted(self._ends, places, side="right")
        shuffled = places.copy()
        for phase, epoch in product(_distinct(phases), _distinct(epochs)):
            mask = (phases == phase) & (epochs == epoch)
            first = int(self._ends[phase - 1]) if phase else 0
            counts = self._phases[phase]
            keys = _epoch_keys(self.seed, phase, epoch, len(counts), inverse)
            within = places[mask] - first
            reordered = np.empty_like(within)
            reorder(counts, self._half_bits[phase], keys, within, inverse, reordered)
            shuffled[mask] = first + reordered
        return shuffled


def _distinct(values: np.ndarray) -> list[int]:
    """Distinct values; skips the sort for a single value, the usual case for epochs and
    phases of a batch.
    """
    if len(values) and values.min() == values.max():
        return [int(values[0])]
    return np.unique(values).tolist()


@lru_cache(maxsize=64)
def _epoch_keys(
    seed: int, phase: int, epoch: int, sources: int, inverse: bool
) -> np.ndarray:
    """Round keys (uint64, (S, FEISTEL_ROUNDS)) of one epoch's permutations, in order of
    use.
    """
    parts = (*phase_parts(phase), "epoch", epoch)
    return np.array(
        [
            round_keys(order_key(seed, *parts, source), inverse)
            for source in range(sources)
        ]
    )


def phase_parts(phase: int) -> tuple[str | int, ...]:
    """Key parts of a phase; empty for the first one, so a single phase equals an order
    without phases.
    """
    return ("stage", phase) if phase else ()


def sources_of_rows(
    phases: Sequence[Sequence[int] | np.ndarray], rows: np.ndarray
) -> np.ndarray:
    """Source numbers (int64, shape (n,)) of physical rows of a set with phases;
    `phases` as in `Order.of_phases`.
    """
    counts = [checked_counts(phase) for phase in phases]
    ends = np.cumsum([sum(phase) for phase in phases], dtype=np.int64)
    row_sources = np.empty(len(rows), np.int64)
    phase_of = np.searchsorted(ends, rows, side="right")
    for phase in _distinct(phase_of):
        mask = phase_of == phase
        places = np.asarray(rows, np.int64)[mask] - (
            int(ends[phase - 1]) if phase else 0
        )
        sources = np.empty_like(places)
        unrank_all(counts[phase], places, sources, np.empty_like(places))
        row_sources[mask] = sources
    return row_sources


@lru_cache(maxsize=4096)
def order_key(seed: int, *parts: str | int) -> int:
    """Key of a permutation: 64 bits that depend on every part."""
    return seeded_key("gristmill", seed, *parts)


def checked_counts(rows_per_source: Sequence[int] | np.ndarray) -> np.ndarray:
    """Counts as int64; raises ValueError if they are negative or too large for exact
    arithmetic.
    """
    counts = np.asarray(rows_per_source, np.int64).reshape(-1)
    if (counts < 0).any() or sum(counts.tolist()) > MAX_ROWS:
        raise ValueError(
            f"rows per source must be between 0 and {MAX_ROWS} together, not "
            f"{counts.tolist()}"
        )
    return counts


def rank(
    rows_per_source: Sequence[int] | np.ndarray, source: int, index: np.ndarray
) -> np.ndarray:
    """Places in the merged order of rows `index` (int64, shape (k,)) of a source."""
    places = np.empty(len(index), np.int64)
    rank_source(checked_counts(rows_per_source), source, index, places)
    return places


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Pseudo-random permutation of [0, n), computed without a table.

    A balanced Feistel network over the smallest even number of bits that holds n;
    results outside [0, n) are permuted again until they fall inside (cycle walking:
    Black & Rogaway 2002), fewer than four times on average for n > 16.

    Args:
        index: int64 of shape (k,), in [0, n).
        n: size of the domain.
        key: 64 bits, see `order_key`.
    """
    numbers = index.copy()
    permute_source(
        numbers,
        n,
        half_bits_of(n),
        round_keys(key),
        False,
        np.empty(len(numbers), np.uint64),
        np.empty(len(numbers), np.int64),
    )
    return numbers


def half_bits_of(n: int) -> int:
    """Half the width of the Feistel network over [0, n)."""
    return max(MIN_HALF_BITS, ((n - 1).bit_length() + 1) // 2)


def round_keys(key: int, inverse: bool = False) -> np.ndarray:
    """Keys (uint64, (FEISTEL_ROUNDS,)) of a permutation's rounds, in order of use."""
    numbers = range(FEISTEL_ROUNDS)
    keys = [order_key(key, number) for number in numbers]
    return np.array(keys[::-1] if inverse else keys, np.uint64)


def mix_bits(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Mix 64-bit numbers (uint64, any shape) with a key: the finaliser of SplitMix64
    (Steele, Lea & Flood 2014).
    """
    mixed = values ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class OrderWithout(Order):
    """Order without withheld rows; later rows move up. Memory is proportional to the
    number of withheld rows.

    Args:
        whole: the order of all rows.
        withheld: int64, rows that are never read.

    Attributes:
        total: remaining rows of an epoch.

    Raises:
        ValueError: no row remains.
    """

    def __init__(self, whole: Order, withheld: np.ndarray) -> None:
        self._whole = whole
        self._withheld = np.unique(np.asarray(withheld, np.int64))
        self.seed = whole.seed
        self.has_phases = whole.has_phases
        self.total = whole.total - len(self._withheld)
        if self.total <= 0:
            raise ValueError(
                f"all {whole.total} rows are withheld; there is nothing left to read"
            )
        self._gaps: dict[int, np.ndarray] = {}

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """See Order.rows; withheld rows never occur."""
        positions = np.asarray(positions, np.int64)
        epochs, places = self._places(positions)
        for epoch in np.unique(epochs).tolist():
            mask = epochs == epoch
            gaps = self._gaps_before(epoch, places[mask])
            places[mask] += gaps + epoch * self._whole.total
        return self._whole.rows(places).reshape(positions.shape)

    def span(self, first: int, count: int) -> np.ndarray:
        """See Order.span."""
        self.check_reads(first + count)
        epoch, place = divmod(first, self.total)
        if first >= 0 and 0 < count <= self.total - place:
            gaps = self._gaps_before(epoch, [place, place + count - 1])
            if gaps[0] == gaps[1]:  # no gap lies within
                whole_place = epoch * self._whole.total + place + int(gaps[0])
                return self._whole.span(whole_place, count)
        return self.rows(np.arange(first, first + count, dtype=np.int64))

    def positions(self, rows: np.ndarray, epoch: int = 0) -> np.ndarray:
        """See Order.positions; raises ValueError for a withheld row."""
        rows = np.asarray(rows, np.int64)
        never = rows[np.isin(rows, self._withheld)]
        if never.size:
            raise ValueError(f"row {never.flat[0]} is withheld: no position reads it")
        places = self._whole.positions(rows, epoch) - epoch * self._whole.total
        return (
            places - np.searchsorted(self._gaps_of(epoch), places) + epoch * self.total
        )

    def _gaps_before(
        self, epoch: int, places: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Number of gaps before each place of an epoch: gap g shifts every place from
        g - (number of gaps before it) on by one.
        """
        gaps = self._gaps_of(epoch)
        return np.searchsorted(gaps - np.arange(len(gaps)), places, side="right")

    def _gaps_of(self, epoch: int) -> np.ndarray:
        """Places of the withheld rows within an epoch of the full order, ascending."""
        if epoch not in self._gaps:
            places = (
                self._whole.positions(self._withheld, epoch) - epoch * self._whole.total
            )
            self._gaps = {epoch: np.sort(places)}
        return self._gaps[epoch]
