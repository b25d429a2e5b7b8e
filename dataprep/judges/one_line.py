"""Texts as fastText's classifiers see them, in one pass: each one line of words with single spaces between them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.judges.fasttext_files import END_OF_LINE
from gristmill.dataprep.judges.fasttext_predict import find_heads
from gristmill.dataprep.judges.fasttext_words import LABEL, Lines
from gristmill.dataprep.text.hashing import equal_bytes
from gristmill.dataprep.text.kernels import kernel, text_buffers
from gristmill.dataprep.text.unicode_tables import SPACE, code_point_flags, decode, lower_case

CAPITAL_SIGMA, CAPITAL_I_WITH_DOT = 0x3A3, 0x130
"""Their lower case depends on the letters around, and is two code points."""


def one_line_each(
    texts: pa.Array, max_characters: int | None, lower: bool, marks: bool
) -> tuple[Lines, np.ndarray]:
    """Make each of n texts one line: `" ".join(text[:max_characters].lower().split())`.

    Args:
        lower: whether texts are put in lower case.
        marks: whether a text may hold fastText's own marks, a label's prefix or the end of a line; if not, one that
            does is left out.

    Returns:
        the lines; and bool of shape (n,), which texts were left out: those, and the few whose lower case takes other
        bytes than they do. Their lines are empty.
    """
    data, offsets = text_buffers(texts)
    ends = offsets[1:] if max_characters is None else find_heads(data, offsets, max_characters)
    lowered = lower_case() if lower else np.empty(0, np.uint32)
    *lines, left_out = make_lines(data, offsets[:-1], ends, code_point_flags(), lowered, marks)
    return Lines(*lines), left_out


@kernel
def make_lines(
    data: np.ndarray, begins: np.ndarray, ends: np.ndarray, flags: np.ndarray, lowered: np.ndarray, marks: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The bytes of all lines, where each begins and ends in them (int64), and which are left out; as `one_line_each`.

    Args:
        flags: `unicode_tables.code_point_flags`.
        lowered: `unicode_tables.lower_case`, or empty.
    """
    n, room = len(begins), 0
    for text in range(n):
        room += ends[text] - begins[text]
    lines = np.empty(room, np.uint8)
    starts, stops, left_out = np.empty(n, np.int64), np.empty(n, np.int64), np.zeros(n, np.bool_)
    filled = 0
    for text in range(n):
        starts[text] = filled
        stop = _make_line(data, begins[text], ends[text], flags, lowered, marks, lines, filled)
        left_out[text] = stop < 0
        filled = max(filled, stop)
        stops[text] = filled
    return lines, starts, stops, left_out


@kernel
def _make_line(
    data: np.ndarray, at: int, end: int, flags: np.ndarray, lowered: np.ndarray, marks: bool, lines: np.ndarray,
    start: int,
) -> int:
    """Write a line from `start` on; where it ends, or -1 if it is to be left out."""
    filled, apart = np.uint64(start), False
    while at < end:
        code, width = decode(data, at)
        at += width
        if flags[code] & SPACE:
            apart = int(np.int64(filled)) > start
            continue
        if apart:
            lines[filled] = 0x20
            filled += np.uint64(1)
            apart = False
        if len(lowered):
            lower = int(lowered[code])
            if code in (CAPITAL_SIGMA, CAPITAL_I_WITH_DOT) or (lower != code and _width(lower) != width):
                return -1
            code = lower
        _write(lines, filled, code, width)
        filled += np.uint64(width)
        if not marks and (code == 0x3E or code == 0x5F) and _ends_in_mark(lines, start, np.int64(filled)):
            return -1
    return int(np.int64(filled))


@kernel
def _width(code: int) -> int:
    """Bytes that a code point takes."""
    return 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)


@kernel
def _write(lines: np.ndarray, at: np.uint64, code: int, width: int) -> None:
    """Write a code point of so many bytes."""
    if width == 1:
        lines[at] = code
        return
    lines[at] = (0xF00 >> width & 0xFF) | code >> 6 * (width - 1)
    for step in range(1, width):
        lines[at + np.uint64(step)] = 0x80 | code >> 6 * (width - 1 - step) & 0x3F


@kernel
def _ends_in_mark(lines: np.ndarray, start: int, end: int) -> bool:
    for mark in (LABEL, END_OF_LINE):
        if end - start >= len(mark) and equal_bytes(lines, end - len(mark), mark, 0, len(mark)):
            return True
    return False
