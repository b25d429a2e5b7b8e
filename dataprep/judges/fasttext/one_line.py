"""Texts as fastText's classifiers see them, in one pass: each one line, with spaces for white space of all kinds."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.judges.fasttext.fasttext_files import END_OF_LINE
from gristmill.dataprep.judges.fasttext.fasttext_predict import find_heads
from gristmill.dataprep.judges.fasttext.fasttext_words import LABEL, Lines
from gristmill.dataprep.text.hashing import equal_bytes
from gristmill.dataprep.text.kernels import inner_kernel, kernel, text_buffers
from gristmill.dataprep.text.unicode_tables import SPACE, code_point_flags, decode, lower_case
from gristmill.dataprep.text.wide_bytes import (
    WIDTH,
    address_of,
    ends_of_marks_in_64,
    trailing_zeros,
    write_64,
    write_64_lower,
)

CAPITAL_SIGMA, CAPITAL_I_WITH_DOT = 0x3A3, 0x130
"""Their lower case depends on the letters around, and is two code points."""


def one_line_each(texts: pa.Array, max_characters: int | None, lower: bool, marks: bool) -> tuple[Lines, np.ndarray]:
    """Make each of n texts one line of the words of `text[:max_characters].lower().split()`, with spaces between.

    Args:
        lower: whether texts are put in lower case.
        marks: whether a text may hold fastText's own marks, a label's prefix or the end of a line; if not, one that
            does is left out.

    Returns:
        the lines; and bool of shape (n,), which texts were left out: those, and the few whose lower case takes other
        bytes than they do. Their lines are empty, and so are those of texts without a word.
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
    lines = np.empty(room + WIDTH, np.uint8)
    starts, stops, left_out = np.empty(n, np.int64), np.empty(n, np.int64), np.zeros(n, np.bool_)
    filled = 0
    for text in range(n):
        start, stop = filled, filled + ends[text] - begins[text]
        left_out[text] = not _make_line(data, begins[text], flags, lowered, marks, lines, start, stop)
        while start < stop and (left_out[text] or lines[start] == 0x20):
            start += 1
        starts[text], stops[text], filled = start, stop, stop
    return lines, starts, stops, left_out


@inner_kernel
def _make_line(
    data: np.ndarray,
    at: int,
    flags: np.ndarray,
    lowered: np.ndarray,
    marks: bool,
    lines: np.ndarray,
    start: int,
    stop: int,
) -> bool:
    """Write a line of as many bytes as its text, which begins at `at`; whether that can be done.

    Up to 63 bytes behind the line are overwritten.
    """
    data_at, lines_at, filled = address_of(data), address_of(lines), start
    while filled < stop:
        if at + WIDTH <= len(data):
            if len(lowered):
                others = write_64_lower(lines_at + filled, data_at + at)
            else:
                others = write_64(lines_at + filled, data_at + at)
            size = min(int(np.int64(trailing_zeros(others))), stop - filled)
            if not marks and _has_mark(lines, start, filled, size):
                return False
            at, filled = at + size, filled + size
        while filled < stop and (at + WIDTH > len(data) or data[np.uint64(at)] >= 0x80):
            code, width = decode(data, at)
            if flags[code] & SPACE:
                for step in range(width):
                    lines[np.uint64(filled + step)] = 0x20
            elif not _write(lines, filled, code, width, lowered):
                return False
            at, filled = at + width, filled + width
            if not marks and (code == 0x3E or code == 0x5F) and _ends_in_mark(lines, start, filled):
                return False
    return True


@inner_kernel
def _has_mark(lines: np.ndarray, start: int, begin: int, size: int) -> bool:
    """Whether a mark of a line ends among up to 64 bytes that begin there."""
    ends = ends_of_marks_in_64(address_of(lines) + begin)
    while ends:
        at = int(np.int64(trailing_zeros(ends)))
        if at >= size:
            break
        if _ends_in_mark(lines, start, begin + at + 1):
            return True
        ends &= ends - np.uint64(1)
    return False


@inner_kernel
def _write(lines: np.ndarray, at: int, code: int, width: int, lowered: np.ndarray) -> bool:
    """Write a code point of so many bytes, in lower case where there is a table of it; whether that takes as many."""
    if len(lowered):
        lower = int(lowered[code])
        if code in (CAPITAL_SIGMA, CAPITAL_I_WITH_DOT) or (lower != code and _width(lower) != width):
            return False
        code = lower
    place = np.uint64(at)
    if width == 1:
        lines[place] = code
        return True
    lines[place] = (0xF00 >> width & 0xFF) | code >> 6 * (width - 1)
    for step in range(1, width):
        lines[place + np.uint64(step)] = 0x80 | code >> 6 * (width - 1 - step) & 0x3F
    return True


@inner_kernel
def _width(code: int) -> int:
    """Bytes that a code point takes."""
    return 1 + (code >= 0x80) + (code >= 0x800) + (code >= 0x10000)


@inner_kernel
def _ends_in_mark(lines: np.ndarray, start: int, end: int) -> bool:
    for mark in (LABEL, END_OF_LINE):
        if end - start >= len(mark) and equal_bytes(lines, end - len(mark), mark, 0, len(mark)):
            return True
    return False
