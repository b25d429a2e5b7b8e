"""One pass over texts before they are encoded: whether they are UTF-8, how many characters and words each has, and
which have a character of a list.

64 bytes at a time, as numbers of 64 bits with a bit for each byte; text in ASCII takes five instructions for them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.dataprep.text.kernels import inlined_kernel, kernel
from gristmill.dataprep.text.wide_bytes import (
    WIDTH,
    above_blanks_of_64,
    address_of,
    fetch,
    high_of_64,
    leads_of_64,
    leads_of_four_of_64,
    leads_of_three_of_64,
    never_utf8_of_64,
    ones,
    trailing_zeros,
)

CODE_POINTS = 0x110000
AHEAD = 1024
"""Bytes. A processor fetches ahead by itself, but not across the end of a page: a fifth of the time."""


class Listed(NamedTuple):
    """Code points that are looked for, none of them of ASCII.

    Attributes:
        table: uint8 of shape (0x110000,), 1 for each.
        beginnings: uint8 of shape (65536,), 1 for the first two bytes of each, so that most characters need no closer
            look.
        longer: whether all of them have three bytes or more.
    """

    table: np.ndarray
    beginnings: np.ndarray
    longer: bool


def listed(codes: np.ndarray) -> Listed:
    """The list of these code points (int64)."""
    table, beginnings = np.zeros(CODE_POINTS, np.uint8), np.zeros(1 << 16, np.uint8)
    table[codes] = 1
    for code in codes.tolist():
        one, two = chr(code).encode()[:2]
        beginnings[one << 8 | two] = 1
    return Listed(table, beginnings, not table[:0x800].any())


NONE_LISTED = Listed(np.zeros(CODE_POINTS, np.uint8), np.zeros(1 << 16, np.uint8), True)


@kernel
def scan_texts(
    data: np.ndarray,
    offsets: np.ndarray,
    listed: Listed,
    characters: np.ndarray,
    words: np.ndarray,
    found: np.ndarray,
) -> bool:
    """Count characters and words of n texts, and find those that have a listed code point.

    A word is a run of bytes above U+0020.

    Args:
        data, offsets: like those of `text_buffers.text_buffers`, but the texts may be no UTF-8.
        listed: what is looked for.
        characters, words: int64 of shape (n,), are filled.
        found: bool of shape (n,), is filled.

    Returns:
        whether every text is UTF-8; where one is not, what was filled means nothing.
    """
    rest, wrong = np.zeros(2 * WIDTH, np.uint8), np.uint64(0)
    for text in range(len(offsets) - 1):
        at, end = int(offsets[text]), int(offsets[text + 1])
        number, begun, hit = np.uint64(0), np.uint64(0), False
        word, expected = np.uint64(0), np.uint64(0)  # of the byte before: whether it is of a word; what it begins
        while at < end:
            left = np.uint64(end - at)
            inside = ~np.uint64(0) if left >= _64 else (np.uint64(1) << left) - np.uint64(1)
            here = address_of(data) + at
            fetch(here + AHEAD)
            if at + WIDTH >= len(data):
                for place in range(WIDTH + 1):
                    rest[place] = data[at + place] if at + place < len(data) else 0
                here = address_of(rest)
            solid = above_blanks_of_64(here) & inside
            begun += ones(solid & ~(solid << _1 | word))
            word = solid >> _63
            high = high_of_64(here) & inside
            if high | expected == 0:
                number += ones(inside)
            else:
                leads, threes = leads_of_64(here) & inside, leads_of_three_of_64(here) & inside
                fours = leads_of_four_of_64(here) & inside
                behind = high & ~leads
                number += ones(inside & ~behind)
                wrong |= never_utf8_of_64(here) & inside
                wrong |= (leads << _1 | threes << _2 | fours << _3 | expected) ^ behind
                expected = leads >> _63 | threes >> _62 | fours >> _61
                if left <= _64:
                    leads, threes = leads & inside >> _1, threes & inside >> _1
                hit = hit or _has_listed(data, at, end, threes if listed.longer else leads, listed)
            at += WIDTH
        wrong |= expected
        characters[text], words[text], found[text] = np.int64(number), np.int64(begun), hit
    return wrong == 0


@kernel
def find_listed(data: np.ndarray, offsets: np.ndarray, listed: Listed, found: np.ndarray) -> None:
    """What `scan_texts` finds, of texts that are UTF-8, in half its time where they are not of ASCII."""
    for text in range(len(offsets) - 1):
        at, end, hit = int(offsets[text]), int(offsets[text + 1]), False
        while at + WIDTH <= end:
            here = address_of(data) + at
            fetch(here + AHEAD)
            leads = leads_of_three_of_64(here) if listed.longer else leads_of_64(here)
            hit = hit or _has_listed(data, at, end, leads, listed)
            at += WIDTH
        leads = np.uint64(0)
        for place in range(at, end):
            leads |= np.uint64(data[place] >= 0xC0) << np.uint64(place - at)
        found[text] = hit or _has_listed(data, at, end, leads, listed)


_1, _2, _3, _61, _62, _63, _64 = (np.uint64(bits) for bits in (1, 2, 3, 61, 62, 63, 64))


@inlined_kernel
def _has_listed(data: np.ndarray, at: int, end: int, leads: np.uint64, listed: Listed) -> bool:
    """Whether a listed code point is one of those that begin at the bits of data[at:at + 64]; none at the last byte."""
    left, near = leads, np.uint8(0)
    while left != 0:
        place = np.uint64(at) + trailing_zeros(left)
        near |= listed.beginnings[np.uint64(data[place]) << np.uint64(8) | np.uint64(data[place + _1])]
        left &= left - _1
    if near == 0:
        return False
    left = leads
    while left != 0:
        if listed.table[_code_point(data, np.uint64(at) + trailing_zeros(left), end)] != 0:
            return True
        left &= left - _1
    return False


@inlined_kernel
def _code_point(data: np.ndarray, at: np.uint64, end: int) -> int:
    """The character that begins with the byte; 0 where it has fewer than two bytes before the end."""
    first = int(data[at])
    width = 2 + (first >= 0xE0) + (first >= 0xF0)
    if int(at) + width > end:
        return 0
    code = first & (0xFF >> (width + 1))
    for place in range(1, width):
        code = code << 6 | int(data[at + np.uint64(place)]) & 0x3F
    return min(code, CODE_POINTS - 1)
