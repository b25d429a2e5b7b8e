"""Excision of matched spans: the margin that is cut with them, and the remaining words.
Numba kernels over UTF-8.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.text.kernels import (
    Bytes,
    Flags,
    Offsets,
    Positions,
    kernel,
    text_buffers,
)
from gristmill.dataprep.text.spans import NEWLINE, word_spans
from gristmill.dataprep.text.unicode_tables import SPACE, code_point_flags, decode


def widen(
    texts: pa.Array, text: np.ndarray, begins: np.ndarray, ends: np.ndarray, margin: int
) -> tuple[Positions, Positions, Offsets]:
    """Widen spans by up to `margin` code points on either side, and join spans that
    touch.

    A side is widened to the outermost line break within the margin, otherwise to the
    outermost white space, otherwise not at all. The beginning and the end of the text
    count as line breaks.

    Args:
        text: int64, ascending, position of each span's text. begins, ends: int64, bytes
            of it.

    Returns:
        begins, ends, offsets: as `edits.cuts_array` takes them.
    """
    flags = code_point_flags()
    wide_begins, wide_ends = _widen(
        *text_buffers(texts), flags, text, begins, ends, margin
    )
    order = np.lexsort((wide_begins, text))
    return _join(text[order], wide_begins[order], wide_ends[order], len(texts))


def words_left(
    texts: pa.Array, begins: np.ndarray, ends: np.ndarray, offsets: Offsets
) -> np.ndarray:
    """Number of words of each text outside its cuts: int64 of shape (n,)."""
    return _words_left(*text_buffers(texts), code_point_flags(), begins, ends, offsets)


@kernel
def _widen(
    data: Bytes,
    offsets: Offsets,
    flags: Flags,
    text: np.ndarray,
    begins: Positions,
    ends: Positions,
    margin: int,
) -> tuple[Positions, Positions]:
    wide_begins = begins.copy()
    wide_ends = ends.copy()
    for span in range(len(text)):
        first = offsets[text[span]]
        last = offsets[text[span] + 1]
        position = first + begins[span]
        line = -1
        space = -1
        steps = 0
        while position > first and steps < margin:
            position -= 1
            while data[position] & 0xC0 == 0x80:
                position -= 1
            code, width = decode(data, position)
            if data[position] == NEWLINE:
                line = position + 1
            if flags[code] & SPACE != 0:
                space = position + width
            steps += 1
        if position == first:
            line = first
        border = line if line >= 0 else space
        if border >= 0:
            wide_begins[span] = border - first
        position = first + ends[span]
        line = -1
        space = -1
        steps = 0
        while position < last and steps < margin:
            code, width = decode(data, position)
            if data[position] == NEWLINE:
                line = position
            if flags[code] & SPACE != 0:
                space = position
            position += width
            steps += 1
        if position == last:
            line = last
        border = line if line >= 0 else space
        if border >= 0:
            wide_ends[span] = border - first
    return wide_begins, wide_ends


@kernel
def _join(
    text: np.ndarray, begins: np.ndarray, ends: np.ndarray, texts: int
) -> tuple[Positions, Positions, Offsets]:
    joined_begins = np.empty(len(text), np.int64)
    joined_ends = np.empty(len(text), np.int64)
    offsets = np.zeros(texts + 1, np.int64)
    count = 0
    for span in range(len(text)):
        if (
            span > 0
            and text[span] == text[span - 1]
            and begins[span] <= joined_ends[count - 1]
        ):
            joined_ends[count - 1] = max(joined_ends[count - 1], ends[span])
            continue
        joined_begins[count], joined_ends[count] = begins[span], ends[span]
        offsets[text[span] + 1] += 1
        count += 1
    return joined_begins[:count], joined_ends[:count], np.cumsum(offsets)


@kernel
def _words_left(
    data: Bytes,
    text_offsets: np.ndarray,
    flags: Flags,
    begins: Positions,
    ends: Positions,
    offsets: Offsets,
) -> np.ndarray:
    counts = np.zeros(len(text_offsets) - 1, np.int64)
    for text in range(len(counts)):
        starts, _ = word_spans(data, text_offsets[text], text_offsets[text + 1], flags)
        cut = offsets[text]
        for start in starts:
            position = start - text_offsets[text]
            while cut < offsets[text + 1] and ends[cut] <= position:
                cut += 1
            counts[text] += cut == offsets[text + 1] or position < begins[cut]
    return counts
