"""Texts as input of fastText's classifiers, in one pass: one line each, with spaces for
all kinds of whitespace.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.fasttext.fasttext_files import END_OF_LINE
from gristmill.dataprep.fasttext.fasttext_predict import find_heads
from gristmill.dataprep.fasttext.fasttext_words import LABEL, Lines
from gristmill.dataprep.text.hashing import equal_bytes
from gristmill.dataprep.text.kernels import (
    Bytes,
    Flags,
    Positions,
    inner_kernel,
    kernel,
    text_buffers,
)
from gristmill.dataprep.text.simd import (
    WIDTH,
    address_of,
    ends_of_marks_in_64,
    trailing_zeros,
    write_64,
    write_64_lower,
)
from gristmill.dataprep.text.unicode_tables import (
    SPACE,
    code_point_flags,
    decode,
    lower_case,
)

CAPITAL_SIGMA, CAPITAL_I_WITH_DOT = 0x3A3, 0x130
"""Code points whose lower case depends on context, or is two code points."""


def one_line_each(
    texts: pa.Array, max_characters: int | None, lower: bool, marks: bool
) -> tuple[Lines, np.ndarray]:
    """Make each of n texts one line of the words of
    `text[:max_characters].lower().split()`, separated by spaces.

    Args:
        lower: convert texts to lower case.
        marks: allow fastText's own marks in texts, a label's prefix or the end of a
            line; otherwise such texts are skipped.

    Returns:
        the lines; and bool of shape (n,), True for skipped texts: those with marks, and
        the few whose lower case takes another number of bytes. Their lines are empty,
        as are those of texts without words.
    """
    data, offsets = text_buffers(texts)
    ends = (
        offsets[1:]
        if max_characters is None
        else find_heads(data, offsets, max_characters)
    )
    lowered = lower_case() if lower else np.empty(0, np.uint32)
    *lines, skipped = make_lines(
        data, offsets[:-1], ends, code_point_flags(), lowered, marks
    )
    return Lines(*lines), skipped


@kernel
def make_lines(
    data: Bytes,
    begins: Positions,
    ends: Positions,
    flags: Flags,
    lowered: np.ndarray,
    marks: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of all lines, offsets of each line's begin and end (int64), and flags of
    skipped texts; see `one_line_each`.

    Args:
        flags: `unicode_tables.code_point_flags`.
        lowered: `unicode_tables.lower_case`, or empty.
    """
    n = len(begins)
    capacity = 0
    for text in range(n):
        capacity += ends[text] - begins[text]
    lines = np.empty(capacity + WIDTH, np.uint8)
    starts = np.empty(n, np.int64)
    stops = np.empty(n, np.int64)
    skipped = np.zeros(n, np.bool_)
    filled = 0
    for text in range(n):
        start = filled
        stop = filled + ends[text] - begins[text]
        skipped[text] = not _make_line(
            data, begins[text], flags, lowered, marks, lines, start, stop
        )
        while start < stop and (skipped[text] or lines[start] == 0x20):
            start += 1
        starts[text], stops[text], filled = start, stop, stop
    return lines, starts, stops, skipped


@inner_kernel
def _make_line(
    data: Bytes,
    at: int,
    flags: Flags,
    lowered: np.ndarray,
    marks: bool,
    lines: np.ndarray,
    start: int,
    stop: int,
) -> bool:
    """Write a line of the same size as its text, which begins at `at`; return False if
    the text must be skipped.

    Up to 63 bytes after the line are overwritten.
    """
    data_at = address_of(data)
    lines_at = address_of(lines)
    filled = start
    while filled < stop:
        if at + WIDTH <= len(data):
            if len(lowered):
                non_ascii_bits = write_64_lower(lines_at + filled, data_at + at)
            else:
                non_ascii_bits = write_64(lines_at + filled, data_at + at)
            size = min(int(np.int64(trailing_zeros(non_ascii_bits))), stop - filled)
            if not marks and _has_mark(lines, start, filled, size):
                return False
            at = at + size
            filled = filled + size
        while filled < stop and (at + WIDTH > len(data) or data[np.uint64(at)] >= 0x80):
            code, width = decode(data, at)
            if flags[code] & SPACE:
                for step in range(width):
                    lines[np.uint64(filled + step)] = 0x20
            elif not _write(lines, filled, code, width, lowered):
                return False
            at = at + width
            filled = filled + width
            if (
                not marks
                and (code == 0x3E or code == 0x5F)
                and _ends_in_mark(lines, start, filled)
            ):
                return False
    return True


@inner_kernel
def _has_mark(lines: np.ndarray, start: int, begin: int, size: int) -> bool:
    """Return True if a mark ends within the `size` bytes from `begin`, at most 64."""
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
def _write(
    lines: np.ndarray, at: int, code: int, width: int, lowered: np.ndarray
) -> bool:
    """Write a code point of `width` bytes, lower-cased if there is a table; return
    False if its width would change.
    """
    if len(lowered):
        lower = int(lowered[code])
        lower_width = 1 + (lower >= 0x80) + (lower >= 0x800) + (lower >= 0x10000)
        if code in (CAPITAL_SIGMA, CAPITAL_I_WITH_DOT) or (
            lower != code and lower_width != width
        ):
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
def _ends_in_mark(lines: np.ndarray, start: int, end: int) -> bool:
    for mark in (LABEL, END_OF_LINE):
        if end - start >= len(mark) and equal_bytes(
            lines, end - len(mark), mark, 0, len(mark)
        ):
            return True
    return False
