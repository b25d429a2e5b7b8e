"""Splitting text into pre-tokens, one at a time, over UTF-8 bytes: the patterns of `patterns.py` as kernels.

GPT-2's pattern and cl100k's (Llama 3, Qwen 2) match one alternative after the other; so do the kernels, with the
same consequences: `\\s+(?!\\S)` leaves the last white space of a run to what follows it.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.hashing import load64
from gristmill.dataprep.kernels import kernel
from gristmill.dataprep.unicode_tables import decode
from gristmill.tokenize.encoding.character_classes import ALONE, LETTER, NUMBER, OTHER, SPACE, UNKNOWN

_BLANK, _APOSTROPHE, _NEWLINE, _RETURN = 0x20, 0x27, 0x0A, 0x0D
_EIGHT_BLANKS = np.uint64(0x2020202020202020)
_ONES = np.uint64(0x0101010101010101)
_HIGH = np.uint64(0x8080808080808080)
_LOW = np.uint64(0x7F7F7F7F7F7F7F7F)
_FROM_A = np.uint64((0x80 - 0x61) * 0x0101010101010101)
_BEYOND_Z = np.uint64((0x80 - 0x7B) * 0x0101010101010101)


@kernel
def next_piece(data: np.ndarray, at: int, end: int, classes: np.ndarray, most_digits: int) -> int:
    """Where the piece that begins at byte `at` ends; -1 - code point where its class is not known yet.

    Args:
        data: UTF-8; the piece is searched in data[at:end], which is not empty and begins on a code point.
        classes: CharacterClasses.table.
        most_digits: Pattern.most_digits.
    """
    if most_digits == 0:
        return _next_gpt2(data, at, end, classes)
    return _next_cl100k(data, at, end, classes, most_digits)


@kernel
def _next_gpt2(data: np.ndarray, at: int, end: int, classes: np.ndarray) -> int:
    first = data[np.uint64(at)]
    if first == _APOSTROPHE:
        length = _contraction(data, at, end)
        if length:
            return at + length
    code, width = decode(data, at)
    kind = classes[np.uint64(code)]
    start = at + width
    if first == _BLANK and start < end and kind != UNKNOWN:
        code, width = decode(data, start)
        following = classes[np.uint64(code)]
        if following != SPACE and following != ALONE:
            kind = following
            start += width
    if kind == UNKNOWN:
        return -1 - code
    if kind == ALONE:
        return start
    stop = _run(data, start, end, classes, kind)
    return stop if kind != SPACE or stop < 0 else _white_space(data, at, stop, end, classes)


@kernel
def _white_space(data: np.ndarray, at: int, stop: int, end: int, classes: np.ndarray) -> int:
    """`\\s+(?!\\S)|\\s+`: what a run of white space in front of something leaves its last code point to."""
    if stop == end or classes[decode(data, stop)[0]] == ALONE:
        return stop
    last = stop - 1
    while data[np.uint64(last)] & 0xC0 == 0x80:
        last -= 1
    return stop if last == at else last


@kernel
def _next_cl100k(data: np.ndarray, at: int, end: int, classes: np.ndarray, most_digits: int) -> int:
    first = data[np.uint64(at)]
    if first == _APOSTROPHE:
        length = _contraction_of_any_case(data, at, end)
        if length:
            return at + length
    code, width = decode(data, at)
    kind = classes[np.uint64(code)]
    start = at + width
    if kind == UNKNOWN:
        return -1 - code
    if kind == LETTER:
        return _run(data, start, end, classes, LETTER)
    if kind == NUMBER:
        return _digits(data, start, end, classes, most_digits - 1)
    following = UNKNOWN
    if start < end:
        code, width = decode(data, start)
        following = classes[np.uint64(code)]
        if following == UNKNOWN:
            return -1 - code
        if following == LETTER and first != _NEWLINE and first != _RETURN:
            return _run(data, start + width, end, classes, LETTER)
    if kind == OTHER or (first == _BLANK and following == OTHER):
        stop = _run(data, start, end, classes, OTHER)
        return stop if stop < 0 else _line_ends(data, stop, end)
    stop = _run(data, start, end, classes, SPACE)
    if stop < 0:
        return stop
    last = stop
    while last > at and data[np.uint64(last - 1)] != _NEWLINE and data[np.uint64(last - 1)] != _RETURN:
        last -= 1
    return last if last > at else _white_space(data, at, stop, end, classes)


@kernel
def _digits(data: np.ndarray, at: int, end: int, classes: np.ndarray, most: int) -> int:
    """Where up to so many further numbers end; -1 - code point where a class is not known."""
    while at < end and most > 0:
        code, width = decode(data, at)
        kind = classes[np.uint64(code)]
        if kind == UNKNOWN:
            return -1 - code
        if kind != NUMBER:
            break
        at += width
        most -= 1
    return at


@kernel
def _line_ends(data: np.ndarray, at: int, end: int) -> int:
    """`[\\r\\n]*`"""
    while at < end and (data[np.uint64(at)] == _NEWLINE or data[np.uint64(at)] == _RETURN):
        at += 1
    return at


@kernel
def _run(data: np.ndarray, at: int, end: int, classes: np.ndarray, kind: int) -> int:
    """Where a run of one class ends that has begun before byte `at`; -1 - code point where a class is not known."""
    if kind == LETTER:
        at = _latin_letters(data, at, end)
    elif kind == SPACE:
        while at + 8 <= end and load64(data, at) == _EIGHT_BLANKS:
            at += 8
    while at < end:
        byte = data[np.uint64(at)]
        if byte < 0x80:
            code, width = int(byte), 1
        else:
            code, width = decode(data, at)
        found = classes[np.uint64(code)]
        if found != kind:
            return -1 - code if found == UNKNOWN else at
        at += width
    return at


@kernel
def _latin_letters(data: np.ndarray, at: int, end: int) -> int:
    """Where the ASCII letters from byte `at` end, eight bytes at a time; earlier within eight bytes of the data's end.
    """
    while at + 8 <= len(data):
        others = non_letters(load64(data, at))
        if others != 0:
            return min(at + places_before(others & (~others + np.uint64(1))), end)
        at += 8
        if at >= end:
            return end
    return at


@kernel
def non_letters(word: np.uint64) -> np.uint64:
    """Of eight bytes, the highest bit of each that is no ASCII letter.

    In each byte's highest bit: whether it is at least `a`, whether it is beyond `z`, whether it is not ASCII.
    """
    low = (word | _EIGHT_BLANKS) & _LOW
    return ~((low + _FROM_A) & ~(low + _BEYOND_Z) & ~word) & _HIGH


@kernel
def places_before(bit: np.uint64) -> int:
    """How many bytes are before the one whose highest bit this is.

    Below the bit as many bytes have their lowest bit as are before it, and its own; a product adds them up.
    """
    return int(np.int64((((bit - np.uint64(1)) & _ONES) * _ONES) >> np.uint64(56))) - 1


@kernel
def _contraction(data: np.ndarray, at: int, end: int) -> int:
    """Length of 's, 't, 'm, 'd, 're, 've or 'll at byte `at`, else 0."""
    if at + 1 >= end:
        return 0
    one = data[at + 1]
    if one == 0x73 or one == 0x74 or one == 0x6D or one == 0x64:
        return 2
    if at + 2 >= end:
        return 0
    two = data[at + 2]
    if (one == 0x72 or one == 0x76) and two == 0x65:
        return 3
    return 3 if one == 0x6C and two == 0x6C else 0


@kernel
def _contraction_of_any_case(data: np.ndarray, at: int, end: int) -> int:
    """The same in any case; Unicode's other case of `s` is also U+017F, the long s, which is two bytes."""
    if at + 1 >= end:
        return 0
    one = data[at + 1]
    if one < 0x80:
        one |= 0x20
    if one == 0x73 or one == 0x74 or one == 0x6D or one == 0x64:
        return 2
    if at + 2 >= end:
        return 0
    two = data[at + 2]
    if one == 0xC5 and two == 0xBF:
        return 3
    two |= 0x20
    if (one == 0x72 or one == 0x76) and two == 0x65:
        return 3
    return 3 if one == 0x6C and two == 0x6C else 0
