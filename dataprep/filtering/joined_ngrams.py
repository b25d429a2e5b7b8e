"""Repeated word n-grams as datatrove finds them: by the text of their words without anything between them.

`to day x y z` and `today x y z !` are then the same, so the exact numbers of `repetition.py` cannot serve. But equal
n-grams begin with the same bytes, so that only positions which share their first bytes with another one have to be
looked at; and what is looked at is compared byte by byte.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.filtering.repetition import empty_table
from gristmill.dataprep.hashing import hash_bytes, load64, same_bytes
from gristmill.dataprep.kernels import kernel

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
def shared_starts(joined: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which words' next eight, and which words' next sixteen bytes, are likely to be those of another word too.

    None for which they are is left out. Two bool arrays, one value per word.
    """
    words = len(offsets) - 1
    shift = _shift(words)
    size = 1 << 64 - shift
    eights, sixteens = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    slots = np.empty((words, 2), np.uint32)
    for word in range(words):
        first, second = load64(joined, offsets[word]), load64(joined, offsets[word] + 8)
        eight = first * _ODD
        sixteen = (eight ^ second) * _OTHER_ODD
        eight, sixteen = eight >> np.uint64(shift), sixteen >> np.uint64(shift)
        slots[word, 0], slots[word, 1] = eight, sixteen
        eights[eight] = min(eights[eight] + 1, 2)
        sixteens[sixteen] = min(sixteens[sixteen] + 1, 2)
    shared_8, shared_16 = np.empty(words, np.bool_), np.empty(words, np.bool_)
    for word in range(words):
        shared_8[word] = eights[slots[word, 0]] > 1
        shared_16[word] = sixteens[slots[word, 1]] > 1
    _look_again(joined, offsets, shared_16)
    return shared_8, shared_16


@kernel
def _look_again(joined: np.ndarray, offsets: np.ndarray, shared_16: np.ndarray) -> None:
    """Clear most of what is set by chance: among few words, by another hash, chance is small."""
    shift = _shift(shared_16.sum())
    counts = np.zeros(1 << 64 - shift, np.uint8)
    slots = np.empty(len(shared_16), np.uint32)
    for word in range(len(shared_16)):
        if shared_16[word]:
            value = (load64(joined, offsets[word]) * _OTHER_ODD ^ load64(joined, offsets[word] + 8)) * _ODD
            slots[word] = value >> np.uint64(shift)
            counts[slots[word]] = min(counts[slots[word]] + 1, 2)
    for word in range(len(shared_16)):
        if shared_16[word]:
            shared_16[word] = counts[slots[word]] > 1


@kernel
def _shift(entries: int) -> int:
    """By how many bits a 64-bit hash is shifted for a table of at least eight places per entry."""
    bits = 6
    while 1 << bits < 8 * entries:
        bits += 1
    return 64 - bits


@kernel
def likely_copies(
    offsets: np.ndarray, shared_8: np.ndarray, shared_16: np.ndarray, before: np.ndarray, n: int
) -> np.ndarray:
    """The word positions at which an n-gram might equal that at another position; none that does is left out.

    An n-gram of sixteen bytes or more has to share them, one of eight or more its first eight.

    Args:
        offsets: what `join_words` returns.
        shared_8, shared_16: what `shared_starts` returns.
        before: int32 positions, ascending: what this function returned for a smaller n, or all.
    """
    words = len(offsets) - 1
    positions = np.empty(len(before), np.int32)
    count = 0
    for word in before:
        if word + n > words:
            break
        length = offsets[word + n] - offsets[word]
        positions[count] = word
        count += shared_16[word] if length >= 16 else shared_8[word] or length < 8
    return positions[:count]


@kernel
def copied_chars(joined: np.ndarray, offsets: np.ndarray, candidates: np.ndarray, chars: np.ndarray, n: int) -> int:
    """Code points of the n-grams that were there before, in one walk that jumps over each of them.

    Args:
        candidates: what `likely_copies` returns for this n.
        chars: code points of every word.
    """
    table = empty_table(len(candidates))
    mask = np.uint64(len(table) - 1)
    hashes = np.empty(len(candidates), np.uint64)
    total, next_word = 0, 0
    for number in range(len(candidates)):
        word = candidates[number]
        if word < next_word:
            continue
        start, end = offsets[word], offsets[word + n]
        value = hash_bytes(joined, start, end)
        slot = value & mask
        found = False
        while table[slot] >= 0 and not found:
            other = candidates[table[slot]]
            same = hashes[table[slot]] == value and offsets[other + n] - offsets[other] == end - start
            found = same and same_bytes(joined, offsets[other], start, end - start)
            slot = (slot + np.uint64(1)) & mask
        if found:
            total += chars[word : word + n].sum()
            next_word = word + n
        else:
            table[slot], hashes[number] = number, value
    return total
