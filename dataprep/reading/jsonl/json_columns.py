"""Kernels that read lines of JSON as columns: those that they are certain of, while others are left to Python.

Certain is a line with one object whose keys are there once and without escapes, in which everything is as RFC 8259 has
it, the text and the id are strings that UTF-8 can hold, and what becomes metadata has the form that Python's encoder
writes. A number whose form cannot be told by counting its digits is pointed out, for Python to look at. The lines must
be UTF-8.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.reading.jsonl.json_members import (
    BACKSLASH,
    CLOSE,
    DOUBTFUL,
    ESCAPED,
    ESCAPES,
    INTEGER,
    KEY,
    KEY_END,
    KIND,
    MOST_KEYS,
    NESTED,
    NEWLINE,
    NULL,
    OPEN,
    QUOTE,
    SLACK,
    SMALL_U,
    STRING,
    VALUE,
    VALUE_END,
    ZERO,
    byte_at,
    read_escape,
    read_members,
)
from gristmill.dataprep.text.eight_bytes import equal_to, find_byte, first_of
from gristmill.dataprep.text.hashing import equal_bytes, load64, same_bytes, store64
from gristmill.dataprep.text.kernels import kernel

TEXT, ID, METADATA, SCALAR, OTHER = range(5)
"""Uses of a member: SCALAR is metadata unless it is nested."""
_FIRST, _BETWEEN, _BEHIND_KEY = (np.frombuffer(mark, np.uint8).copy() for mark in (b'{"', b', "', b'": '))
"""What Python's encoder writes around keys."""
_SMALL = np.frombuffer(b"u00", np.uint8).copy()
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8).copy()


@kernel
def read_objects(
    block: np.ndarray,
    number: int,
    text_name: np.ndarray,
    id_name: np.ndarray,
    wanted: np.ndarray,
    bounds: np.ndarray,
    every: bool,
    prefix: np.ndarray,
    texts: np.ndarray,
    locators: np.ndarray,
    metadata: np.ndarray,
    rows: np.ndarray,
    left: np.ndarray,
    doubtful: np.ndarray,
) -> tuple[int, int, int, int]:
    """Read the lines of a block.

    Args:
        block: uint8, lines with their ends, and SLACK newlines.
        number: of the line before the first.
        text_name, id_name: of the fields of the text and the id (uint8); the latter is empty where there is none.
        wanted, bounds: names of the fields that are kept as metadata, one behind the other (uint8), and where each
            begins and the last ends (int64).
        every: keep all scalar values instead.
        prefix: what a locator begins with where there is no id (uint8, and SLACK more); the line's number follows.
        texts, locators, metadata: receive these, one behind the other (uint8).
        rows: receives, of each document, the number, begin and end of its line, and where its text, locator and
            metadata end (int64 of shape (most rows, 6)).
        left: receives number, begin and end of every line that is left to Python (int64 of shape (most lines, 3)).
        doubtful: receives row, begin and end in the metadata of every DOUBTFUL (int64 of shape (most, 3)).

    Returns:
        how many lines, rows, lines that are left and doubtful numbers there are.
    """
    members, order = np.empty((MOST_KEYS, 5), np.int64), np.empty(MOST_KEYS, np.int64)
    known, uses = np.empty((MOST_KEYS, 2), np.int64), np.empty(MOST_KEYS, np.int64)
    ends = np.zeros(3, np.int64)
    first = number
    at = num_rows = num_left = num_doubtful = num_known = 0
    while at < len(block) - SLACK:
        number += 1
        begin = at
        if byte_at(block, at) == NEWLINE:
            at += 1
            continue
        at, count = read_members(block, at, members)
        doubts = -1
        if at >= 0 and not _same_keys(block, members, count, known, num_known):
            num_known = _sort_keys(block, members, count, known, order)
            _find_uses(block, known, num_known, text_name, id_name, wanted, bounds, every, uses)
        if at >= 0 and num_known > 0:
            doubts = _write_row(
                block,
                number,
                members,
                count,
                order,
                uses,
                len(id_name) > 0,
                prefix,
                texts,
                locators,
                metadata,
                ends,
                doubtful,
                num_rows,
                num_doubtful,
            )
        if doubts >= 0:
            rows[num_rows, 0], rows[num_rows, 1], rows[num_rows, 2] = number, begin, at
            rows[num_rows, 3], rows[num_rows, 4], rows[num_rows, 5] = ends[0], ends[1], ends[2]
            num_rows, num_doubtful = num_rows + 1, doubts
        else:
            at = find_byte(block, begin, len(block), NEWLINE)
            left[num_left, 0], left[num_left, 1], left[num_left, 2] = number, begin, at
            num_left += 1
        at += 1
    return number - first, num_rows, num_left, num_doubtful


