"""Definition of the training order in NumPy; the kernels agree with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gristmill.tokenize.shuffle import (
    checked_counts,
    half_bits_of,
    mix_bits,
    order_key,
    round_keys,
)

CHUNK_CELLS = 1 << 20


def by_definition(
    counts: list[int], seed: int, epoch: int, places: np.ndarray
) -> np.ndarray:
    """Rows at places of an epoch."""
    sources, index = unrank(counts, places)
    for source in np.unique(sources).tolist():
        is_source = sources == source
        key = order_key(seed, "epoch", epoch, source)
        index[is_source] = permute(index[is_source], counts[source], key)
    return rank(counts, sources, index)


def rank(
    rows_per_source: Sequence[int] | np.ndarray, sources: np.ndarray, index: np.ndarray
) -> np.ndarray:
    """Places in the merged order of rows `index` of `sources` (int64, broadcast
    together, exact).
    """
    counts = checked_counts(rows_per_source)
    sources, index = np.broadcast_arrays(
        np.asarray(sources, dtype=np.int64), np.asarray(index, dtype=np.int64)
    )
    flat_sources = sources.ravel()
    flat_index = index.ravel()
    places = np.empty(len(flat_index), dtype=np.int64)
    step = max(1, CHUNK_CELLS // max(1, len(counts)))
    for start in range(0, len(places), step):
        chunk = slice(start, start + step)
        places[chunk] = _merged_before(counts, flat_sources[chunk], flat_index[chunk])
    return places.reshape(index.shape)


def _merged_before(
    counts: np.ndarray, sources: np.ndarray, index: np.ndarray
) -> np.ndarray:
    """Rows of all sources before each given row.

    Row i of source t comes first if (2i + 1) n_s < (2j + 1) n_t, or if they are equal
    and t < s. The quotient is estimated in floating point, off by at most one below
    2**40 rows, and corrected by its remainder. The remainder is small and thus exact in
    64-bit arithmetic, although both products may wrap.
    """
    source_counts = counts[sources]
    times = 2 * index + 1
    before = index.copy()
    for source, count in enumerate(counts.tolist()):
        numerator = times * count - source_counts
        divisor = 2 * source_counts
        guess = np.floor(
            (times.astype(np.float64) * count - source_counts) / divisor
        ).astype(np.int64)
        remainder = numerator - guess * divisor
        floor = guess + (remainder >= divisor) - (remainder < 0)
        remainder -= (floor - guess) * divisor
        tied_first = source < sources
        number = floor + np.where((remainder > 0) | tied_first, 1, 0)
        before += np.where(
            sources == source, 0, np.minimum(np.maximum(number, 0), count)
        )
    return before


def unrank(
    rows_per_source: Sequence[int] | np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Source and row at each place, the inverse of `rank`.

    Args:
        rows_per_source: rows of each source.
        places: int64 of shape (n,), in [0, R).

    Returns:
        sources and rows within them, both int64 of shape (n,).
    """
    counts = checked_counts(rows_per_source)
    places = np.asarray(places, dtype=np.int64)
    total = int(counts.sum())
    if places.size and (places.min() < 0 or places.max() >= total):
        raise ValueError(
            f"places are in [0, {total}), not {places.min()} to {places.max()}"
        )
    sources = np.full(len(places), -1, dtype=np.int64)
    index = np.zeros(len(places), dtype=np.int64)
    for source, count in enumerate(counts.tolist()):
        unresolved = np.flatnonzero(sources < 0)
        if not count or not len(unresolved):
            continue
        candidate_rows = _search(counts, source, count, total, places[unresolved])
        matches = rank(counts, np.array(source), candidate_rows) == places[unresolved]
        sources[unresolved[matches]] = source
        index[unresolved[matches]] = candidate_rows[matches]
    return sources, index


def _search(
    counts: np.ndarray, source: int, count: int, total: int, places: np.ndarray
) -> np.ndarray:
    """Last row of a source at or before each place (row 0 if there is none)."""
    # A place differs from R t by at most half a row per source, so the bisection has
    # few candidates.
    slack = len(counts) * count / (2 * total) + 2
    centre = places.astype(np.float64) * count / total
    low = np.clip(np.floor(centre - slack).astype(np.int64), 0, count - 1)
    high = np.clip(np.ceil(centre + slack).astype(np.int64), 0, count - 1)
    while (low < high).any():
        middle = (low + high + 1) // 2
        reached = rank(counts, np.array(source), middle) <= places
        low = np.where(reached, middle, low)
        high = np.where(reached, high, middle - 1)
    return low


def permute(index: np.ndarray, n: int, key: int, inverse: bool = False) -> np.ndarray:
    """Pseudo-random permutation of [0, n), computed without a table.

    A balanced Feistel network over the smallest even number of bits that holds n;
    results outside [0, n) are permuted again until they fall inside (cycle walking:
    Black & Rogaway 2002), fewer than four times on average for n > 16.

    Args:
        index: int64 in [0, n), any shape.
        n: size of the domain.
        key: 64 bits, see `order_key`.
        inverse: apply the inverse permutation.
    """
    half_bits = half_bits_of(n)
    values = np.asarray(index, dtype=np.int64).ravel().astype(np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        values[outside] = _feistel(values[outside], half_bits, key, inverse)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(np.shape(index))


def _feistel(values: np.ndarray, half_bits: int, key: int, inverse: bool) -> np.ndarray:
    bits = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left = values >> bits
    right = values & mask
    keys = round_keys(key)
    for round_key in reversed(keys) if inverse else keys:
        if inverse:
            left, right = right ^ (mix_bits(left, round_key) & mask), left
        else:
            left, right = right, left ^ (mix_bits(right, round_key) & mask)
    return (left << bits) | right
