"""Kernels that find the keys and values of a JSON object, if they can interpret every byte.

Unsupported input (-1) may still be JSON for Python's parser, or invalid: keys with escapes, NaN, very long numbers and
very deep nesting.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.hashing import load64
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.swar import controls_of, equal_to, first_of

SLACK = 16
"""Newlines after the lines, and spare bytes after the output: eight bytes are read and written at once."""
MOST_KEYS = 64
MOST_DEPTH = 60
MOST_DIGITS = 4000
"""Digits of an integer: Python rejects more than 4,300 (`sys.int_info.default_max_str_digits`)."""
EXACT_DIGITS = 15
"""Python prints a float with the digits of any decimal of up to so many digits (IEEE 754 binary64)."""

NULL, NESTED, STRING, ESCAPED, CONSTANT, INTEGER, FLOAT, DOUBTFUL = range(8)
"""Kinds of values: ESCAPED is a string with escapes, DOUBTFUL a float that Python may print in another form."""
KEY, KEY_END, KIND, VALUE, VALUE_END = range(5)
"""Columns of a member: begin and end of keys and strings exclude the quotes."""
QUOTE, BACKSLASH, NEWLINE, OPEN, CLOSE, ZERO, SMALL_U = 0x22, 0x5C, 0x0A, 0x7B, 0x7D, 0x30, 0x75
ESCAPES = np.frombuffer(b'""\\\\//b\bf\fn\nr\rt\t', np.uint8).reshape(-1, 2).copy()
"""Letter after a backslash, and the character that it stands for (RFC 8259, section 7)."""
_RETURN, _SPACE, _TAB, _COMMA, _COLON, _BEGIN, _END = 0x0D, 0x20, 0x09, 0x2C, 0x3A, 0x5B, 0x5D
_NINE, _MINUS, _PLUS, _POINT, _E = 0x39, 0x2D, 0x2B, 0x2E, 0x65
_NULL, _TRUE, _FALSE = (np.uint64(int.from_bytes(word, "little")) for word in (b"null", b"true", b"fals"))
_FOUR_ZEROS = np.uint64(int.from_bytes(b"0000", "little"))
_FOUR_BYTES = np.uint64(0xFFFFFFFF)


@kernel
def byte_at(block: np.ndarray, at: int) -> int:
    """Byte as a signed number; the index is unsigned, so that it never counts from the end."""
    return int(np.int64(block[np.uint64(at)]))


@kernel
def _skip_space(block: np.ndarray, pos: int) -> int:
    """Position after white space, possibly at the end of the line."""
    byte = byte_at(block, pos)
    while byte in (_SPACE, _TAB, _RETURN):
        pos += 1
        byte = byte_at(block, pos)
    return pos


@kernel
def read_members(block: np.ndarray, at: int, members: np.ndarray) -> tuple[int, int]:
    """Find the keys and values of the object on a line.

    Returns:
        end of the line, or -1 if unsupported; and the number of members.
    """
    count = 0
    at = _skip_space(block, at)
    if byte_at(block, at) != OPEN:
        return -1, 0
    at = _skip_space(block, at + 1)
    while True:
        if count == len(members) or byte_at(block, at) != QUOTE:
            return -1, 0
        end, escaped = _find_end(block, at + 1)
        if end < 0 or escaped:
            return -1, 0
        members[count, KEY], members[count, KEY_END] = at + 1, end
        at = _skip_space(block, end + 1)
        if byte_at(block, at) != _COLON:
            return -1, 0
        at = _read_value(block, _skip_space(block, at + 1), members, count)
        if at < 0:
            return -1, 0
        count += 1
        at = _skip_space(block, at)
        byte = byte_at(block, at)
        if byte == CLOSE:
            break
        if byte != _COMMA:
            return -1, 0
        at = _skip_space(block, at + 1)
    at = _skip_space(block, at + 1)
    return (at, count) if byte_at(block, at) == NEWLINE else (-1, 0)


@kernel
def _find_end(block: np.ndarray, pos: int) -> tuple[int, bool]:
    """End of the string whose first byte is at `pos`, and True if it has escapes; -1 if it does not end."""
    escaped = False
    while True:
        eight = load64(block, pos)
        special_bytes = equal_to(eight, QUOTE) | equal_to(eight, BACKSLASH) | controls_of(eight)
        if special_bytes == 0:
            pos += 8
            continue
        pos += int(np.int64(first_of(special_bytes)))
        byte = byte_at(block, pos)
        if byte == QUOTE:
            return pos, escaped
        if byte != BACKSLASH:
            return -1, escaped
        escaped = True
        code, pos = read_escape(block, pos + 1)
        if code < 0:
            return -1, escaped


@kernel
def read_escape(block: np.ndarray, at: int) -> tuple[int, int]:
    """Code after a backslash (maybe a surrogate), and the position after it; -1 if invalid."""
    byte = byte_at(block, at)
    if byte == SMALL_U:
        code = 0
        for place in range(at + 1, at + 5):
            digit = byte_at(block, place)
            if ZERO <= digit <= _NINE:
                code = code << 4 | digit - ZERO
            elif 0x61 <= digit | 0x20 <= 0x66:
                code = code << 4 | (digit | 0x20) - 0x57
            else:
                return -1, at
        return code, at + 5
    for place in range(len(ESCAPES)):
        if byte == ESCAPES[place, 0]:
            return int(np.int64(ESCAPES[place, 1])), at + 1
    return -1, at


@kernel
def _read_value(block: np.ndarray, pos: int, members: np.ndarray, place: int) -> int:
    """Find the value of a member that begins at `pos`; returns the position after it, or -1 if unsupported."""
    byte = byte_at(block, pos)
    if byte == QUOTE:
        end, escaped = _find_end(block, pos + 1)
        members[place, KIND], members[place, VALUE] = ESCAPED if escaped else STRING, pos + 1
        members[place, VALUE_END] = end
        return end + 1 if end >= 0 else -1
    if byte in (OPEN, _BEGIN):
        members[place, KIND] = NESTED
        return _skip_nested(block, pos)
    end, kind = _find_scalar(block, pos)
    members[place, KIND], members[place, VALUE], members[place, VALUE_END] = kind, pos, end
    return end


@kernel
def _find_scalar(block: np.ndarray, pos: int) -> tuple[int, int]:
    """Position after a number, true, false or null, and its kind; -1 if unsupported."""
    four = load64(block, pos) & _FOUR_BYTES
    if four == _NULL:
        return pos + 4, NULL
    if four == _TRUE:
        return pos + 4, CONSTANT
    if four == _FALSE:
        return (pos + 5, CONSTANT) if byte_at(block, pos + 4) == _E else (-1, CONSTANT)
    negative = byte_at(block, pos) == _MINUS
    begin = pos + 1 if negative else pos
    pos = _skip_digits(block, begin)
    num_integer_digits = pos - begin
    if (
        num_integer_digits == 0
        or num_integer_digits > MOST_DIGITS
        or (num_integer_digits > 1 and byte_at(block, begin) == ZERO)
    ):
        return -1, INTEGER
    kind = INTEGER
    if byte_at(block, pos) == _POINT:
        point = pos
        pos = _skip_digits(block, pos + 1)
        decimals = pos - point - 1
        if decimals == 0:
            return -1, FLOAT
        padded = byte_at(block, pos - 1) == ZERO and decimals > 1
        small = byte_at(block, begin) == ZERO and decimals > 4 and load64(block, point + 1) & _FOUR_BYTES == _FOUR_ZEROS
        kind = DOUBTFUL if padded or small or num_integer_digits + decimals > EXACT_DIGITS else FLOAT
    if byte_at(block, pos) | 0x20 == _E:
        pos += 1
        if byte_at(block, pos) in (_PLUS, _MINUS):
            pos += 1
        begin, kind = pos, DOUBTFUL
        pos = _skip_digits(block, pos)
        if pos == begin:
            return -1, DOUBTFUL
    if kind == INTEGER and negative and byte_at(block, begin) == ZERO:
        return -1, INTEGER  # Python's -0 is 0
    return pos, kind


@kernel
def _skip_digits(block: np.ndarray, pos: int) -> int:
    while ZERO <= byte_at(block, pos) <= _NINE:
        pos += 1
    return pos


@kernel
def _skip_nested(block: np.ndarray, pos: int) -> int:
    """Position after an object or array, or -1 if unsupported."""
    depth, objects = 0, np.uint64(0)  # bit stack: the lowest bit is set in an object
    while True:
        byte = byte_at(block, pos)
        if byte in (OPEN, _BEGIN):
            if depth == MOST_DEPTH:
                return -1
            depth += 1
            objects = objects << np.uint64(1) | np.uint64(byte == OPEN)
            pos = _skip_space(block, pos + 1)
            if byte_at(block, pos) == byte + 2:  # closing bracket: "[" and "]", "{" and "}" are two apart
                depth, objects, pos = depth - 1, objects >> np.uint64(1), pos + 1
            else:
                pos = _skip_key(block, pos) if byte == OPEN else pos
                if pos < 0:
                    return -1
                continue
        elif byte == QUOTE:
            pos, _ = _find_end(block, pos + 1)
            if pos < 0:
                return -1
            pos += 1
        else:
            pos, _ = _find_scalar(block, pos)
            if pos < 0:
                return -1
        in_object = objects & np.uint64(1) != 0
        while depth > 0:
            pos = _skip_space(block, pos)
            if byte_at(block, pos) != (CLOSE if in_object else _END):
                break
            depth, objects, pos = depth - 1, objects >> np.uint64(1), pos + 1
            in_object = objects & np.uint64(1) != 0
        if depth == 0:
            return pos
        if byte_at(block, pos) != _COMMA:
            return -1
        pos = _skip_space(block, pos + 1)
        pos = _skip_key(block, pos) if in_object else pos
        if pos < 0:
            return -1


@kernel
def _skip_key(block: np.ndarray, pos: int) -> int:
    """Position of the value whose key begins at `pos`, or -1."""
    if byte_at(block, pos) != QUOTE:
        return -1
    pos, _ = _find_end(block, pos + 1)
    if pos < 0:
        return -1
    pos = _skip_space(block, pos + 1)
    return _skip_space(block, pos + 1) if byte_at(block, pos) == _COLON else -1
