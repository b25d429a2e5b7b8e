"""Byte-pair encoding of one piece: merge the adjacent pair of the lowest rank, the leftmost first, until none is left.

The ids are the same as the `tokenizers` library's, which tests and a check at the start of every use hold against each
other. Short pieces are searched from end to end after every merge; long ones have a heap of their pairs.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.kernels import kernel
from gristmill.tokenize.encoding.merges import NO_MERGE, Merges, find_merge

SHORT_PIECE = 40
"""Bytes; measured: up to there a search of all pairs costs less than the heap."""
_HIGH_HALF = np.uint64(32)
_LOW_HALF = np.uint64(2**32 - 1)


@kernel
def merge_piece(data: np.ndarray, at: int, stop: int, merges: Merges, ids: np.ndarray) -> int:
    """Encode the piece data[at:stop].

    Args:
        ids: uint32, receives the ids; as long as the piece at least.

    Returns:
        the number of ids.
    """
    length = stop - at
    for step in range(length):
        ids[step] = merges.byte_ids[data[at + step]]
    if length == 1:
        return 1
    if length > SHORT_PIECE:
        return _merge_by_heap(length, merges.pairs, ids)
    return _merge_by_search(length, merges.pairs, ids)


@kernel
def _merge_by_search(length: int, pairs: np.ndarray, ids: np.ndarray) -> int:
    values = np.empty(SHORT_PIECE, np.uint64)  # of the pair that begins at each id
    for at in range(length - 1):
        values[at] = find_merge(np.uint64(ids[at]), np.uint64(ids[at + 1]), pairs)
    while length > 1:
        best, place = NO_MERGE, 0
        for at in range(length - 1):
            if values[at] < best:
                best, place = values[at], at
        if best == NO_MERGE:
            break
        ids[place] = np.uint32(best & _LOW_HALF)
        length -= 1
        for at in range(place + 1, length):
            ids[at] = ids[at + 1]
            values[at - 1] = values[at]
        if place > 0:
            values[place - 1] = find_merge(np.uint64(ids[place - 1]), np.uint64(ids[place]), pairs)
        if place < length - 1:
            values[place] = find_merge(np.uint64(ids[place]), np.uint64(ids[place + 1]), pairs)
    return length


@kernel
def _merge_by_heap(length: int, pairs: np.ndarray, ids: np.ndarray) -> int:
    """The same with a linked list of ids and a heap of rank << 32 | place, in n log n."""
    values = np.full(length, NO_MERGE)
    following, before = np.arange(1, length + 1), np.arange(-1, length - 1)
    heap = np.empty(3 * length, np.uint64)
    size = 0
    for at in range(length - 1):
        values[at] = find_merge(np.uint64(ids[at]), np.uint64(ids[at + 1]), pairs)
        if values[at] != NO_MERGE:
            size = _push(heap, size, values[at] & ~_LOW_HALF | np.uint64(at))
    while size:
        lowest, size = _pop(heap, size)
        place = np.int64(lowest & _LOW_HALF)
        # A pair that is not there any more: one of its sides was merged into something else.
        if values[place] == NO_MERGE or values[place] >> _HIGH_HALF != lowest >> _HIGH_HALF:
            continue
        ids[place] = np.uint32(values[place] & _LOW_HALF)
        gone = following[place]
        values[gone] = NO_MERGE
        following[place] = following[gone]
        if following[place] < length:
            before[following[place]] = place
        for left in (before[place], place):
            if left < 0:
                continue
            right = following[left]
            values[left] = NO_MERGE
            if right < length:
                values[left] = find_merge(np.uint64(ids[left]), np.uint64(ids[right]), pairs)
            if values[left] != NO_MERGE:
                size = _push(heap, size, values[left] & ~_LOW_HALF | np.uint64(left))
    count, at = 0, 0
    while at < length:
        ids[count] = ids[at]
        count += 1
        at = following[at]
    return count


@kernel
def _push(heap: np.ndarray, size: int, value: np.uint64) -> int:
    at = size
    while at > 0 and heap[(at - 1) // 2] > value:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = value
    return size + 1


@kernel
def _pop(heap: np.ndarray, size: int) -> tuple[np.uint64, int]:
    lowest, last = heap[0], heap[size - 1]
    size -= 1
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= last:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = last
    return lowest, size
