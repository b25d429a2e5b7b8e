"""Rows copied out of shards into a batch, wherever they lie, each held against its checksum.

The checksum is XXH64 (Collet, "xxHash fast digest algorithm", specification 0.1.1), seed 0, of a row's bytes as they
lie on disk: 64 bits for some kilobytes, several gigabytes per second. So one row read out of a file is known to be
right.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numba import carray

from gristmill.dataprep.text.hashing import first_bytes, load64
from gristmill.dataprep.text.kernels import kernel, pointer

ALL_THERE, NO_SUCH_ROW, DAMAGED = -1, -2, -3
"""What `gather_mapped` returns instead of a shard's number."""


def by_shard(rows: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each shard that some rows lie in, ascending, with their numbers in it and their places among those asked for.

    Args:
        rows: int64 (k,), in [0, R).
        ends: int64 (shards,), ascending: the first row behind each shard.
    """
    numbers, places = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
    starts = np.zeros(len(ends) + 1, dtype=np.int64)
    sort_by_shard(rows, ends, numbers, places, starts)
    bounds = starts.tolist()
    for shard, (first, last) in enumerate(pairwise(bounds)):
        if first < last:
            yield shard, numbers[first:last], places[first:last]


@kernel
def sort_by_shard(rows, ends, numbers, places, starts):  # type: ignore[no-untyped-def]
    """Order rows by shard, those of a shard in the order asked for, by counting.

    Args:
        rows: int64 (k,).
        ends: int64 (shards,).
        numbers, places: int64 (k,), filled: the row within its shard, and its place in `rows`.
        starts: int64 (shards + 1,), zeros; filled with where each shard's begin.
    """
    shards = np.searchsorted(ends, rows, side="right")
    for shard in shards:
        starts[shard + 1] += 1
    for shard in range(len(ends)):
        starts[shard + 1] += starts[shard]
    filled = starts.copy()
    for place in range(len(rows)):
        shard = shards[place]
        at = filled[shard]
        filled[shard] += 1
        numbers[at] = rows[place] - (ends[shard - 1] if shard else 0)
        places[at] = place


@kernel
def gather_rows(shard, rows, places, out):  # type: ignore[no-untyped-def]
    """Copy rows of a shard (n, L) to places of a batch: out[places[k]] = shard[rows[k]], in one pass without the GIL.

    Args:
        shard: (n, L).
        rows: int64 (k,), in [0, n).
        places: int64 (k,).
        out: (m, L), filled at `places`.
    """
    for number in range(len(rows)):
        source, target = shard[rows[number]], out[places[number]]
        for token in range(len(source)):
            target[token] = source[token]


@kernel
def gather_mapped(addresses, sums, ends, rows, out):  # type: ignore[no-untyped-def]
    """Copy rows out of any of some shards, in one pass without the GIL: out[k] is row rows[k] of all shards together.

    Args:
        addresses: uint64 (shards,), where each shard's first row lies in memory, 0 where it is not open; who calls
            keeps them there.
        sums: uint64 (shards,), where its rows' checksums lie; 0 where it has none.
        ends: int64 (shards,), ascending: the first row behind each shard.
        rows: int64 (k,).
        out: (k, bytes of a row) uint8, filled.

    Returns:
        ALL_THERE; or NO_SUCH_ROW; or the number of a shard that must be opened first; or DAMAGED - k for the first
        place k whose row has another checksum.
    """
    size = out.shape[1]
    for place in range(len(rows)):
        shard = np.searchsorted(ends, rows[place], side="right")
        if rows[place] < 0 or shard == len(ends):
            return NO_SUCH_ROW
        if not addresses[shard]:
            return shard
        number = rows[place] - (ends[shard - 1] if shard else 0)
        source = carray(pointer(addresses[shard] + np.uint64(number * size)), (size,), np.uint8)
        target = out[place]
        for byte in range(size):
            target[byte] = source[byte]
        if sums[shard] and hash_row(target) != carray(pointer(sums[shard] + np.uint64(number * 8)), (1,), np.uint64)[0]:
            return DAMAGED - place
    return ALL_THERE


PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
"""The specification's five."""
P1, P2, P3, P4, P5 = (np.uint64(prime) for prime in PRIMES)
STRIPE_BYTES = 32


def row_checksums(rows: np.ndarray) -> np.ndarray:
    """XXH64 of each row's bytes.

    Args:
        rows: (n, L) of any little-endian dtype.

    Returns:
        uint64 of shape (n,).
    """
    content = np.ascontiguousarray(rows)
    found = np.empty(len(content), dtype="<u8")
    if len(content):
        hash_rows(content.view(np.uint8).reshape(len(content), -1), found)
    return found


@kernel
def _rotate(value, bits):  # type: ignore[no-untyped-def]
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@kernel
def _round(lane, word):  # type: ignore[no-untyped-def]
    return _rotate(lane + word * P2, 31) * P1


@kernel
def hash_row(row):  # type: ignore[no-untyped-def]
    """The checksum of a row (uint8, (bytes,))."""
    size, at = len(row), 0
    if size >= STRIPE_BYTES:
        a, b, c, d = P1 + P2, P2, np.uint64(0), np.uint64(0) - P1
        while at + STRIPE_BYTES <= size:
            a = _round(a, load64(row, at))
            b = _round(b, load64(row, at + 8))
            c = _round(c, load64(row, at + 16))
            d = _round(d, load64(row, at + 24))
            at += STRIPE_BYTES
        value = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        for lane in (a, b, c, d):
            value = (value ^ _round(np.uint64(0), lane)) * P1 + P4
    else:
        value = P5
    value += np.uint64(size)
    while at + 8 <= size:
        value = _rotate(value ^ _round(np.uint64(0), load64(row, at)), 27) * P1 + P4
        at += 8
    if at + 4 <= size:
        value = _rotate(value ^ (first_bytes(row, at, 4) * P1), 23) * P2 + P3
        at += 4
    while at < size:
        value = _rotate(value ^ (np.uint64(row[np.uint64(at)]) * P5), 11) * P1
        at += 1
    value = (value ^ (value >> np.uint64(33))) * P2
    value = (value ^ (value >> np.uint64(29))) * P3
    return value ^ (value >> np.uint64(32))


@kernel
def hash_rows(rows, found):  # type: ignore[no-untyped-def]
    """Fill `found` (uint64, (n,)) with the checksums of `rows` (uint8, (n, bytes))."""
    for number in range(len(rows)):
        found[number] = hash_row(rows[number])
