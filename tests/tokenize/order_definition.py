"""Definition of the training order in exact integers; the kernels agree with it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from gristmill.tokenize.shuffle import half_bits_of, mix_bits, order_key, round_keys


def by_definition(
    counts: Sequence[int], seed: int, epoch: int, places: np.ndarray
) -> list[int]:
    """Rows at places of an epoch."""
    rows = []
    for place in places.tolist():
        source, row = unrank(counts, place)
        key = order_key(seed, "epoch", epoch, source)
        permuted = permute(np.array([row]), counts[source], key)
        rows.append(rank(counts, source, int(permuted[0])))
    return rows


def rank(counts: Sequence[int], source: int, row: int) -> int:
    """Place of a source's row in the merged order: the number of rows before it.

    Row i of source t comes first if (2i + 1) n_s < (2j + 1) n_t, or if they are equal
    and t < s.
    """
    place = row
    for other, count in enumerate(counts):
        if other != source:
            slack = (2 * row + 1) * count - counts[source]
            tied = other < source
            before = (slack - (not tied)) // (2 * counts[source]) + 1
            place += min(max(before, 0), count)
    return place


def unrank(counts: Sequence[int], place: int) -> tuple[int, int]:
    """Source and row at a place, the inverse of `rank`."""
    for source, count in enumerate(counts):
        row = bisect_left(
            range(count),
            place,
            key=lambda row, source=source: rank(counts, source, row),
        )
        if row < count and rank(counts, source, row) == place:
            return source, row
    raise ValueError(f"there is no place {place} in {sum(counts)} rows")


def permute(index: np.ndarray, n: int, key: int) -> np.ndarray:
    """Pseudo-random permutation of [0, n) (see `shuffle.permute`)."""
    half_bits = np.uint64(half_bits_of(n))
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    values = index.astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        left, right = values[outside] >> half_bits, values[outside] & mask
        for round_key in round_keys(key):
            left, right = right, left ^ (mix_bits(right, round_key) & mask)
        values[outside] = left << half_bits | right
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)
