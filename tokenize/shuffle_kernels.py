"""The order of a training set, position by position: rows merged by virtual time, each
source's permuted by a key, in compiled passes.

`order` has the derivation; the tests compare these kernels with a definition in NumPy.
All arithmetic is 64-bit: products wrap, quotients are estimated in floating point and
corrected by their remainders.
"""

from __future__ import annotations

import math

import numpy as np

from gristmill.dataprep.text.hashing import splitmix64
from gristmill.dataprep.text.kernels import kernel


@kernel
def rank_row(counts, source, index):  # type: ignore[no-untyped-def]
    """The place of a source's row in the merged order (`shuffle.rank`)."""
    source_rows = counts[source]
    time = 2 * index + 1
    divisor = 2 * source_rows
    place = index
    for other_source in range(len(counts)):
        count = counts[other_source]
        if other_source == source or count == 0:
            continue
        guess = np.int64(math.floor((float(time) * count - source_rows) / divisor))
        remainder = time * count - source_rows - guess * divisor
        if remainder >= divisor:
            guess += 1
            remainder -= divisor
        elif remainder < 0:
            guess -= 1
            remainder += divisor
        number = guess + 1 if remainder > 0 or other_source < source else guess
        place += min(max(number, 0), count)
    return place


@kernel
def unrank_place(counts, total, place):  # type: ignore[no-untyped-def]
    """Source and row at a place of the merged order; (-1, -1) outside [0, total)."""
    for source in range(len(counts)):
        count = counts[source]
        if count == 0:
            continue
        # Rows of a source lie evenly, so the guess is off by few rows at the most; the
        # places ascend with the rows.
        index = min(
            max(np.int64(math.floor((float(place) + 0.5) * count / total)), 0),
            count - 1,
        )
        rank = rank_row(counts, source, index)
        while rank < place and index + 1 < count:
            index += 1
            rank = rank_row(counts, source, index)
        while rank > place and index > 0:
            index -= 1
            rank = rank_row(counts, source, index)
        if rank == place:
            return source, index
    return -1, -1


@kernel
def unrank_all(counts, places, sources, index):  # type: ignore[no-untyped-def]
    """`unrank_place` of many places: fills `sources` and `index` (int64 (n,) each)."""
    total = counts.sum()
    for number in range(len(places)):
        sources[number], index[number] = unrank_place(counts, total, places[number])


@kernel
def reorder(counts, half_bits, round_keys, places, inverse, shuffled):  # type: ignore[no-untyped-def]
    """Rows at places of one epoch of one stage; or, with `inverse`, the places of rows.

    Args:
        counts: int64 (S,), rows per source.
        half_bits: int64 (S,), see `shuffle.half_bits_of`.
        round_keys: uint64 (S, rounds), of this epoch, in the order of their use.
        places: int64 (n,), in [0, R).
        inverse: apply the inverse.
        shuffled: int64 (n,), filled.
    """
    sources, index = (
        np.empty(len(places), np.int64),
        np.empty(len(places), np.int64),
    )
    unrank_all(counts, places, sources, index)
    values, slots = (
        np.empty(len(places), np.uint64),
        np.empty(len(places), np.int64),
    )
    for source in range(len(counts)):
        chosen = np.flatnonzero(sources == source)
        if not len(chosen):
            continue
        rows = index[chosen]
        permute_source(
            rows,
            counts[source],
            half_bits[source],
            round_keys[source],
            inverse,
            values,
            slots,
        )
        rank_source(counts, source, rows, slots)
        shuffled[chosen] = slots[: len(rows)]


