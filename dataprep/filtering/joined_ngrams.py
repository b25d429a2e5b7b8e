"""Repeated word n-grams as datatrove finds them: by the text of their words without anything between them.

`to day x y z` and `today x y z !` are then the same, so the exact numbers of `repetition.py` cannot serve. But equal
n-grams begin with the same bytes, so that only positions which share their first bytes with another one have to be
looked at; and what is looked at is compared byte by byte.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.filtering.repetition import empty_table
from gristmill.dataprep.hashing import hash_bytes, load64, same_bytes, store64
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
    for word in range(len(starts)):
        _copy(data, starts[word], ends[word], joined, offsets[word])
    joined[offsets[-1] :] = 0
    return joined, offsets


@kernel
def _copy(data: np.ndarray, at: int, end: int, joined: np.ndarray, to: int) -> None:
    """Copy bytes by eights; up to seven places behind them are written too."""
    if at + 8 * ((end - at + 7) // 8) > len(data):
        joined[to : to + end - at] = data[at:end]
        return
    while at < end:
        store64(joined, to, load64(data, at))
        at, to = at + 8, to + 8


@kernel
def shared_starts(joined: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Which words' next sixteen bytes are likely to be those of another word too: bool, one value per word.

    None for which they are is left out.
    """
    words = len(offsets) - 1
    shift = _shift(words)
    counts, slots = np.zeros(1 << 64 - shift, np.uint8), np.empty(words, np.uint32)
    for word in range(words):
        value = (load64(joined, offsets[word]) * _ODD ^ load64(joined, offsets[word] + 8)) * _OTHER_ODD
        slot = value >> np.uint64(shift)
        slots[word] = slot
        counts[slot] = min(counts[slot] + 1, 2)
    shared = np.empty(words, np.bool_)
    for word in range(words):
        shared[word] = counts[slots[word]] > 1
    _look_again(joined, offsets, shared)
    return shared


@kernel
def _look_again(joined: np.ndarray, offsets: np.ndarray, shared: np.ndarray) -> None:
    """Clear most of what is set by chance: among few words, by another hash, chance is small."""
    shift = _shift(shared.sum())
    counts = np.zeros(1 << 64 - shift, np.uint8)
    slots = np.empty(len(shared), np.uint32)
    for word in range(len(shared)):
        if shared[word]:
            value = (load64(joined, offsets[word]) * _OTHER_ODD ^ load64(joined, offsets[word] + 8)) * _ODD
            slot = value >> np.uint64(shift)
            slots[word] = slot
            counts[slot] = min(counts[slot] + 1, 2)
    for word in range(len(shared)):
        if shared[word]:
            shared[word] = counts[slots[word]] > 1


@kernel
def _shift(entries: int) -> int:
    """By how many bits a 64-bit hash is shifted for a table of at least eight places per entry."""
    bits = 6
    while 1 << bits < 8 * entries:
        bits += 1
    return 64 - bits


@kernel
def likely_copies(offsets: np.ndarray, shared: np.ndarray, before: np.ndarray, n: int) -> np.ndarray:
    """The word positions at which an n-gram might equal that at another position; none that does is left out.

    An n-gram of sixteen bytes or more has to share them; shorter ones are rare.

    Args:
        offsets: what `join_words` returns.
        shared: what `shared_starts` returns.
        before: int32 positions, ascending: what this function returned for a smaller n, or all.
    """
    words = len(offsets) - 1
    positions = np.empty(len(before), np.int32)
    count = 0
    for word in before:
        if word + n > words:
            break
        positions[count] = word
        count += shared[word] or offsets[word + n] - offsets[word] < 16
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
