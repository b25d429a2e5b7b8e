"""Kernels that read JSON lines as columns, if they can interpret every byte; other lines are left to Python.

A supported line has one object with distinct keys without escapes and valid by RFC 8259; its text and id are strings
that UTF-8 can hold, and its metadata is in the form that Python's encoder writes. Numbers whose form cannot be decided
by counting digits are reported for Python to check. The lines must be UTF-8.
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
from gristmill.dataprep.text.hashing import equal_bytes, load64, same_bytes, store64
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.swar import equal_to, find_byte, first_of

TEXT, ID, METADATA, SCALAR, OTHER = range(5)
"""Uses of a member: SCALAR is metadata unless it is nested."""
_FIRST, _BETWEEN, _BEHIND_KEY = (np.frombuffer(mark, np.uint8).copy() for mark in (b'{"', b', "', b'": '))
"""Bytes that Python's encoder writes around keys."""
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
        text_name, id_name: fields of the text and the id (uint8); `id_name` is empty if there is none.
        wanted, bounds: concatenated names of the metadata fields to keep (uint8), and their bounds (int64).
        every: keep all scalar values instead.
        prefix: prefix of locators without an id (uint8, and SLACK more); the line's number follows.
        texts, locators, metadata: output buffers, concatenated values (uint8).
        rows: output: per document the number, begin and end of its line, and the ends of its text, locator and
            metadata (int64 of shape (max rows, 6)).
        left: output: number, begin and end of every line left to Python (int64 of shape (max lines, 3)).
        doubtful: output: row, and begin and end in the metadata, of every DOUBTFUL (int64 of shape (max, 3)).

    Returns:
        numbers of lines, rows, lines left to Python and doubtful numbers.
    """
    members, order = np.empty((MOST_KEYS, 5), np.int64), np.empty(MOST_KEYS, np.int64)
    key_bounds, uses = np.empty((MOST_KEYS, 2), np.int64), np.empty(MOST_KEYS, np.int64)
    ends = np.zeros(3, np.int64)
    first = number
    pos = num_rows = num_left = num_doubtful = num_keys = 0
    while pos < len(block) - SLACK:
        number += 1
        begin = pos
        if byte_at(block, pos) == NEWLINE:
            pos += 1
            continue
        pos, count = read_members(block, pos, members)
        doubts = -1
        if pos >= 0 and not _same_keys(block, members, count, key_bounds, num_keys):
            num_keys = _sort_keys(block, members, count, key_bounds, order)
            _find_uses(block, key_bounds, num_keys, text_name, id_name, wanted, bounds, every, uses)
        if pos >= 0 and num_keys > 0:
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
            rows[num_rows, 0], rows[num_rows, 1], rows[num_rows, 2] = number, begin, pos
            rows[num_rows, 3], rows[num_rows, 4], rows[num_rows, 5] = ends[0], ends[1], ends[2]
            num_rows, num_doubtful = num_rows + 1, doubts
        else:
            pos = find_byte(block, begin, len(block), NEWLINE)
            left[num_left, 0], left[num_left, 1], left[num_left, 2] = number, begin, pos
            num_left += 1
        pos += 1
    return number - first, num_rows, num_left, num_doubtful


@kernel
def _same_keys(block: np.ndarray, members: np.ndarray, count: int, key_bounds: np.ndarray, num_keys: int) -> bool:
    """True if the keys are those sorted last, in the same order."""
    if count != num_keys:
        return False
    for place in range(count):
        begin, before = members[place, KEY], key_bounds[place, 0]
        size = members[place, KEY_END] - begin
        if size != key_bounds[place, 1] - before or not same_bytes(block, begin, before, size):
            return False
    return True


@kernel
def _sort_keys(block: np.ndarray, members: np.ndarray, count: int, key_bounds: np.ndarray, order: np.ndarray) -> int:
    """Sort the keys by their bytes, which is by code points; returns their number, 0 if one repeats."""
    for place in range(count):
        key_bounds[place, 0], key_bounds[place, 1] = members[place, KEY], members[place, KEY_END]
        slot = place
        while slot > 0:
            comparison = _compare(block, key_bounds, place, order[slot - 1])
            if comparison == 0:
                return 0
            if comparison > 0:
                break
            order[slot] = order[slot - 1]
            slot -= 1
        order[slot] = place
    return count


@kernel
def _compare(block: np.ndarray, key_bounds: np.ndarray, first_key: int, second_key: int) -> int:
    """Compare two keys: negative, zero or positive."""
    first, second = key_bounds[first_key, 0], key_bounds[second_key, 0]
    size, second_size = key_bounds[first_key, 1] - first, key_bounds[second_key, 1] - second
    for step in range(min(size, second_size)):
        difference = byte_at(block, first + step) - byte_at(block, second + step)
        if difference != 0:
            return difference
    return int(size - second_size)


@kernel
def _find_uses(
    block: np.ndarray,
    key_bounds: np.ndarray,
    count: int,
    text_name: np.ndarray,
    id_name: np.ndarray,
    metadata_names: np.ndarray,
    bounds: np.ndarray,
    every: bool,
    uses: np.ndarray,
) -> None:
    for place in range(count):
        if _has_name(block, key_bounds, place, text_name, 0, len(text_name)):
            uses[place] = TEXT
        elif len(id_name) > 0 and _has_name(block, key_bounds, place, id_name, 0, len(id_name)):
            uses[place] = ID
        else:
            uses[place] = SCALAR if every else OTHER
            for name in range(len(bounds) - 1):
                if _has_name(block, key_bounds, place, metadata_names, bounds[name], bounds[name + 1]):
                    uses[place] = METADATA


@kernel
def _has_name(block: np.ndarray, key_bounds: np.ndarray, place: int, names: np.ndarray, begin: int, end: int) -> bool:
    size = key_bounds[place, 1] - key_bounds[place, 0]
    return bool(size == end - begin and equal_bytes(names, begin, block, key_bounds[place, 0], size))


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
    """Write a document, and advance `ends`; returns the number of doubtful numbers, -1 if unsupported."""
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
def _put(out: np.ndarray, out_pos: int, mark: np.ndarray) -> int:
    for byte in mark:
        out[np.uint64(out_pos)] = byte
        out_pos += 1
    return out_pos


@kernel
def _copy(data: np.ndarray, begin: int, end: int, out: np.ndarray, out_pos: int) -> int:
    """Copy a range, eight bytes at once, and return its end."""
    size = end - begin
    for step in range(0, size, 8):
        store64(out, out_pos + step, load64(data, begin + step))
    return int(out_pos + size)


@kernel
def _write_number(number: int, out: np.ndarray, out_pos: int) -> int:
    end = out_pos + 1
    quotient = number // 10
    while quotient > 0:
        end, quotient = end + 1, quotient // 10
    for place in range(end - 1, out_pos - 1, -1):
        out[np.uint64(place)] = ZERO + number % 10
        number //= 10
    return end


@kernel
def _copy_string(
    block: np.ndarray, members: np.ndarray, place: int, out: np.ndarray, out_pos: int, quoted: bool
) -> int:
    """Copy a value with its escapes decoded; -1 for a lone surrogate.

    Args:
        quoted: write exactly the escapes of Python's encoder.
    """
    pos, end = members[place, VALUE], members[place, VALUE_END]
    if members[place, KIND] != ESCAPED:
        return _copy(block, pos, end, out, out_pos)
    while True:
        eight = load64(block, pos)
        store64(out, out_pos, eight)
        backslashes = equal_to(eight, BACKSLASH)
        step = 8 if backslashes == 0 else int(np.int64(first_of(backslashes)))
        if pos + step >= end:
            return int(out_pos + end - pos)
        pos, out_pos = pos + step, out_pos + step
        if backslashes == 0:
            continue
        code, pos = read_escape(block, pos + 1)
        if 0xD800 <= code < 0xDC00 and byte_at(block, pos) == BACKSLASH and byte_at(block, pos + 1) == SMALL_U:
            low, pos = read_escape(block, pos + 1)
            code = 0x10000 + (code - 0xD800 << 10) + low - 0xDC00 if 0xDC00 <= low < 0xE000 else code
        if 0xD800 <= code < 0xE000:
            return -1
        out_pos = _write_escaped(out, out_pos, code) if quoted else _write_code(out, out_pos, code)


@kernel
def _write_escaped(out: np.ndarray, out_pos: int, code: int) -> int:
    """Write a code point in a string like Python's encoder."""
    if code >= 0x20 and code != QUOTE and code != BACKSLASH:
        return _write_code(out, out_pos, code)
    out[np.uint64(out_pos)] = BACKSLASH
    for place in range(len(ESCAPES)):
        if code == ESCAPES[place, 1]:
            out[np.uint64(out_pos + 1)] = ESCAPES[place, 0]
            return out_pos + 2
    out_pos = _put(out, out_pos + 1, _SMALL)
    out[np.uint64(out_pos)], out[np.uint64(out_pos + 1)] = ZERO + (code >> 4), _HEX[code & 15]
    return out_pos + 2


@kernel
def _write_code(out: np.ndarray, out_pos: int, code: int) -> int:
    """Write a code point as UTF-8 (RFC 3629, section 3)."""
    place = np.uint64(out_pos)
    if code < 0x80:
        out[place] = code
        return out_pos + 1
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
    return out_pos + width
