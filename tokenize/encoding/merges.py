"""The merges of a byte-level BPE as a table of pairs (Sennrich et al. 2016, on bytes as GPT-2 has it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gristmill.dataprep.hashing import fmix64
from gristmill.dataprep.kernels import kernel
from gristmill.tokenize.encoding.patterns import NotKnownError

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
