"""Byte-pair encoding of one piece of text: the table of merges, and the kernels that apply it.

The adjacent pair of the lowest rank is merged, the leftmost first, until none is left. The ids are the same as the
`tokenizers` library's, which tests and a check at the start of every use hold against each other. Short pieces are
searched from end to end after every merge; long ones have a heap of their pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gristmill.dataprep.text.hashing import fmix64
from gristmill.dataprep.text.kernels import kernel
from gristmill.tokenize.encoding.pretokens import NotKnownError

NO_MERGE = np.uint64(2**64 - 1)
_FREE = np.uint64(2**64 - 1)
CELLS_PER_MERGE = 3
"""At least so many, up to the next power of two: most pairs that text has are no merge, and a search for them should
end at once."""


class Merges(NamedTuple):
    """The merges of a byte-level BPE.

    Attributes:
        byte_ids: uint32 of shape (256,), the id of every byte.
        pairs: uint64 of shape (2 * cells,), open addressing: left id << 32 | right id, or all ones; and behind it
            rank << 32 | id of the two together, so that the lower value is the earlier merge.
    """

    byte_ids: np.ndarray
    pairs: np.ndarray


def read_merges(model: Mapping[str, Any]) -> Merges:
    """The merges of a tokenizer.json's `model`.

    Raises:
        NotKnownError: a byte has no id, or a merge is not made of known tokens.
    """
    vocabulary: dict[str, int] = model["vocab"]
    characters = byte_characters()
    if missing := [byte for byte, character in enumerate(characters) if character not in vocabulary]:
        raise NotKnownError(f"its vocabulary lacks {len(missing)} of the 256 bytes")
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if any(left not in vocabulary or right not in vocabulary or left + right not in vocabulary
           for left, right in pairs):
        raise NotKnownError("its merges are made of tokens that its vocabulary lacks")
    left = np.array([vocabulary[pair[0]] for pair in pairs], np.uint64)
    right = np.array([vocabulary[pair[1]] for pair in pairs], np.uint64)
    together = np.array([vocabulary["".join(pair)] for pair in pairs], np.uint64)
    cells = 4
    while cells < CELLS_PER_MERGE * len(pairs):
        cells *= 2
    table = Merges(np.array([vocabulary[character] for character in characters], np.uint32),
                   np.full(2 * cells, _FREE))
    _fill(left << np.uint64(32) | right, together, table.pairs)
    return table


def byte_characters() -> list[str]:
    """The character that GPT-2 spells each byte with: printable ones stand for themselves, others follow U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(0x100)]


@kernel
def _fill(keys: np.ndarray, together: np.ndarray, pairs: np.ndarray) -> None:
    mask = np.uint64(len(pairs) // 2 - 1)
    for rank in range(len(keys)):
        cell = fmix64(keys[rank]) & mask
        while pairs[cell << np.uint64(1)] != _FREE and pairs[cell << np.uint64(1)] != keys[rank]:
            cell = (cell + np.uint64(1)) & mask
        # A merge that is listed twice has the later rank, as in the library's own table.
        pairs[cell << np.uint64(1)] = keys[rank]
        pairs[(cell << np.uint64(1)) + np.uint64(1)] = np.uint64(rank) << np.uint64(32) | together[rank]


@kernel
def find_merge(left: np.uint64, right: np.uint64, pairs: np.ndarray) -> np.uint64:
    """Rank << 32 | id of a pair of ids, or NO_MERGE."""
    mask = np.uint64(len(pairs) // 2 - 1)
    key = left << np.uint64(32) | right
    cell = fmix64(key) & mask
    while True:
        found = pairs[cell << np.uint64(1)]
        if found == key:
            return pairs[(cell << np.uint64(1)) + np.uint64(1)]
        if found == _FREE:
            return NO_MERGE
        cell = (cell + np.uint64(1)) & mask


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
