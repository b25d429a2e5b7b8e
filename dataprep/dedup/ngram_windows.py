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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column, offsets_of
from gristmill.dataprep.dedup.repeated_spans import Spans
from gristmill.dataprep.edits import join_spans
from gristmill.dataprep.shuffle_format import ranges
from gristmill.dataprep.text.hashing import (
    ODD,
    OTHER_ODD,
    append_hash,
    fmix64,
    hash_bytes,
)
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.spans import word_spans
from gristmill.dataprep.text.unicode_tables import code_point_flags

SINGLE_SPACE = np.uint8(0x20)


def find_windows(texts: Column, length: int) -> tuple[Spans, np.ndarray]:
    """Find all windows of `length` words; a text with fewer words has none.

    Returns:
        the windows; and the number of words of each text, int64 of shape (n,).

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    return _find_windows(*text_buffers(texts), code_point_flags(), length)


@kernel
def _find_windows(
    data: Bytes, offsets: Offsets, flags: Flags, length: int
) -> tuple[Spans, np.ndarray]:
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
    spans = Spans(
        window_offsets,
        begins[:count].copy(),
        ends[:count].copy(),
        highs[:count].copy(),
        lows[:count].copy(),
    )
    return spans, words


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
        offsets: as in `Spans`.
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


def near(offsets: Offsets, marked: np.ndarray, distance: int) -> np.ndarray:
    """Windows within `distance` windows of a marked one of the same text: int64,
    ascending.

    Args:
        offsets: as in `Spans`.
        marked: int64, ascending, the marked windows.
    """
    text = np.searchsorted(offsets, marked, side="right") - 1
    begins = np.maximum(marked - distance, offsets[text])
    ends = np.minimum(marked + distance + 1, offsets[text + 1])
    begins[1:] = np.maximum(begins[1:], ends[:-1])
    return ranges(begins, ends)


def cut_copies(
    texts: pa.Array,
    text: np.ndarray,
    begins: np.ndarray,
    ends: np.ndarray,
    is_copy: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut the words that lie in a copy and not in a first copy.

    A cut ends at the beginning of the next word, so that one of the two separators
    around it remains.

    Args:
        texts: n strings.
        text, begins, ends: int64, repeated windows, by text and begin.
        is_copy: bool, true for a copy that may be cut, false for a first copy that
            stays.

    Returns:
        begins, ends and offsets of the cuts as `edits.cuts_array` takes them; int64 of
        shape (n,), number of words cut from each text.
    """
    affected, words, base, word_base = words_around(texts, text)
    begins, ends, word_ends = begins + base, ends + base, words.ends + word_base
    copied, kept = (
        farthest_end(begins[chosen], ends[chosen], words.begins + word_base)
        for chosen in (is_copy, ~is_copy)
    )
    is_cut = (word_ends <= copied) & (word_ends > kept)
    stops = np.roll(words.begins, -1)
    last = words.offsets[1:] - 1
    stops[last] = words.ends[last]
    text_of_cut = affected[words.text[is_cut]]
    cuts = join_spans(text_of_cut, words.begins[is_cut], stops[is_cut], len(texts))
    return *cuts, np.bincount(text_of_cut, minlength=len(texts))


def words_around(
    texts: pa.Array, text: np.ndarray
) -> tuple[np.ndarray, Spans, np.ndarray, np.ndarray]:
    """Words of the texts that have some spans.

    Args:
        text: int64, ascending, position of each span's text.

    Returns:
        the texts, distinct; their words; and what to add to positions in a text of each
        span, and of each word, so that they ascend over all texts: int64.
    """
    affected, place = np.unique(text, return_inverse=True)
    affected_texts = texts.take(affected)
    words, _ = find_windows(affected_texts, 1)
    bases = offsets_of(pc.binary_length(affected_texts))
    return affected, words, bases[place], bases[words.text]


def farthest_end(
    begins: np.ndarray, ends: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    """Farthest end of the spans (by their begins) that begin at or before each
    position; 0 without one.
    """
    farthest = np.append(0, np.maximum.accumulate(ends))
    return farthest[np.searchsorted(begins, positions, side="right")]
