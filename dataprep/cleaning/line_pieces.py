"""What a line rule leaves of a text: pieces, the edits that leave just them, and what the rules know of characters.

A piece is a row of int64: begin and end in bytes, and 1 where it begins a line (a newline goes before it, unless it is
the first). Pieces of one text ascend and are disjoint; the text that is left is all of them, joined.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa

from gristmill.dataprep.edits import EDIT_TYPE
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.spans import NEWLINE, strip
from gristmill.dataprep.text.unicode_tables import CODE_POINTS, lower_case

UPPER = np.uint8(1)
"""Flag: `str.isupper()`."""
DIGIT = np.uint8(2)
"""Flag: `str.isdigit()`."""
DECIMAL = np.uint8(4)
"""Flag: `str.isdecimal()`; what `\\d` means in a regular expression."""

CLASSED = 0x20000
"""From here on Unicode has ideographs, tags and variants only: none is upper case or a digit."""
ALIKE = {0x130: "i", 0x131: "i", 0x17F: "s", 0x212A: "k"}
"""The code points beyond ASCII that match an ASCII letter in a pattern that ignores case (documentation of `re`)."""


@lru_cache(maxsize=1)
def character_classes() -> np.ndarray:
    """Flags of every code point: uint8 of shape (CODE_POINTS,)."""
    characters = [chr(code) for code in range(CLASSED)]
    classes = np.zeros(CODE_POINTS, np.uint8)
    for flag, predicate in ((UPPER, str.isupper), (DIGIT, str.isdigit), (DECIMAL, str.isdecimal)):
        classes[:CLASSED] |= np.fromiter(map(predicate, characters), bool, CLASSED) * flag
    return classes


@lru_cache(maxsize=1)
def ignored_case() -> np.ndarray:
    """What an ASCII letter of a pattern that ignores case is compared with: uint32 of shape (CODE_POINTS,)."""
    table = lower_case().copy()
    for code, letter in ALIKE.items():
        table[code] = ord(letter)
    return table


BEGIN, END, NEW_LINE = 0, 1, 2
FIRST_CAPACITY = 64


@kernel
def new_rows() -> np.ndarray:
    """Room for rows that `push` adds."""
    return np.empty((FIRST_CAPACITY, 3), np.int64)


@kernel
def push(rows: np.ndarray, count: int, begin: int, end: int, mark: int) -> np.ndarray:
    """Write row number `count`; returns the rows, which may have moved."""
    if count == len(rows):
        more = np.empty((2 * len(rows), 3), np.int64)
        more[:count] = rows
        rows = more
    rows[count, BEGIN], rows[count, END], rows[count, NEW_LINE] = begin, end, mark
    return rows


@kernel
def strip_pieces(data: np.ndarray, pieces: np.ndarray, first: int, last: int, flags: np.ndarray) -> tuple[int, int]:
    """Take whitespace from both ends of a text of pieces, as `str.strip()` does.

    Args:
        data: the bytes that the pieces are ranges of.
        pieces: changed in place.
        first, last: the text is the pieces from `first` up to `last`.

    Returns:
        the same two for what is left.
    """
    while first < last:
        begin, end = strip(data, pieces[first, BEGIN], pieces[first, END], flags)
        if begin < end:
            pieces[first, BEGIN] = begin
            break
        first += 1
    while first < last:
        begin, end = strip(data, pieces[last - 1, BEGIN], pieces[last - 1, END], flags)
        if begin < end:
            pieces[last - 1, END] = end
            break
        last -= 1
    return first, last


@kernel
def push_edits(
    edits: np.ndarray, count: int, data: np.ndarray, begin: int, end: int, pieces: np.ndarray, first: int, last: int
) -> tuple[np.ndarray, int]:
    """Add the edits that leave just these pieces of the text `data[begin:end]`.

    Returns:
        rows of begin and end within the text, and 1 where a newline takes the place; and their number.
    """
    at = begin
    for piece in range(first, last):
        to = pieces[piece, BEGIN]
        newline = 1 if pieces[piece, NEW_LINE] and piece > first else 0
        if newline and to > at and data[to - 1] == NEWLINE:  # the newline that is there stays
            to, newline = to - 1, 0
        if to > at or newline:
            edits = push(edits, count, at - begin, to - begin, newline)
            count += 1
        at = pieces[piece, END]
    if at < end:
        edits = push(edits, count, at - begin, end - begin, 0)
        count += 1
    return edits, count


def rows_array(rows: np.ndarray, offsets: np.ndarray) -> pa.Array:
    """The column of edits from rows of `push_edits`.

    Args:
        rows: int64 of shape (m, 3).
        offsets: int64 of shape (n + 1,); document i has the rows from offsets[i] up to offsets[i + 1].
    """
    texts = pa.array(["", "\n"]).take(pa.array(rows[:, NEW_LINE]))
    values = pa.StructArray.from_arrays(
        [pa.array(rows[:, BEGIN].copy()), pa.array(rows[:, END].copy()), texts], fields=list(EDIT_TYPE)
    )
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
