"""The memory of a byte-level tokenizer: which ids a piece of text has, found again by its bytes.

An open-addressing table of entry numbers; an entry is the bytes of a piece, compared whenever its hash is equal, and
its ids. The memory is bounded: when a batch might not fit any more, everything is forgotten.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.hashing import hash_bytes
from gristmill.dataprep.kernels import kernel
from gristmill.tokenize.encoding.pretokens import next_piece

ARENA_BYTES = 48 << 20
"""Bytes of remembered pieces, and no fewer than a batch may bring."""
MOST_ENTRIES = 1 << 21
SLOTS_PER_ENTRY = 2


class PieceCache:
    """Pieces and their ids.

    Attributes:
        slots: int32, entry numbers or -1.
        hashes: uint64 per entry.
        starts: int64 of shape (entries + 1,): the bytes of entry i are arena[starts[i]:starts[i + 1]].
        arena: uint8.
        id_starts: int64 of shape (entries + 1,): its ids are ids[id_starts[i]:id_starts[i + 1]].
        ids: uint32.
        entries: how many there are.
    """

    def __init__(self, arena_bytes: int = ARENA_BYTES, most_entries: int = MOST_ENTRIES) -> None:
        self._arena_bytes, self._most_entries = arena_bytes, most_entries
        self._allocate(arena_bytes, most_entries)

    def _allocate(self, arena_bytes: int, most_entries: int) -> None:
        size = 1
        while size < SLOTS_PER_ENTRY * most_entries:
            size *= 2
        self.slots = np.full(size, -1, np.int32)
        self.hashes = np.empty(most_entries, np.uint64)
        self.starts = np.zeros(most_entries + 1, np.int64)
        self.id_starts = np.zeros(most_entries + 1, np.int64)
        self.arena = np.empty(arena_bytes, np.uint8)
        self.ids = np.empty(arena_bytes, np.uint32)
        self.entries = 0

    def make_room(self, batch_bytes: int) -> None:
        """Make sure that a batch of so many bytes fits, however many of its pieces are new."""
        used = self.starts[self.entries]
        if used + batch_bytes <= len(self.arena) and self.entries + batch_bytes <= len(self.hashes):
            return
        if batch_bytes > len(self.arena) or batch_bytes > len(self.hashes):
            self._allocate(max(self._arena_bytes, batch_bytes), max(self._most_entries, batch_bytes))
            return
        self.forget()

    def forget(self) -> None:
        """Forget all pieces."""
        self.slots.fill(-1)
        self.entries = 0

    def add_ids(self, entry: int, ids: list[int]) -> None:
        """Give an entry its ids; those before it have theirs."""
        begin = self.id_starts[entry]
        self.id_starts[entry + 1] = begin + len(ids)
        self.ids[begin : begin + len(ids)] = ids

    def piece(self, entry: int) -> str:
        """The text of an entry."""
        return self.arena[self.starts[entry] : self.starts[entry + 1]].tobytes().decode()


@kernel
def find_entries(
    data: np.ndarray, begin: int, end: int, classes: np.ndarray, slots: np.ndarray, hashes: np.ndarray,
    starts: np.ndarray, arena: np.ndarray, entries: int, found: np.ndarray,
) -> tuple[int, int, int]:  # fmt: skip
    """Split a text and look its pieces up; those that are new become entries, still without ids.

    Args:
        data: UTF-8; the text is data[begin:end].
        found: int32, receives the entry of each piece; as long as the text at least.

    Returns:
        number of pieces; number of entries now; and 0, or -1 - code point whose class is not known (then the text is
        to be looked up again).
    """
    mask = np.uint64(len(slots) - 1)
    count, at = 0, begin
    while at < end:
        stop = next_piece(data, at, end, classes)
        if stop < 0:
            return count, entries, stop
        value = hash_bytes(data, at, stop)
        length = stop - at
        slot = value & mask
        while True:
            entry = slots[slot]
            if entry < 0:
                slots[slot] = entry = entries
                hashes[entry] = value
                start = starts[entry]
                for offset in range(length):
                    arena[start + offset] = data[at + offset]
                starts[entry + 1] = start + length
                entries += 1
                break
            if hashes[entry] == value and starts[entry + 1] - starts[entry] == length and _same(
                arena, starts[entry], data, at, length
            ):
                break
            slot = (slot + np.uint64(1)) & mask
        found[count] = entry
        count += 1
        at = stop
    return count, entries, 0


@kernel
def _same(arena: np.ndarray, first: int, data: np.ndarray, second: int, length: int) -> bool:
    equal = 0
    for offset in range(length):
        equal += arena[first + offset] == data[second + offset]
    return equal == length


@kernel
def count_ids(found: np.ndarray, id_starts: np.ndarray) -> int:
    """How many ids the pieces of a text have."""
    total = 0
    for entry in found:
        total += id_starts[entry + 1] - id_starts[entry]
    return total


@kernel
def copy_ids(found: np.ndarray, id_starts: np.ndarray, ids: np.ndarray, out: np.ndarray) -> None:
    """Write the ids of the pieces one after the other."""
    to = 0
    for entry in found:
        for at in range(id_starts[entry], id_starts[entry + 1]):
            out[to] = ids[at]
            to += 1
