"""Hashed windows of n words of a text, and their copies. Numba kernels over UTF-8
bytes.

A window is the text from the first byte of a word to the last byte of the (n-1)-th word
after it, so that equal windows are equal bytes; they are identified by a hash of 128
bits. Winnowing (Schleimer, Wilkerson and Aiken 2003) selects the window with the
smallest upper half (the last of equal ones) among any s consecutive windows: if two
passages share s consecutive windows, the same one is selected in both. Selected windows
are `anchors`, about 2 of s + 1 windows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.core.arrays import Column
from gristmill.dataprep.text.hashing import (
    ODD,
    OTHER_ODD,
    append_hash,
    fmix64,
    hash_bytes,
)
from gristmill.dataprep.text.kernels import (
    Bytes,
    Flags,
    Offsets,
    Positions,
    kernel,
    text_buffers,
)
from gristmill.dataprep.text.spans import word_spans
from gristmill.dataprep.text.unicode_tables import code_point_flags

SINGLE_SPACE = np.uint8(0x20)


class Windows(NamedTuple):
    """All windows of n texts, concatenated.

    Attributes:
        offsets: int64 of shape (n + 1,); text i has the windows from offsets[i] up to
            offsets[i + 1].
        high, low: uint64, halves of the hash. begins, ends: int64, bytes of the text.
        words: int64 of shape (n,), number of words of each text.
    """

    offsets: np.ndarray
    high: np.ndarray
    low: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    words: np.ndarray

    @property
    def text(self) -> np.ndarray:
        """Position of each window's text."""
        return np.repeat(np.arange(len(self.words)), np.diff(self.offsets))