@kernel
def rows_of_span(counts, half_bits, round_keys, place, shuffled):  # type: ignore[no-untyped-def]
    """`reorder` of consecutive places, several times as fast: source by source, in loops
    over independent numbers, which the compiler vectorises.

    The rows of a source ascend with their places, so those of a span are
    consecutive too.

    Args:
        counts, half_bits, round_keys: see `reorder`.
        place: the first one; all lie in [0, R).
        shuffled: int64 (n,), filled.
    """
    total = counts.sum()
    within, index = (
        np.empty(len(shuffled), np.int64),
        np.empty(len(shuffled), np.int64),
    )
    values, slots = (
        np.empty(len(shuffled), np.uint64),
        np.empty(len(shuffled), np.int64),
    )
    for source in range(len(counts)):
        count = counts[source]
        if count == 0:
            continue
        first = first_row_from(counts, source, total, place)
        filled = first_row_from(counts, source, total, place + len(shuffled)) - first
        for number in range(filled):
            index[number] = first + number
        rank_source(counts, source, index[:filled], within)
        permute_source(
            index[:filled],
            count,
            half_bits[source],
            round_keys[source],
            False,
            values,
            slots,
        )
        rank_source(counts, source, index[:filled], slots)
        for number in range(filled):
            shuffled[within[number] - place] = slots[number]


@kernel
def first_row_from(counts, source, total, place):  # type: ignore[no-untyped-def]
    """First row of a source at or after a place of the merged order; its number of rows
    if none follows.
    """
    count = counts[source]
    row = min(
        max(np.int64(math.floor((float(place) + 0.5) * count / total)), 0), count - 1
    )
    while row > 0 and rank_row(counts, source, row - 1) >= place:
        row -= 1
    while row < count and rank_row(counts, source, row) < place:
        row += 1
    return row


@kernel
def permute_source(index, count, half_bits, round_keys, inverse, values, slots):  # type: ignore[no-untyped-def]
    """Numbers of one source through its keyed permutation of [0, count), in place
    (`shuffle.permute`).

    Args:
        index: int64 (k,), in [0, count).
        count: rows of the source.
        half_bits: see `shuffle.half_bits_of`.
        round_keys: uint64 (rounds,), in the order of their use.
        inverse: apply the inverse: the same rounds between two swaps of the halves.
        values, slots: uint64 and int64, of at least k numbers, scratch.
    """
    bits, limit = np.uint64(half_bits), np.uint64(count)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    outside = len(index)
    for number in range(outside):
        values[number], slots[number] = np.uint64(index[number]), number
    while outside:
        if inverse:
            swap_halves(values[:outside], bits, mask)
        for key in round_keys:
            for number in range(outside):
                high_half, low_half = values[number] >> bits, values[number] & mask
                values[number] = (
                    low_half << bits | high_half ^ splitmix64(low_half ^ key) & mask
                )
        if inverse:
            swap_halves(values[:outside], bits, mask)
        still = 0
        for number in range(outside):
            value, slot = values[number], slots[number]
            index[slot] = np.int64(value)
            values[still], slots[still] = value, slot
            still += value >= limit
        outside = still


@kernel
def swap_halves(values, bits, mask):  # type: ignore[no-untyped-def]
    """Exchange the halves of numbers of 2 `bits` bits, in place."""
    for number in range(len(values)):
        values[number] = (values[number] & mask) << bits | values[number] >> bits


@kernel
def rank_source(counts, source, index, places):  # type: ignore[no-untyped-def]
    """`rank_row` of many rows of one source.

    Args:
        counts: int64 (S,).
        source: its number.
        index: int64 (k,), its rows.
        places: int64, of k numbers at least, filled.
    """
    source_rows = counts[source]
    divisor = 2 * source_rows
    # A product with it is off by less than 2**-9 below 2**41, so the guess is off by
    # one at the most, as a quotient is.
    inverse = 1.0 / float(divisor)
    for number in range(len(index)):
        places[number] = index[number]
    for other_source in range(len(counts)):
        count = counts[other_source]
        if other_source == source or count == 0:
            continue
        tie = np.int64(other_source < source)
        for number in range(len(index)):
            time = 2 * index[number] + 1
            guess = np.int64(math.floor((float(time) * count - source_rows) * inverse))
            remainder = time * count - source_rows - guess * divisor
            correction = np.int64(remainder >= divisor) - np.int64(remainder < 0)
            before = (
                guess
                + correction
                + max(tie, np.int64(remainder - correction * divisor > 0))
            )
            places[number] += min(max(before, 0), count)
