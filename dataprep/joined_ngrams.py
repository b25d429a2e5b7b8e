"""Repeated word n-grams as datatrove finds them: by the text of their words without anything between them.

`to day x y z` and `today x y z !` are then the same, so the exact numbers of `repetition.py` cannot serve. But equal
n-grams begin with the same bytes, so that only positions which share their first bytes with another one have to be
looked at; and what is looked at is compared byte by byte.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.hashing import hash_bytes, load64, same_bytes
from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.repetition import empty_table

PADDING = 16
"""Bytes after the last word, so that sixteen can be read at any."""
_ODD = np.uint64(0x9E3779B97F4A7C15)
_OTHER_ODD = np.uint64(0xD6E8FEB86659FD93)


@kernel
def join_words(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of n words without anything between them.

    Returns:
        joined: uint8, and PADDING zeros; offsets: int64 of shape (n + 1,), where each word begins.
    """
    offsets = np.empty(len(starts) + 1, np.int64)
    offsets[0] = 0
    for word in range(len(starts)):
        offsets[word + 1] = offsets[word] + ends[word] - starts[word]
    joined = np.empty(offsets[-1] + PADDING, np.uint8)
    count = 0
    for word in range(len(starts)):
        for at in range(starts[word], ends[word]):
            joined[count] = data[at]
            count += 1
    joined[count:] = 0
    return joined, offsets


@kernel
def likely_copies(joined: np.ndarray, offsets: np.ndarray, n: int) -> np.ndarray:
    """The word positions at which an n-gram, or a longer one, might equal that at another position.

    None that does is left out. An n-gram of sixteen bytes or more needs another position with the same sixteen, one of
    eight or more another with the same eight; shorter ones always stay.

    Returns:
        int32 word positions, ascending.
    """
    words = len(offsets) - 1
    size = 64
    while size < 8 * words:
        size *= 2
    mask = np.uint64(size - 1)
    eights, sixteens = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    slots = np.empty((words, 2), np.uint32)
    for word in range(words):
        first, second = load64(joined, offsets[word]), load64(joined, offsets[word] + 8)
        eight = first * _ODD
        sixteen = (eight ^ second) * _OTHER_ODD
        slot = (eight ^ eight >> np.uint64(32)) & mask
        slots[word, 0] = slot
        eights[slot] += eights[slot] < 2
        slot = (sixteen ^ sixteen >> np.uint64(32)) & mask
        slots[word, 1] = slot
        sixteens[slot] += sixteens[slot] < 2
    positions = np.empty(words, np.int32)
    count = 0
    for word in range(words - n + 1):
        length = offsets[word + n] - offsets[word]
        shared = sixteens[slots[word, 1]] if length >= 16 else eights[slots[word, 0]]
        positions[count] = word
        count += shared > 1 or length < 8
    return positions[:count]


@kernel
def copied_chars(joined: np.ndarray, offsets: np.ndarray, candidates: np.ndarray, chars: np.ndarray, n: int) -> int:
    """Code points of the n-grams that were there before, in one walk that jumps over each of them.

    Args:
        candidates: what `likely_copies` returns for this n or a smaller one.
        chars: code points of every word.
    """
    words = len(offsets) - 1
    table = empty_table(len(candidates))
    mask = np.uint64(len(table) - 1)
    hashes = np.empty(words, np.uint64)
    total, next_word = 0, 0
    for word in candidates:
        if word < next_word or word + n > words:
            continue
        start, end = offsets[word], offsets[word + n]
        value = hash_bytes(joined, start, end)
        slot = value & mask
        while table[slot] >= 0:
            other = table[slot]
            same = hashes[other] == value and offsets[other + n] - offsets[other] == end - start
            if same and same_bytes(joined, offsets[other], start, end - start):
                break
            slot = (slot + np.uint64(1)) & mask
        if table[slot] < 0:
            table[slot], hashes[word] = word, value
            continue
        total += chars[word : word + n].sum()
        next_word = word + n
    return total
