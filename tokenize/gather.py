"""Rows copied out of shards into a batch, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from gristmill.dataprep.kernels import kernel
from gristmill.tokenize.streaming.checksums import hash_row

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


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer that `carray` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


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
        if sums[shard] and hash_row(target) != carray(
                pointer(sums[shard] + np.uint64(number * 8)), (1,), np.uint64)[0]:
            return DAMAGED - place
    return ALL_THERE
