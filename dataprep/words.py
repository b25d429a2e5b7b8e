"""Where the words of a text are, by the rule of `shingles.py`: lower-cased runs of `\\w`, or one unspaced character."""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.hashing import fmix64
from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.unicode_tables import ALONE, NOTHING, WORD, decode

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, as in hashing.py


@kernel
def word_spans(data: np.ndarray, begin: int, end: int, flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the words of `data[begin:end]`, valid UTF-8.

    Args:
        flags: `unicode_tables.code_point_flags`.

    Returns:
        starts, ends: int64 byte positions in `data`, one entry per word.
    """
    most = (end - begin) // 2 + 1  # two words in a row without a space need a character of three bytes
    starts, ends = np.empty(most, np.int64), np.empty(most, np.int64)
    count, inside = 0, False
    at = begin
    while at < end:
        code, width = decode(data, at)
        flag = flags[code]
        if inside and (flag & WORD == 0 or flag & ALONE != 0):
            ends[count] = at
            count, inside = count + 1, False
        if flag & WORD != 0 and not inside:
            starts[count], inside = at, True
        at += width
        if flag & ALONE != 0 and inside:
            ends[count] = at
            count, inside = count + 1, False
    if inside:
        ends[count] = end
        count += 1
    return starts[:count], ends[:count]


@kernel
def hashed_words(
    data: np.ndarray, begin: int, end: int, flags: np.ndarray, lower: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the words as `word_spans` does, and hash each one's lower-cased code points to 64 bits.

    What nobody sees neither ends a word nor is part of one: `ex\u00adample` is the word `example`.

    Args:
        lower: `unicode_tables.lower_case_seen`.

    Returns:
        starts, ends: int64; hashes: uint64, one entry per word.
    """
    most = (end - begin) // 2 + 1
    starts, ends, hashes = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.uint64)
    count, length, value = 0, np.uint64(0), np.uint64(0)
    at = begin
    while at < end:
        code, width = decode(data, at)
        if lower[code] == NOTHING:
            at += width
            continue
        flag = flags[code]
        if length > 0 and (flag & WORD == 0 or flag & ALONE != 0):
            ends[count], hashes[count] = at, fmix64(value + length)
            count, length, value = count + 1, np.uint64(0), np.uint64(0)
        if flag & WORD == 0:
            at += width
            continue
        if length == 0:
            starts[count] = at
        at += width
        value = (value ^ np.uint64(lower[code])) * _ODD
        value ^= value >> np.uint64(32)
        length += np.uint64(1)
        if flag & ALONE != 0:
            ends[count], hashes[count] = at, fmix64(value + length)
            count, length, value = count + 1, np.uint64(0), np.uint64(0)
    if length > 0:
        ends[count], hashes[count] = end, fmix64(value + length)
        count += 1
    return starts[:count], ends[:count], hashes[:count]


@kernel
def same_lower(data: np.ndarray, begin: int, end: int, lower: np.ndarray, codes: np.ndarray) -> bool:
    """Whether a word's lower-cased code points, without those that nobody sees, are `codes` (uint32)."""
    same = 0
    while begin < end:
        found, width = decode(data, begin)
        begin += width
        if lower[found] == NOTHING:
            continue
        if same == len(codes) or lower[found] != codes[same]:
            return False
        same += 1
    return same == len(codes)
