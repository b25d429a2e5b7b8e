"""Windows of n words of a text, hashed, and a selection of them that copies share. Numba kernels over UTF-8 bytes.

A window is the text from the first byte of a word to the last byte of the (n-1)-th word after it, so that equal
windows are equal bytes. Winnowing (Schleimer, Wilkerson and Aiken 2003) takes of any s windows in a row the one with
the smallest hash (the last of equal ones): two passages with s equal windows in a row have one of these taken in
both, wherever they stand. Taken windows are `anchors`; about 2 in s + 1 windows are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.hashing import fmix64, hash_bytes
from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.text_buffers import text_buffers
from gristmill.dataprep.unicode_tables import code_point_flags
from gristmill.dataprep.words import word_spans

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, as in hashing.py

SINGLE_SPACE = np.uint8(0x20)


class Windows(NamedTuple):
    """All windows of n texts, one after the other.

    Attributes:
        offsets: int64 of shape (n + 1,); text i has the windows from offsets[i] up to offsets[i + 1].
        hashes: uint64. begins, ends: int64, bytes of the text.
        words: int64 of shape (n,), the words of each text.
    """

    offsets: np.ndarray
    hashes: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    words: np.ndarray

    @property
    def text(self) -> np.ndarray:
        """Which text each window is of."""
        numbers: np.ndarray = np.repeat(np.arange(len(self.words)), np.diff(self.offsets))
        return numbers


def find_windows(texts: pa.Array | pa.ChunkedArray, length: int) -> Windows:
    """All windows of so many words; a text with fewer words has none.

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    data, offsets = text_buffers(texts)
    return Windows(*_find_windows(data, offsets, code_point_flags(), length))


def find_anchors(windows: Windows, spread: int) -> np.ndarray:
    """Which windows are anchors (bool): of any `spread` in a row one at least, of a text with fewer one."""
    return _find_anchors(windows.hashes, windows.offsets, spread)


def near(windows: Windows, marked: np.ndarray, distance: int) -> np.ndarray:
    """Which windows are at most so many windows from a marked one of the same text (bool)."""
    return _near(windows.offsets, marked, distance)


@kernel
def _find_windows(
    data: np.ndarray, offsets: np.ndarray, flags: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    texts = len(offsets) - 1
    most = (offsets[texts] - offsets[0]) // 2 + texts
    hashes, begins, ends = np.empty(most, np.uint64), np.empty(most, np.int64), np.empty(most, np.int64)
    window_offsets, words = np.zeros(texts + 1, np.int64), np.empty(texts, np.int64)
    oldest = np.uint64(1)
    for _ in range(length - 1):
        oldest *= _ODD
    count = 0
    for text in range(texts):
        begin = offsets[text]
        firsts, lasts = word_spans(data, begin, offsets[text + 1], flags)
        words[text] = len(firsts)
        # A word with what parts it from the next one; a single space, which is the most frequent, adds nothing.
        steps = np.zeros(len(firsts), np.uint64)
        value = np.uint64(0)
        for word in range(len(firsts)):
            own = hash_bytes(data, firsts[word], lasts[word])
            first = word - length + 1
            if first >= 0:
                hashes[count] = fmix64(value * _ODD + fmix64(own))
                begins[count], ends[count] = firsts[first] - begin, lasts[word] - begin
                count += 1
            if word + 1 < len(firsts):
                single = firsts[word + 1] - lasts[word] == 1 and data[lasts[word]] == SINGLE_SPACE
                gap = np.uint64(0) if single else hash_bytes(data, lasts[word], firsts[word + 1])
                steps[word] = own + gap
            value = value * _ODD + steps[word]
            if first >= 0:
                value -= oldest * steps[first]
        window_offsets[text + 1] = count
    return window_offsets, hashes[:count].copy(), begins[:count].copy(), ends[:count].copy(), words


@kernel
def _find_anchors(hashes: np.ndarray, offsets: np.ndarray, spread: int) -> np.ndarray:
    anchors = np.zeros(len(hashes), np.bool_)
    for text in range(len(offsets) - 1):
        first, stop = offsets[text], offsets[text + 1]
        best = first - 1
        for last in range(max(min(first + spread, stop) - 1, first), stop):
            begin = max(first, last - spread + 1)
            if best < begin:
                best = begin
                for window in range(begin + 1, last + 1):
                    if hashes[window] <= hashes[best]:
                        best = window
            elif hashes[last] <= hashes[best]:
                best = last
            anchors[best] = True
    return anchors


@kernel
def _near(offsets: np.ndarray, marked: np.ndarray, distance: int) -> np.ndarray:
    found = np.zeros(len(marked), np.bool_)
    for text in range(len(offsets) - 1):
        first, stop = offsets[text], offsets[text + 1]
        since = distance + 1
        for window in range(first, stop):
            since = 0 if marked[window] else since + 1
            found[window] = since <= distance
        since = distance + 1
        for window in range(stop - 1, first - 1, -1):
            since = 0 if marked[window] else since + 1
            found[window] |= since <= distance
    return found
