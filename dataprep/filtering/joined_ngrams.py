"""Repeated word n-grams as datatrove finds them: by the text of their words without anything between them.

`to day x y z` and `today x y z !` are then the same, so the exact numbers of `repetition.py` cannot serve. But equal
n-grams begin with the same bytes, so that only positions which share their first bytes with another one have to be
looked at; and what is looked at is compared byte by byte.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.filtering.repetition import empty_table
from gristmill.dataprep.text.hashing import hash_bytes, load64, same_bytes, store64
from gristmill.dataprep.text.kernels import kernel

MOST_SHARED = 40
"""So many bytes at the beginning of an n-gram are compared with others before the whole of it is."""
PADDING = MOST_SHARED
"""Bytes after the last word, so that so many can be read at any."""
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
        start, to = starts[word], offsets[word]
        if ends[word] - start <= 16 and start + 16 <= len(data):  # what is too much, the next word overwrites
            store64(joined, to, load64(data, start))
            store64(joined, to + 8, load64(data, start + 8))
        else:
            for step in range(ends[word] - start):
                joined[to + step] = data[start + step]
    joined[offsets[-1] :] = 0
    return joined, offsets


@kernel
def shared_starts(joined: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """How many bytes from each word on are likely to be those from another word on too.

    Returns:
        uint8, one value per word: 0, 16, 24, 32 or 40 (MOST_SHARED, which may be more); never too few.
    """
    words = len(offsets) - 1
    shift = np.uint64(_shift(words))
    counts, values = np.zeros(1 << 64 - shift, np.uint8), np.empty(words, np.uint64)
    for word in range(words):
        value = (load64(joined, offsets[word]) * _ODD ^ load64(joined, offsets[word] + 8)) * _OTHER_ODD
        values[word] = value
        counts[value >> shift] = min(counts[value >> shift] + 1, 2)
    shared, likely = np.zeros(words, np.uint8), np.empty(words, np.int32)
    number = 0
    for word in range(words):
        likely[number] = word
        number += counts[values[word] >> shift] > 1
    likely = likely[:number]
    for length in range(24, MOST_SHARED + 1, 8):
        shared[likely] = length - 8
        likely = _share_more(joined, offsets, likely, values, length)
    shared[likely] = MOST_SHARED
    return shared


@kernel
def _share_more(
    joined: np.ndarray, offsets: np.ndarray, words: np.ndarray, values: np.ndarray, length: int
) -> np.ndarray:
    """Of words that share eight bytes less, those that are likely to share so many; `values` are their hashes."""
    shift = np.uint64(_shift(len(words)))
    counts = np.zeros(1 << 64 - shift, np.uint8)
    for word in words:
        value = values[word] ^ values[word] >> np.uint64(32) ^ load64(joined, offsets[word] + length - 8)
        values[word] = value * _ODD
        counts[values[word] >> shift] = min(counts[values[word] >> shift] + 1, 2)
    likely = np.empty(len(words), np.int32)
    number = 0
    for word in words:
        likely[number] = word
        number += counts[values[word] >> shift] > 1
    return likely[:number]


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

    An n-gram of sixteen bytes or more has to share its bytes; shorter ones are rare.

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
        length = offsets[word + n] - offsets[word]
        positions[count] = word
        count += (length < 16) | (shared[word] >= min(length & ~7, MOST_SHARED))
    return positions[:count]


@kernel
def _alike(joined: np.ndarray, offsets: np.ndarray, candidates: np.ndarray, n: int) -> np.ndarray:
    """Of positions of n-grams those whose length and first bytes (sixteen at most) are likely to be another's too."""
    shift = np.uint64(_shift(len(candidates)))
    counts, values = np.zeros(1 << 64 - shift, np.uint8), np.empty(len(candidates), np.uint64)
    for number in range(len(candidates)):
        start = offsets[candidates[number]]
        length = offsets[candidates[number] + n] - start
        beyond_8, beyond_16 = 8 - min(length, 8), 16 - max(min(length, 16), 8)
        first = load64(joined, start) << np.uint64(8 * beyond_8)
        half = np.uint64(4 * beyond_16)  # a number cannot be shifted by all of its 64 bits at once
        second = load64(joined, start + 8) << half << half
        value = ((first ^ np.uint64(length)) * _ODD ^ second) * _OTHER_ODD
        values[number] = value
        counts[value >> shift] = min(counts[value >> shift] + 1, 2)
    alike, found = np.empty(len(candidates), np.int32), 0
    for number in range(len(candidates)):
        alike[found] = candidates[number]
        found += counts[values[number] >> shift] > 1
    return alike[:found]


@kernel
def copied_chars(joined: np.ndarray, offsets: np.ndarray, candidates: np.ndarray, chars: np.ndarray, n: int) -> int:
    """Code points of the n-grams that were there before, in one walk that jumps over each of them.

    Args:
        candidates: what `likely_copies` returns for this n.
        chars: code points of every word.
    """
    candidates = _alike(joined, offsets, candidates, n)
    if len(candidates) < 2:
        return 0
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