@kernel
def _same_keys(block: np.ndarray, members: np.ndarray, count: int, known: np.ndarray, num_known: int) -> bool:
    """Whether the keys are those that were sorted last, in the same order."""
    if count != num_known:
        return False
    for place in range(count):
        begin, before = members[place, KEY], known[place, 0]
        size = members[place, KEY_END] - begin
        if size != known[place, 1] - before or not same_bytes(block, begin, before, size):
            return False
    return True


@kernel
def _sort_keys(block: np.ndarray, members: np.ndarray, count: int, known: np.ndarray, order: np.ndarray) -> int:
    """Sort the keys by their bytes, which is by their code points; returns how many they are, 0 where one repeats."""
    for place in range(count):
        known[place, 0], known[place, 1] = members[place, KEY], members[place, KEY_END]
        to = place
        while to > 0:
            compared = _compare(block, known, place, order[to - 1])
            if compared == 0:
                return 0
            if compared > 0:
                break
            order[to] = order[to - 1]
            to -= 1
        order[to] = place
    return count


@kernel
def _compare(block: np.ndarray, known: np.ndarray, one: int, other: int) -> int:
    """Below, equal to or above 0, as one key is to the other."""
    first, second = known[one, 0], known[other, 0]
    size, other_size = known[one, 1] - first, known[other, 1] - second
    for step in range(min(size, other_size)):
        difference = byte_at(block, first + step) - byte_at(block, second + step)
        if difference != 0:
            return difference
    return int(size - other_size)


@kernel
def _find_uses(
    block: np.ndarray,
    known: np.ndarray,
    count: int,
    text_name: np.ndarray,
    id_name: np.ndarray,
    wanted: np.ndarray,
    bounds: np.ndarray,
    every: bool,
    uses: np.ndarray,
) -> None:
    for place in range(count):
        if _is_called(block, known, place, text_name, 0, len(text_name)):
            uses[place] = TEXT
        elif len(id_name) > 0 and _is_called(block, known, place, id_name, 0, len(id_name)):
            uses[place] = ID
        else:
            uses[place] = SCALAR if every else OTHER
            for name in range(len(bounds) - 1):
                if _is_called(block, known, place, wanted, bounds[name], bounds[name + 1]):
                    uses[place] = METADATA


@kernel
def _is_called(block: np.ndarray, known: np.ndarray, place: int, names: np.ndarray, begin: int, end: int) -> bool:
    size = known[place, 1] - known[place, 0]
    return bool(size == end - begin and equal_bytes(names, begin, block, known[place, 0], size))


@kernel
def _write_row(
    block: np.ndarray,
    number: int,
    members: np.ndarray,
    count: int,
    order: np.ndarray,
    uses: np.ndarray,
    has_id: bool,
    prefix: np.ndarray,
    texts: np.ndarray,
    locators: np.ndarray,
    metadata: np.ndarray,
    ends: np.ndarray,
    doubtful: np.ndarray,
    row: int,
    doubts: int,
) -> int:
    """Write a document, and move `ends` behind it; returns the number of doubtful numbers, -1 where it cannot be."""
    text_end = locator_end = -1
    end = first = ends[2]
    for step in range(count):
        place = order[step]
        kind, use = members[place, KIND], uses[place]
        is_string = kind in (STRING, ESCAPED)
        if use in (TEXT, ID):
            filled = members[place, VALUE] < members[place, VALUE_END]
            if not filled or not (is_string or (kind == INTEGER and use == ID)):
                return -1
            if use == TEXT:
                text_end = _copy_string(block, members, place, texts, ends[0], False)
            else:
                locator_end = _copy_string(block, members, place, locators, ends[1], False)
        elif kind == NESTED and use == METADATA:
            return -1
        elif kind != NULL and kind != NESTED and use != OTHER:
            end = _put(metadata, end, _BETWEEN) if end > first else _put(metadata, end, _FIRST)
            end = _copy(block, members[place, KEY], members[place, KEY_END], metadata, end)
            end = _put(metadata, end, _BEHIND_KEY)
            begin = end
            if is_string:
                metadata[np.uint64(end)] = QUOTE
                end = _copy_string(block, members, place, metadata, end + 1, True)
                if end < 0:
                    return -1
                metadata[np.uint64(end)] = QUOTE
                end += 1
            else:
                end = _copy(block, members[place, VALUE], members[place, VALUE_END], metadata, end)
            if kind == DOUBTFUL:
                doubtful[doubts, 0], doubtful[doubts, 1], doubtful[doubts, 2] = row, begin, end
                doubts += 1
    if not has_id:
        locator_end = _write_number(number, locators, _copy(prefix, 0, len(prefix) - SLACK, locators, ends[1]))
    if text_end < 0 or locator_end < 0:
        return -1
    if end == first:
        metadata[np.uint64(end)] = OPEN
        end += 1
    metadata[np.uint64(end)] = CLOSE
    ends[0], ends[1], ends[2] = text_end, locator_end, end + 1
    return doubts


