"""Texts as input of fastText's classifiers, in one pass: one line each, with spaces for
all kinds of whitespace.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.fasttext.fasttext_files import END_OF_LINE
from gristmill.dataprep.fasttext.fasttext_predict import find_heads
from gristmill.dataprep.fasttext.fasttext_words import LABEL, Lines
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
from gristmill.dataprep.text.swar import count_pattern
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
    ends = find_heads(data, offsets, max_characters)
    lowered = lower_case() if lower else np.empty(0, np.uint32)
    return make_lines(data, offsets[:-1], ends, code_point_flags(), lowered, marks)


@kernel
def make_lines(
    data: Bytes,
    begins: Positions,
    ends: Positions,
    flags: Flags,
    lowered: np.ndarray,
    marks: bool,
) -> tuple[Lines, np.ndarray]:
    """Lines, and flags of skipped texts; see `one_line_each`.

    Args:
        flags: `unicode_tables.code_point_flags`.
        lowered: `unicode_tables.lower_case`, or empty.
    """
    n = len(begins)
    stops = np.cumsum(ends - begins)
    starts = stops - (ends - begins)
    lines = np.empty(stops[n - 1] + WIDTH if n else WIDTH, np.uint8)
    skipped = np.zeros(n, np.bool_)
    for text in range(n):
        start, stop = starts[text], stops[text]
        is_line = _make_line(data, begins[text], flags, lowered, lines, start, stop)
        skipped[text] = not is_line or (not marks and _has_mark(lines, start, stop))
        while start < stop and (skipped[text] or lines[start] == 0x20):
            start += 1
        starts[text] = start
    return Lines(lines, starts, stops), skipped


@inner_kernel
def _make_line(
    data: Bytes,
    at: int,
    flags: Flags,
    lowered: np.ndarray,
    lines: np.ndarray,
    start: int,
    stop: int,
) -> bool:
    """Write a line of the same size as its text, which begins at `at`; return False if
    its lower case has another size.

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
    return True


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
def _has_mark(lines: np.ndarray, start: int, stop: int) -> bool:
    """Return True if a line has one of fastText's marks."""
    ends = np.uint64(0)
    for at in range(start, stop, WIDTH):
        ends |= ends_of_marks_in_64(address_of(lines) + at)
    return ends != 0 and (
        count_pattern(lines, start, stop, LABEL)
        + count_pattern(lines, start, stop, END_OF_LINE)
        > 0
    )