def find_windows(texts: Column, length: int) -> Windows:
    """Find all windows of `length` words; a text with fewer words has none.

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    return Windows(*_find_windows(*text_buffers(texts), code_point_flags(), length))


@kernel
def _find_windows(
    data: Bytes, offsets: Offsets, flags: Flags, length: int
) -> tuple[np.ndarray, ...]:
    texts = len(offsets) - 1
    capacity = (offsets[texts] - offsets[0]) // 2 + texts
    highs = np.empty(capacity, np.uint64)
    lows = np.empty(capacity, np.uint64)
    begins = np.empty(capacity, np.int64)
    ends = np.empty(capacity, np.int64)
    window_offsets = np.zeros(texts + 1, np.int64)
    words = np.empty(texts, np.int64)
    oldest_high = np.uint64(1)
    oldest_low = np.uint64(1)
    for _ in range(length - 1):
        oldest_high *= ODD
        oldest_low *= OTHER_ODD
    count = 0
    for text in range(texts):
        begin = offsets[text]
        firsts, lasts = word_spans(data, begin, offsets[text + 1], flags)
        words[text] = len(firsts)
        # Hashes of each word with the gap after it; a single space, the most frequent
        # gap, adds 0.
        high_steps = np.zeros(len(firsts), np.uint64)
        low_steps = np.zeros(len(firsts), np.uint64)
        high = np.uint64(0)
        low = np.uint64(0)
        for word in range(len(firsts)):
            word_high = hash_bytes(data, firsts[word], lasts[word])
            word_low = _other_hash(data, firsts[word], lasts[word])
            first = word - length + 1
            if first >= 0:
                highs[count] = fmix64(high * ODD + fmix64(word_high))
                lows[count] = fmix64(low * OTHER_ODD + fmix64(word_low))
                begins[count], ends[count] = firsts[first] - begin, lasts[word] - begin
                count += 1
            if word + 1 < len(firsts):
                gap_begin = lasts[word]
                gap_end = firsts[word + 1]
                if gap_end - gap_begin > 1 or data[gap_begin] != SINGLE_SPACE:
                    word_high += hash_bytes(data, gap_begin, gap_end)
                    word_low += _other_hash(data, gap_begin, gap_end)
                high_steps[word], low_steps[word] = word_high, word_low
            high = high * ODD + high_steps[word]
            low = low * OTHER_ODD + low_steps[word]
            if first >= 0:
                high -= oldest_high * high_steps[first]
                low -= oldest_low * low_steps[first]
        window_offsets[text + 1] = count
    return (
        window_offsets,
        highs[:count].copy(),
        lows[:count].copy(),
        begins[:count].copy(),
        ends[:count].copy(),
        words,
    )


@kernel
def _other_hash(data: Bytes, begin: int, end: int) -> np.uint64:
    """Hash of bytes that is independent of `hash_bytes`, as the lower half of the key
    in `lines.py`.
    """
    value = np.uint64(0)
    for position in range(begin, end):
        value = append_hash(value, np.uint64(data[position]))
    return fmix64(value ^ np.uint64(end - begin))


@kernel
def find_anchors(hashes: np.ndarray, offsets: Offsets, spread: int) -> np.ndarray:
    """Mask of anchors (bool): at least one of any `spread` consecutive windows, and one
    of a text with fewer.

    Args:
        hashes: uint64, upper halves of the windows' hashes.
        offsets: as in `Windows`.
    """
    anchors = np.zeros(len(hashes), np.bool_)
    for text in range(len(offsets) - 1):
        first = offsets[text]
        stop = offsets[text + 1]
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
def near(offsets: Offsets, marked: np.ndarray, distance: int) -> np.ndarray:
    """Mask of windows within `distance` windows of a marked window of the same text
    (bool).

    Args:
        offsets: as in `Windows`.
        marked: bool per window.
    """
    is_near = np.zeros(len(marked), np.bool_)
    for text in range(len(offsets) - 1):
        first = offsets[text]
        stop = offsets[text + 1]
        since = distance + 1
        for window in range(first, stop):
            since = 0 if marked[window] else since + 1
            is_near[window] = since <= distance
        since = distance + 1
        for window in range(stop - 1, first - 1, -1):
            since = 0 if marked[window] else since + 1
            is_near[window] |= since <= distance
    return is_near


@kernel
def cut_copies(
    data: Bytes,
    offsets: Offsets,
    flags: Flags,
    text: np.ndarray,
    begins: Positions,
    ends: Positions,
    copy: np.ndarray,
) -> tuple[Positions, Positions, Offsets, np.ndarray]:
    """Cut the words that lie in a copy and not in a first copy.

    A cut ends at the beginning of the next word, so that one of the two separators
    around it remains.

    Args:
        data, offsets: n texts (`text_buffers`).
        flags: of code points.
        text, begins, ends: int64, repeated windows, by text and begin.
        copy: bool, true for a copy that may be cut, false for a first copy that stays.

    Returns:
        begins, ends and offsets of the cuts as `edits.cuts_array` takes them; int64 of
        shape (n,), number of words cut from each text.
    """
    texts = len(offsets) - 1
    cut_begins = np.empty(len(text), np.int64)
    cut_ends = np.empty(len(text), np.int64)
    cut_offsets = np.zeros(texts + 1, np.int64)
    cut_words = np.zeros(texts, np.int64)
    count = 0
    window = 0
    for number in range(texts):
        if window < len(text) and text[window] == number:
            base = offsets[number]
            firsts, lasts = word_spans(data, base, offsets[number + 1], flags)
            copied = -1
            kept = -1
            open_cut = False
            for word in range(len(firsts)):
                while (
                    window < len(text)
                    and text[window] == number
                    and begins[window] <= firsts[word] - base
                ):
                    if copy[window]:
                        copied = max(copied, ends[window])
                    else:
                        kept = max(kept, ends[window])
                    window += 1
                is_cut = lasts[word] - base <= copied and lasts[word] - base > kept
                if is_cut and not open_cut:
                    cut_begins[count], open_cut = firsts[word] - base, True
                if not is_cut and open_cut:
                    cut_ends[count], open_cut = firsts[word] - base, False
                    count += 1
                cut_words[number] += is_cut
            if open_cut:
                cut_ends[count] = lasts[len(lasts) - 1] - base
                count += 1
        cut_offsets[number + 1] = count
    return cut_begins[:count].copy(), cut_ends[:count].copy(), cut_offsets, cut_words
