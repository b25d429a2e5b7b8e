"""Lines and paragraphs as Python's `str.split`, `re.split` and `str.splitlines` cut them, and marks at their ends.

Numba kernels over UTF-8 bytes; a segment is a range of bytes. All take time linear in the bytes. `spans.find_segments`
finds stripped segments in one go.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.eight_bytes import controls_of, count_byte, equal_to, find_byte, first_of, number_of
from gristmill.dataprep.text.hashing import load64
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.spans import NEWLINE, count_code_points, strip
from gristmill.dataprep.text.unicode_tables import decode

EACH_NEWLINE, NEWLINE_RUNS, EACH_TWO_NEWLINES, TWO_NEWLINE_RUNS = 1, 2, 3, 4
"""What separates segments: `\\n`, `\\n+`, `\\n\\n` (from the left, not overlapping), `\\n\\n+`."""


@kernel
def split_segments(data: np.ndarray, begin: int, end: int, separator: int) -> tuple[np.ndarray, np.ndarray]:
    """Split a text at newlines (U+000A only), as `str.split` and `re.split` do: one segment more than separators.

    Args:
        separator: EACH_NEWLINE, NEWLINE_RUNS, EACH_TWO_NEWLINES or TWO_NEWLINE_RUNS.

    Returns:
        starts, ends: int64 byte positions; empty segments are among them.
    """
    newlines = count_byte(data, begin, end, NEWLINE)
    starts, ends = np.empty(newlines + 1, np.int64), np.empty(newlines + 1, np.int64)
    least = 2 if separator >= EACH_TWO_NEWLINES else 1
    whole_run = separator in (NEWLINE_RUNS, TWO_NEWLINE_RUNS)
    count, at = 0, begin
    starts[0] = begin
    while newlines > 0:
        at = find_byte(data, at, end, NEWLINE)
        stop = at + 1
        while stop < end and data[stop] == NEWLINE and (whole_run or stop - at < least):
            stop += 1
        newlines -= stop - at
        if stop - at >= least:
            ends[count], starts[count + 1] = at, stop
            count += 1
        at = stop
    ends[count] = end
    return starts[: count + 1], ends[: count + 1]


@kernel
def split_lines(data: np.ndarray, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Split a text into lines as `str.splitlines()` does: at any line boundary of Unicode, without an empty last line.

    Returns:
        starts, ends: int64 byte positions; empty lines are among them.
    """
    most = _most_boundaries(data, begin, end) + 1
    starts, ends = np.empty(most, np.int64), np.empty(most, np.int64)
    count, start = 0, begin
    while start < end:
        at = _next_boundary(data, start, end)
        starts[count], ends[count] = start, at
        count += 1
        start = at + _boundary_bytes(data, at, end)
    return starts[:count], ends[:count]


@kernel
def _most_boundaries(data: np.ndarray, begin: int, end: int) -> int:
    """At least as many as there are line boundaries."""
    at, stop, count = np.uint64(begin), np.uint64(end), np.uint64(0)
    while at + np.uint64(8) <= stop:
        count += number_of(_likely_boundaries(load64(data, at)))
        at += np.uint64(8)
    return int(np.int64(count + stop - at))


@kernel
def _likely_boundaries(eight: np.uint64) -> np.uint64:
    """The high bits of those bytes that may begin a line boundary: controls, and what U+0085 and U+2028 begin with."""
    return controls_of(eight) | equal_to(eight, 0xC2) | equal_to(eight, 0xE2)


@kernel
def _next_boundary(data: np.ndarray, at: int, end: int) -> int:
    """Where the next line boundary begins; `end` without one."""
    while at + 8 <= end:
        likely = _likely_boundaries(load64(data, at))
        if likely == 0:
            at += 8
            continue
        at += int(np.int64(first_of(likely)))
        if _is_boundary(data, at, end):
            return at
        at += 1
    while at < end and not _is_boundary(data, at, end):
        at += 1
    return at


@kernel
def _is_boundary(data: np.ndarray, at: int, end: int) -> bool:
    byte = data[np.uint64(at)]
    if byte < 0x20:
        return byte >= 0x0A and (byte <= 0x0D or 0x1C <= byte <= 0x1E)
    return byte >= 0xC2 and _boundary_bytes(data, at, end) > 0


@kernel
def _boundary_bytes(data: np.ndarray, at: int, end: int) -> int:
    """Bytes of the line boundary that begins here: LF, VT, FF, CR, CR LF, FS, GS, RS, U+0085, U+2028, U+2029; or 0."""
    if at == end:
        return 0
    byte = data[at]
    if byte == 0x0D:
        return 2 if at + 1 < end and data[at + 1] == NEWLINE else 1
    if byte < 0x20:
        return 1
    if byte == 0xC2:
        return 2 if data[at + 1] == 0x85 else 0
    if byte == 0xE2 and data[at + 1] == 0x80:
        return 3 if data[at + 2] == 0xA8 or data[at + 2] == 0xA9 else 0
    return 0


@kernel
def strip_segments(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, flags: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Strip every segment of whitespace at both ends, as `str.strip()` has it; those with nothing left go."""
    kept_starts, kept_ends = np.empty_like(starts), np.empty_like(ends)
    count = 0
    for segment in range(len(starts)):
        first, last = strip(data, starts[segment], ends[segment], flags)
        if first < last:
            kept_starts[count], kept_ends[count] = first, last
            count += 1
    return kept_starts[:count], kept_ends[:count]


@kernel
def drop_blank(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, flags: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The segments that have anything but whitespace, as they are."""
    kept_starts, kept_ends = np.empty_like(starts), np.empty_like(ends)
    count = 0
    for segment in range(len(starts)):
        first, last = strip(data, starts[segment], ends[segment], flags)
        if first < last:
            kept_starts[count], kept_ends[count] = starts[segment], ends[segment]
            count += 1
    return kept_starts[:count], kept_ends[:count]


@kernel
def segment_chars(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Code points of every segment (int64)."""
    chars = np.empty(len(starts), np.int64)
    for segment in range(len(starts)):
        chars[segment] = count_code_points(data, starts[segment], ends[segment])
    return chars


@kernel
def starts_with(data: np.ndarray, begin: int, end: int, marks: np.ndarray) -> bool:
    """Whether a range begins with one of some code points.

    Args:
        marks: uint32 code points.
    """
    if begin >= end:
        return False
    code, _ = decode(data, begin)
    found = False
    for mark in marks:
        found |= code == mark
    return found


@kernel
def ends_with(data: np.ndarray, begin: int, end: int, suffix: np.ndarray) -> bool:
    """Whether a range ends with these bytes (uint8), at least one."""
    if end - begin < len(suffix):
        return False
    same = True
    for step in range(1, len(suffix) + 1):
        same &= data[end - step] == suffix[len(suffix) - step]
    return same
