"""Pieces of a text that line rules keep, the edits that keep only them, and the
character classes of the rules.

A piece is a row of int64: begin and end in bytes, and 1 if it begins a line (a newline
is put before it, unless it is the first). Pieces of a text are ascending and disjoint;
the cleaned text is their concatenation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.edits import (
    Edit,
    derive_edits,
    edits_array,
    edits_column,
)
from gristmill.dataprep.text.kernels import Bytes, Flags, kernel
from gristmill.dataprep.text.spans import NEWLINE, strip
from gristmill.dataprep.text.unicode_tables import (
    SPACE,
    decode,
    flag_code_points,
)

UPPER = np.uint8(1)
"""Flag: `str.isupper()`."""
DIGIT = np.uint8(2)
"""Flag: `str.isdigit()`."""
DECIMAL = np.uint8(4)
"""Flag: `str.isdecimal()`; `\\d` in a regular expression."""


@lru_cache(maxsize=1)
def character_classes() -> Flags:
    """Flags of every code point: uint8 of shape (CODE_POINTS,)."""
    predicates = (
        (UPPER, np.strings.isupper),
        (DIGIT, np.strings.isdigit),
        (DECIMAL, np.strings.isdecimal),
    )
    return flag_code_points(np.uint8, predicates, ())


BEGIN, END, NEW_LINE = 0, 1, 2
FIRST_CAPACITY = 64


@kernel
def new_rows() -> np.ndarray:
    """Uninitialised rows for `push`."""
    return np.empty((FIRST_CAPACITY, 3), np.int64)


@kernel
def push(rows: np.ndarray, count: int, begin: int, end: int, mark: int) -> np.ndarray:
    """Write row `count`; return the rows, which may have been reallocated."""
    if count == len(rows):
        larger = np.empty((2 * len(rows), 3), np.int64)
        larger[:count] = rows
        rows = larger
    rows[count, BEGIN], rows[count, END], rows[count, NEW_LINE] = begin, end, mark
    return rows


@kernel
def strip_pieces(
    data: Bytes, pieces: np.ndarray, first: int, last: int, flags: Flags
) -> tuple[int, int]:
    """Strip whitespace from both ends of a text of pieces, as `str.strip()`.

    Args:
        data: bytes that the pieces are ranges of.
        pieces: changed in place.
        first, last: the text is the pieces from `first` up to `last`.

    Returns:
        `first` and `last` of the stripped text.
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
    edits: np.ndarray,
    count: int,
    data: Bytes,
    begin: int,
    end: int,
    pieces: np.ndarray,
    first: int,
    last: int,
) -> tuple[np.ndarray, int]:
    """Add the edits that reduce the text `data[begin:end]` to these pieces.

    Returns:
        rows of begin and end within the text, and 1 for replacement by a newline; and
        their number.
    """
    position = begin
    for piece in range(first, last):
        next_begin = pieces[piece, BEGIN]
        newline = 1 if pieces[piece, NEW_LINE] and piece > first else 0
        # keep the existing newline
        if newline and next_begin > position and data[next_begin - 1] == NEWLINE:
            next_begin = next_begin - 1
            newline = 0
        if next_begin > position or newline:
            edits = push(edits, count, position - begin, next_begin - begin, newline)
            count += 1
        position = pieces[piece, END]
    if position < end:
        edits = push(edits, count, position - begin, end - begin, 0)
        count += 1
    return edits, count


@kernel
def line_words(data: Bytes, pieces: np.ndarray, flags: Flags, most: int) -> int:
    """Number of words (`str.split()`) of a line of pieces, counted up to `most`."""
    words = 0
    in_word = False
    for piece in range(len(pieces)):
        at = pieces[piece, BEGIN]
        while at < pieces[piece, END] and words < most:
            code, width = decode(data, at)
            is_space = flags[code] & SPACE != 0
            words += not (is_space or in_word)
            in_word = not is_space
            at += width
    return words


def rows_array(rows: np.ndarray, offsets: np.ndarray) -> pa.Array:
    """Column of edits from rows of `push_edits`.

    Args:
        rows: int64 of shape (m, 3).
        offsets: int64 of shape (n + 1,); document i has the rows from offsets[i] up to
            offsets[i + 1].
    """
    texts = pa.array(["", "\n"]).take(rows[:, NEW_LINE])
    begins, ends = pa.array(rows[:, BEGIN].copy()), pa.array(rows[:, END].copy())
    return edits_column(begins, ends, texts, offsets)


def edit_lines(
    texts: pa.Array,
    may_match: str,
    rule: int,
    edit: Callable[[str], str | None],
    counts: np.ndarray,
    sizes: np.ndarray,
) -> pa.Array:
    """Edits by a function of single lines, for lines that are rare; the texts that have
    one are also stripped.

    Args:
        texts: n strings.
        may_match: expression of RE2, ignoring case, for texts that may change.
        rule: its number.
        edit: line -> edited line, or None to remove it.
        counts, sizes: int64 of shape (n, rules), to which numbers of changed lines, and
            of removed bytes, are added.
    """
    candidates = pc.match_substring_regex(texts, may_match, ignore_case=True)
    new_edits: list[Sequence[Edit]] = [()] * len(texts)
    for row in np.flatnonzero(candidates).tolist():
        text = texts[row].as_py()
        kept = []
        for line in text.split("\n"):
            edited = edit(line)
            if edited is not None:
                kept.append(edited)
            if edited != line:
                counts[row, rule] += 1
                sizes[row, rule] += len(line.encode()) - len((edited or "").encode())
        new_edits[row] = [*derive_edits(text, "\n".join(kept).strip())]
    return edits_array(new_edits)
