"""Lines and paragraphs as units that can be compared and cut. Numba kernels over UTF-8 bytes.

A unit is a line or paragraph as `spans.find_segments` has it: stripped, not empty. Its key is a hash of 128 bits of
its code points; among n distinct units about n^2 / 2^129 pairs share a key by chance (10^10 units: 10^-19). Lower
case is code point by code point, as in `unicode_tables.lower_case`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.hashing import fmix64
from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.spans import NEWLINE, find_segments
from gristmill.dataprep.text_buffers import text_buffers
from gristmill.dataprep.unicode_tables import SPACE, code_point_flags, decode, lower_case

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, as in hashing.py
_OTHER_ODD = np.uint64(0xC2B2AE3D27D4EB4F)  # xxHash's second 64-bit prime (Collet, BSD)
NEWLINES = {"line": 1, "paragraph": 2}


class Units(NamedTuple):
    """The units of n texts, one after the other.

    Attributes:
        offsets: int64 of shape (n + 1,); text i has the units from offsets[i] up to offsets[i + 1].
        begins: int64, where a unit's line begins: behind the newline before it, in bytes of its text.
        ends: int64, where its own bytes end (white space at its end left out).
        high, low: uint64, its key.
        characters: int64, its code points.
        words: int64, its words as `str.split()` has them.
    """

    offsets: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    high: np.ndarray
    low: np.ndarray
    characters: np.ndarray
    words: np.ndarray


def find_units(texts: pa.Array | pa.ChunkedArray, unit: str, lower: bool) -> Units:
    """Find the units of every text.

    Args:
        unit: `line` or `paragraph`.
        lower: whether the key ignores case.

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    data, offsets = text_buffers(texts)
    folded = lower_case() if lower else np.empty(0, np.uint32)
    return Units(*_find_units(data, offsets, code_point_flags(), folded, NEWLINES[unit]))


def cut_units(texts: pa.Array | pa.ChunkedArray, units: Units, cut: np.ndarray) -> tuple[np.ndarray, ...]:
    """The byte spans that go when some units are cut, each with the white space up to the next unit.

    Cutting the last unit takes the white space before it instead, unless the text ends in a newline.

    Args:
        cut: bool per unit.

    Returns:
        begins, ends, offsets: as `edits.cuts_array` takes them; spans that touch are one.
    """
    data, offsets = text_buffers(texts)
    return _cut_units(data, offsets, units.offsets, units.begins, units.ends, cut)


@kernel
def _find_units(
    data: np.ndarray, offsets: np.ndarray, flags: np.ndarray, lower: np.ndarray, newlines: int
) -> tuple[np.ndarray, ...]:
    texts = len(offsets) - 1
    most = texts
    for at in range(offsets[0], offsets[texts]):
        most += data[at] == NEWLINE
    begins, ends = np.empty(most, np.int64), np.empty(most, np.int64)
    high, low = np.empty(most, np.uint64), np.empty(most, np.uint64)
    characters, words = np.empty(most, np.int64), np.empty(most, np.int64)
    unit_offsets = np.zeros(texts + 1, np.int64)
    count = 0
    for text in range(texts):
        begin = offsets[text]
        firsts, lasts, lengths = find_segments(data, begin, offsets[text + 1], flags, newlines)
        for segment in range(len(firsts)):
            start = firsts[segment]
            while start > begin and data[start - 1] != NEWLINE:
                start -= 1
            begins[count], ends[count] = start - begin, lasts[segment] - begin
            characters[count] = lengths[segment]
            high[count], low[count], words[count] = _key(data, firsts[segment], lasts[segment], flags, lower)
            count += 1
        unit_offsets[text + 1] = count
    return unit_offsets, begins[:count], ends[:count], high[:count], low[:count], characters[:count], words[:count]


@kernel
def _key(data: np.ndarray, begin: int, end: int, flags: np.ndarray, lower: np.ndarray) -> tuple[int, int, int]:
    """The two halves of the key, and the number of words."""
    high, low, length, words = np.uint64(0), np.uint64(0), np.uint64(0), 0
    before = SPACE
    while begin < end:
        code, width = decode(data, begin)
        begin += width
        space = flags[code] & SPACE
        words += before != 0 and space == 0
        before = space
        value = np.uint64(lower[code]) if len(lower) else np.uint64(code)
        high = (high ^ value) * _ODD
        high ^= high >> np.uint64(32)
        low = (low + value) * _OTHER_ODD
        low ^= low >> np.uint64(29)
        length += np.uint64(1)
    return fmix64(high + length), fmix64(low ^ length), words


@kernel
def _cut_units(
    data: np.ndarray, offsets: np.ndarray, unit_offsets: np.ndarray, begins: np.ndarray, ends: np.ndarray,
    cut: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    texts = len(offsets) - 1
    cut_begins, cut_ends = np.empty(len(cut), np.int64), np.empty(len(cut), np.int64)
    cut_offsets = np.zeros(texts + 1, np.int64)
    count = 0
    for text in range(texts):
        size = offsets[text + 1] - offsets[text]
        first, stop = unit_offsets[text], unit_offsets[text + 1]
        for unit in range(first, stop):
            if not cut[unit]:
                continue
            end = begins[unit + 1] if unit + 1 < stop else size
            if unit > first and cut[unit - 1]:
                cut_ends[count - 1] = end
            else:
                cut_begins[count], cut_ends[count] = begins[unit], end
                count += 1
        ends_open = size > 0 and data[offsets[text] + size - 1] != NEWLINE
        if stop > first and cut[stop - 1] and ends_open:
            kept = stop - 1
            while kept >= first and cut[kept]:
                kept -= 1
            if kept >= first:
                cut_begins[count - 1] = ends[kept]
        cut_offsets[text + 1] = count
    return cut_begins[:count], cut_ends[:count], cut_offsets
