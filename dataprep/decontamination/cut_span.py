"""Excision of matched spans: the margin that is cut with them, and the remaining
words.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.dedup.ngram_windows import farthest_end, words_around
from gristmill.dataprep.edits import join_spans
from gristmill.dataprep.text.kernels import (
    Bytes,
    Flags,
    Offsets,
    Positions,
    kernel,
    text_buffers,
)
from gristmill.dataprep.text.spans import NEWLINE
from gristmill.dataprep.text.unicode_tables import (
    SPACE,
    code_point_flags,
    decode,
    decode_before,
)


def widen(
    texts: pa.Array, text: np.ndarray, begins: np.ndarray, ends: np.ndarray, margin: int
) -> tuple[Positions, Positions, Offsets]:
    """Widen spans by up to `margin` code points on either side, and join spans that
    touch.

    A side is widened to the outermost line break within the margin, otherwise to the
    outermost white space, otherwise not at all. The beginning and the end of the text
    count as line breaks.

    Args:
        text: int64, position of each span's text. begins, ends: int64, bytes of it.

    Returns:
        begins, ends, offsets: as `edits.cuts_array` takes them.
    """
    buffers = text_buffers(texts)
    wide_begins, wide_ends = _widen(
        *buffers, code_point_flags(), text, begins, ends, margin
    )
    return join_spans(text, wide_begins, wide_ends, len(texts))


def words_left(
    texts: pa.Array, begins: np.ndarray, ends: np.ndarray, offsets: Offsets
) -> np.ndarray:
    """Number of words of each cut text outside its cuts: int64 of shape (n,); 0 for a
    text without cuts.
    """
    text = np.repeat(np.arange(len(texts)), np.diff(offsets))
    cut_texts, words, base, word_base = words_around(texts, text)
    positions = words.begins + word_base
    is_left = farthest_end(begins + base, ends + base, positions) <= positions
    return np.bincount(cut_texts[words.text[is_left]], minlength=len(texts))


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
    wide_begins, wide_ends = np.empty_like(begins), np.empty_like(ends)
    for span in range(len(text)):
        first, last = offsets[text[span]], offsets[text[span] + 1]
        begin, end = first + begins[span], first + ends[span]
        wide_begins[span] = _border(data, begin, first, flags, margin) - first
        wide_ends[span] = _border(data, end, last, flags, margin) - first
    return wide_begins, wide_ends


@kernel
def _border(data: Bytes, start: int, stop: int, flags: Flags, margin: int) -> int:
    """Border of a span that is widened from `start` towards `stop`."""
    position, line, space = start, -1, -1
    for _ in range(margin):
        if position == stop:
            break
        border = position
        if start < stop:
            code, width = decode(data, position)
            position += width
        else:
            code, position = decode_before(data, position)
        if code == NEWLINE:
            line = border
        if flags[code] & SPACE != 0:
            space = border
    if position == stop:
        return stop
    if line >= 0:
        return line
    return space if space >= 0 else start
