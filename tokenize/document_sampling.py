"""Random selection and order of documents: a draw is a hash of a key and the document's
id alone.

Draws are uniform, so they are sorted by their leading bits and then by insertion. A
bucket holds two keys on average, so the time is linear in the number of keys (Knuth,
The Art of Computer Programming, volume 3, section 5.2.1, "multiple list insertion";
Cormen et al., section 8.4, bucket sort). A comparison sort takes three times as long
for several hundred thousand keys.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import Column, binary_numbers, binary_rows
from gristmill.dataprep.text.hashing import splitmix64
from gristmill.dataprep.text.kernels import kernel


def id_words(ids: Column) -> np.ndarray:
    """Document ids as numbers: uint64 of shape (n, 2), in the same order as the
    bytes.
    """
    return binary_numbers(ids, ">u8").astype(np.uint64)


def words_of(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Ids as `id_words` from the columns `high` and `low`."""
    return np.stack([columns["high"], columns["low"]], axis=1)


def word_ids(words: np.ndarray) -> pa.Array:
    """Document ids from `id_words`."""
    return binary_rows(words.astype(">u8"))


def leading(values: np.ndarray, bits: int) -> np.ndarray:
    """Leading bits of uint64 numbers, as int64; 0 for no bits."""
    if not bits:
        return np.zeros(len(values), np.int64)
    return (values >> np.uint64(64 - bits)).astype(np.int64)


def draw(words: np.ndarray, key: int) -> np.ndarray:
    """One uniform uint64 per document.

    Args:
        words: (n, 2) from `id_words`.
        key: 64 bits from `shuffle.order_key`; another key gives an independent draw.
    """
    drawn = np.empty(len(words), np.uint64)
    draw_each(words, np.uint64(key), drawn)
    return drawn


@kernel
def draw_each(words: np.ndarray, key: np.uint64, drawn: np.ndarray) -> None:
    """See `draw`: `shuffle.mix_bits` of the second word and that of the first one."""
    for number in range(len(words)):
        drawn[number] = splitmix64(
            splitmix64(words[number, 0] ^ key) ^ words[number, 1] ^ key
        )


def drawn_order(words: np.ndarray, key: int) -> np.ndarray:
    """Document numbers (int64) in the order of their draws; ids break ties."""
    return ordered_by(draw(words, key), words[:, 0], words[:, 1])


def ordered_by(
    first: np.ndarray, *others: np.ndarray, rows: np.ndarray | None = None
) -> np.ndarray:
    """Stable lexicographic order (int64) by columns of equal length.

    The first column is a hash and nearly always decides: the other columns are compared
    only for its ties.

    Args:
        rows: int64, rows of `others` to compare; None for all.
    """
    order, ordered = order_of_spread(first)
    equal = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(equal) and others:
        touched = np.union1d(equal, equal + 1)
        tied = order[touched]
        looked_at = tied if rows is None else rows[tied]
        order[touched] = tied[
            np.lexsort(
                (*(column[looked_at] for column in reversed(others)), ordered[touched])
            )
        ]
    return order


def drawn_below(words: np.ndarray, key: int, share: float) -> np.ndarray:
    """Mask (bool) of the documents whose draw is below a share of the range; `share` in
    [0, 1).
    """
    return draw(words, key) < np.uint64(int(share * 2**64))


LARGEST_BUCKET = 64
"""Insertion sort is quadratic: numpy sorts keys with larger buckets."""
MOST_BITS = 22
"""32 MB of counters; buckets grow beyond some ten million keys."""


def order_of_spread(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stable order of keys.

    Args:
        keys: uint64 of shape (n,); any are sorted correctly, those spread over 64 bits
            fast.

    Returns:
        the order (int64, shape (n,)) and the sorted keys.
    """
    bits = min(max(1, len(keys).bit_length() - 2), MOST_BITS)
    order = np.empty(len(keys), np.int64)
    ordered = np.empty(len(keys), np.uint64)
    if not sort_buckets(keys, bits, LARGEST_BUCKET, order, ordered):
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
    return order, ordered


def order_below(numbers: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """`order_of_spread` for int64 numbers that are spread over [0, end)."""
    unused = np.uint64(64 - max(1, end.bit_length()))
    order, ordered = order_of_spread(numbers.astype(np.uint64) << unused)
    return order, (ordered >> unused).astype(np.int64)


@kernel
def sort_buckets(
    keys: np.ndarray, bits: int, largest: int, order: np.ndarray, ordered: np.ndarray
) -> bool:
    """Sort keys by their leading bits, then by insertion, unless a bucket is too large.

    Args:
        keys: uint64 of shape (n,).
        bits: 1 to 63.
        largest: of any bucket.
        order: int64 of shape (n,), filled.
        ordered: uint64 of shape (n,), filled.

    Returns:
        whether the keys were sorted.
    """
    shift = np.uint64(64 - bits)
    places = np.zeros((1 << bits) + 1, np.int64)
    for key in keys:
        places[(key >> shift) + np.uint64(1)] += 1
    for bucket in range(len(places) - 1):
        if places[bucket + 1] > largest:
            return False
        places[bucket + 1] += places[bucket]
    for number in range(len(keys)):
        key = keys[number]
        place = places[key >> shift]
        places[key >> shift] += 1
        order[place], ordered[place] = number, key
    for at in range(1, len(keys)):
        key, number, place = ordered[at], order[at], at
        while place > 0 and ordered[place - 1] > key:
            ordered[place], order[place] = ordered[place - 1], order[place - 1]
            place -= 1
        ordered[place], order[place] = key, number
    return True
