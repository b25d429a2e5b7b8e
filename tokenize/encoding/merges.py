"""Byte-pair encoding of one piece: merge the adjacent pair of the lowest rank, the leftmost first, until none is left.

Sennrich et al. 2016, on bytes as GPT-2 has it. The merges are those of the tokenizer.json; the ids are the same as
the `tokenizers` library's, which tests and a check at the start of every use hold against each other.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gristmill.dataprep.hashing import fmix64
from gristmill.dataprep.kernels import kernel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_PIECE = 1024
"""Bytes. Merging takes up to the square of a piece's length here; the library, which takes longer ones, has a heap."""
NO_RANK = np.int32(2**31 - 1)
_FREE = np.uint64(2**64 - 1)


class Merges(NamedTuple):
    """The merges of a byte-level BPE.

    Attributes:
        byte_ids: int32 of shape (256,), the id of every byte.
        pairs: uint64, open addressing: left id << 32 | right id, or all ones.
        ranks: int32 beside it: lower merges first.
        merged: int32 beside it: the id of the two together.
    """

    byte_ids: np.ndarray
    pairs: np.ndarray
    ranks: np.ndarray
    merged: np.ndarray


def read_merges(tokenizer: Tokenizer) -> Merges | None:
    """The merges of a tokenizer; None where a byte has no id, or a merge is not made of known tokens."""
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    characters = byte_characters()
    if model.get("ignore_merges") or any(character not in vocabulary for character in characters):
        return None
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if any(left not in vocabulary or right not in vocabulary or left + right not in vocabulary
           for left, right in pairs):
        return None
    left = np.array([vocabulary[pair[0]] for pair in pairs], np.uint64)
    right = np.array([vocabulary[pair[1]] for pair in pairs], np.uint64)
    together = np.array([vocabulary["".join(pair)] for pair in pairs], np.int32)
    size = 4
    while size < 3 * len(pairs):
        size *= 2
    table = Merges(np.array([vocabulary[character] for character in characters], np.int32), np.full(size, _FREE),
                   np.empty(size, np.int32), np.empty(size, np.int32))
    _fill(left << np.uint64(32) | right, together, table.pairs, table.ranks, table.merged)
    return table


def byte_characters() -> list[str]:
    """The character that GPT-2 spells each byte with: printable ones stand for themselves, others follow U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(0x100)]


@kernel
def _fill(keys: np.ndarray, together: np.ndarray, pairs: np.ndarray, ranks: np.ndarray, merged: np.ndarray) -> None:
    mask = np.uint64(len(pairs) - 1)
    for rank in range(len(keys)):
        slot = fmix64(keys[rank]) & mask
        while pairs[slot] != _FREE and pairs[slot] != keys[rank]:
            slot = (slot + np.uint64(1)) & mask
        # A merge that is listed twice has the later rank, as in the library's own table.
        pairs[slot], ranks[slot], merged[slot] = keys[rank], rank, together[rank]


@kernel
def _find(left: int, right: int, pairs: np.ndarray) -> int:
    """The slot of a pair, or -1."""
    mask = np.uint64(len(pairs) - 1)
    key = np.uint64(left) << np.uint64(32) | np.uint64(right)
    slot = fmix64(key) & mask
    while pairs[slot] != _FREE:
        if pairs[slot] == key:
            return int(slot)
        slot = (slot + np.uint64(1)) & mask
    return -1


@kernel
def merge_entries(
    first: int, last: int, starts: np.ndarray, arena: np.ndarray, id_starts: np.ndarray, ids: np.ndarray,
    byte_ids: np.ndarray, pairs: np.ndarray, ranks: np.ndarray, merged: np.ndarray,
) -> int:  # fmt: skip
    """Give cache entries (see `piece_cache.PieceCache`) their ids.

    Args:
        first, last: entries from `first` up to `last`; those before have their ids.

    Returns:
        the first entry that is longer than LONGEST_PIECE and was not encoded; `last` if there is none.
    """
    tokens = np.empty(LONGEST_PIECE, np.int32)
    rank_of = np.empty(LONGEST_PIECE, np.int32)
    slot_of = np.empty(LONGEST_PIECE, np.int64)
    for entry in range(first, last):
        begin, length = starts[entry], starts[entry + 1] - starts[entry]
        if length > LONGEST_PIECE:
            return entry
        for at in range(length):
            tokens[at] = byte_ids[arena[begin + at]]
        for at in range(length - 1):
            slot_of[at] = _find(tokens[at], tokens[at + 1], pairs)
            rank_of[at] = ranks[slot_of[at]] if slot_of[at] >= 0 else NO_RANK
        while length > 1:
            best, place = NO_RANK, 0
            for at in range(length - 1):
                if rank_of[at] < best:
                    best, place = rank_of[at], at
            if best == NO_RANK:
                break
            tokens[place] = merged[slot_of[place]]
            length -= 1
            for at in range(place + 1, length):
                tokens[at] = tokens[at + 1]
            for at in range(place, length - 1):
                rank_of[at], slot_of[at] = rank_of[at + 1], slot_of[at + 1]
            for at in range(max(place - 1, 0), min(place + 1, length - 1)):
                slot_of[at] = _find(tokens[at], tokens[at + 1], pairs)
                rank_of[at] = ranks[slot_of[at]] if slot_of[at] >= 0 else NO_RANK
        to = id_starts[entry]
        for at in range(length):
            ids[to + at] = tokens[at]
        id_starts[entry + 1] = to + length
    return last