@kernel
def _put(out: np.ndarray, to: int, mark: np.ndarray) -> int:
    for byte in mark:
        out[np.uint64(to)] = byte
        to += 1
    return to


@kernel
def _copy(data: np.ndarray, begin: int, end: int, out: np.ndarray, to: int) -> int:
    """Copy a range, eight bytes at once, and return where it ends."""
    size = end - begin
    for step in range(0, size, 8):
        store64(out, to + step, load64(data, begin + step))
    return int(to + size)


@kernel
def _write_number(number: int, out: np.ndarray, to: int) -> int:
    end = to + 1
    rest = number // 10
    while rest > 0:
        end, rest = end + 1, rest // 10
    for place in range(end - 1, to - 1, -1):
        out[np.uint64(place)] = ZERO + number % 10
        number //= 10
    return end


@kernel
def _copy_string(block: np.ndarray, members: np.ndarray, place: int, out: np.ndarray, to: int, quoted: bool) -> int:
    """Copy a value, its escapes replaced by what they stand for; -1 where that is half of a pair of surrogates.

    Args:
        quoted: write those escapes that Python's encoder writes, and no others.
    """
    at, end = members[place, VALUE], members[place, VALUE_END]
    if members[place, KIND] != ESCAPED:
        return _copy(block, at, end, out, to)
    while True:
        eight = load64(block, at)
        store64(out, to, eight)
        found = equal_to(eight, BACKSLASH)
        step = 8 if found == 0 else int(np.int64(first_of(found)))
        if at + step >= end:
            return int(to + end - at)
        at, to = at + step, to + step
        if found == 0:
            continue
        code, at = read_escape(block, at + 1)
        if 0xD800 <= code < 0xDC00 and byte_at(block, at) == BACKSLASH and byte_at(block, at + 1) == SMALL_U:
            low, at = read_escape(block, at + 1)
            code = 0x10000 + (code - 0xD800 << 10) + low - 0xDC00 if 0xDC00 <= low < 0xE000 else code
        if 0xD800 <= code < 0xE000:
            return -1
        to = _write_escaped(out, to, code) if quoted else _write_code(out, to, code)


@kernel
def _write_escaped(out: np.ndarray, to: int, code: int) -> int:
    """Write a code point inside of a string as Python's encoder does."""
    if code >= 0x20 and code != QUOTE and code != BACKSLASH:
        return _write_code(out, to, code)
    out[np.uint64(to)] = BACKSLASH
    for place in range(len(ESCAPES)):
        if code == ESCAPES[place, 1]:
            out[np.uint64(to + 1)] = ESCAPES[place, 0]
            return to + 2
    to = _put(out, to + 1, _SMALL)
    out[np.uint64(to)], out[np.uint64(to + 1)] = ZERO + (code >> 4), _HEX[code & 15]
    return to + 2


@kernel
def _write_code(out: np.ndarray, to: int, code: int) -> int:
    """Write a code point as UTF-8 (RFC 3629, section 3)."""
    place = np.uint64(to)
    if code < 0x80:
        out[place] = code
        return to + 1
    if code < 0x800:
        out[place] = 0xC0 | code >> 6
        width = 2
    elif code < 0x10000:
        out[place] = 0xE0 | code >> 12
        width = 3
    else:
        out[place] = 0xF0 | code >> 18
        width = 4
    for step in range(1, width):
        out[place + np.uint64(step)] = 0x80 | code >> 6 * (width - 1 - step) & 0x3F
    return to + width
