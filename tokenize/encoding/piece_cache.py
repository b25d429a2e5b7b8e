"""The memory of a byte-level tokenizer: which ids a piece of text has, found again by its bytes.

One table of open addressing. A piece of up to 15 bytes stands in its cell as it is, together with up to three ids, so
that looking it up reads half a line of the processor's cache; a longer one is compared with its bytes elsewhere. The
memory is bounded: when a part is full, everything is forgotten and learnt again, which costs a fraction of a second
per hundred megabytes of text.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.dataprep.text.hashing import equal_bytes, fold_words, hash_bytes, load64
from gristmill.dataprep.text.kernels import kernel

MEMORY_BYTES = 32 << 20
"""Half of it for the table (half a million cells), a quarter for long pieces, a quarter for their ids."""
LARGEST_LOAD = 0.6
"""Share of the cells in use; searches of a table that is fuller take many steps (Knuth, volume 3, section 6.4)."""
LONGEST_INSIDE = 15
LONGEST_PIECE = 4096
"""Bytes; a longer one will hardly be seen again, and is not remembered."""
IDS_INSIDE = 3
WORDS_PER_CELL = 4
CELLS, ARENA, IDS = 0, 1, 2
_OUTSIDE = np.uint64(0xFF)
LENGTH_MASK = 0xFFFF
_LOW_40 = np.uint64(2**40 - 1)


class PieceCache(NamedTuple):
    """Pieces and their ids.

    Attributes:
        cells: uint64 of shape (4 * cells,). Two words of key: the piece's bytes and, in the highest byte, its length;
            or its hash, and 255, its length (16 bits) and where it lies in `arena` (40 bits). All zeros in a free
            cell. Two words of value: three ids and their number, 32 bits each; or where they lie in `ids`.
        arena: uint8, the bytes of long pieces.
        ids: uint32, ids of pieces that have more than three.
        used: int64 of shape (3,): cells, bytes of `arena` and ids of `ids` that are in use.
    """

    cells: np.ndarray
    arena: np.ndarray
    ids: np.ndarray
    used: np.ndarray


def empty_cache(memory_bytes: int = MEMORY_BYTES) -> PieceCache:
    """A cache that takes so many bytes at most (and a few kilobytes at least)."""
    cells = 2
    while 2 * cells * WORDS_PER_CELL * 8 <= memory_bytes // 2:
        cells *= 2
    used = np.zeros(3, np.int64)
    used[ARENA] = 1
    return PieceCache(np.zeros(cells * WORDS_PER_CELL, np.uint64), np.empty(max(memory_bytes // 4, 8), np.uint8),
                      np.empty(max(memory_bytes // 16, 1), np.uint32), used)


@kernel
def piece_key(data: np.ndarray, at: int, stop: int) -> tuple[np.uint64, np.uint64]:
    """The two words that a piece is looked up by; those of a long one lack its place in the arena."""
    length = stop - at
    if length > LONGEST_INSIDE:
        shown = np.uint64(min(length, LENGTH_MASK))
        return hash_bytes(data, at, stop), _OUTSIDE << np.uint64(56) | shown << np.uint64(40)
    size = np.uint64(length) << np.uint64(56)
    if at + 16 <= len(data):
        low = load64(data, at)
        if length <= 8:
            return low & (~np.uint64(0) >> np.uint64(64 - 8 * length)), size
        return low, load64(data, at + 8) & ((np.uint64(1) << np.uint64(8 * length - 64)) - np.uint64(1)) | size
    low = high = np.uint64(0)
    for step in range(min(length, 8)):
        low |= np.uint64(data[at + step]) << np.uint64(8 * step)
    for step in range(8, length):
        high |= np.uint64(data[at + step]) << np.uint64(8 * step - 64)
    return low, high | size


@kernel
def first_cell(low: np.uint64, high: np.uint64, words: int) -> np.uint64:
    """Where the first cell that a key may have begins, in a table of so many words."""
    return (fold_words(low, high) << np.uint64(2)) & np.uint64(words - 1)


@kernel
def find_cell(
    data: np.ndarray, at: int, place: np.uint64, low: np.uint64, high: np.uint64, cells: np.ndarray, arena: np.ndarray
) -> np.uint64:
    """Where the cell of the piece that begins at byte `at` begins, or the free cell that it would take.

    Args:
        place: `first_cell` of the key.
    """
    outside = high >> np.uint64(56) == _OUTSIDE
    # No cell of a long piece equals its key, because nothing lies at the arena's first byte.
    while True:
        here = cells[place + np.uint64(1)]
        if here == 0:
            return place
        if cells[place] == low:
            if here == high:
                return place
            if outside and here & ~_LOW_40 == high and equal_bytes(
                arena, np.int64(here & _LOW_40), data, at, np.int64(high >> np.uint64(40)) & LENGTH_MASK
            ):
                return place
        place = (place + np.uint64(WORDS_PER_CELL)) & np.uint64(len(cells) - 1)


@kernel
def forget(cells: np.ndarray, used: np.ndarray) -> None:
    """Forget all pieces."""
    cells[:] = 0
    used[:] = 0
    used[ARENA] = 1


@kernel
def remember(
    data: np.ndarray, at: int, place: np.uint64, low: np.uint64, high: np.uint64, found: np.ndarray, count: int,
    cache: PieceCache,
) -> None:  # fmt: skip
    """Keep a new piece in the free cell that `find_cell` gave; one that never fits is left out.

    Args:
        found: uint32, its ids; as many as `count`.
    """
    used, cells = cache.used, cache.cells
    outside = high >> np.uint64(56) == _OUTSIDE
    length = np.int64(high >> np.uint64(40)) & LENGTH_MASK if outside else 0
    many = count if count > IDS_INSIDE else 0
    if length >= len(cache.arena) or many > len(cache.ids):
        return
    if (used[CELLS] + 1 > LARGEST_LOAD * (len(cells) // WORDS_PER_CELL) or used[ARENA] + length > len(cache.arena)
            or used[IDS] + many > len(cache.ids)):
        forget(cells, used)
        place = first_cell(low, high, len(cells))
    for step in range(length):
        cache.arena[used[ARENA] + step] = data[at + step]
    for step in range(many):
        cache.ids[used[IDS] + step] = found[step]
    cells[place] = low
    cells[place + np.uint64(1)] = high | (np.uint64(used[ARENA]) if outside else np.uint64(0))
    first, second, third = np.uint64(0), np.uint64(0), np.uint64(0)
    if many:
        first = np.uint64(used[IDS])
    else:
        first = np.uint64(found[0])
        second = np.uint64(found[1]) if count > 1 else second
        third = np.uint64(found[2]) if count > 2 else third
    cells[place + np.uint64(2)] = first | second << np.uint64(32)
    cells[place + np.uint64(3)] = third | np.uint64(count) << np.uint64(32)
    used[CELLS] += 1
    used[ARENA] += length
    used[IDS] += many
