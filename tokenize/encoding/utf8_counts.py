"""Scan of texts before encoding: UTF-8 validity, characters and words of each, and hits
of a character list.

64 bytes at a time, as 64-bit numbers with a bit per byte; ASCII text takes five
instructions for them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.dataprep.text.kernels import Bytes, Offsets, inlined_kernel, kernel
from gristmill.dataprep.text.simd import (
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
"""Prefetch distance in bytes. The hardware prefetcher stops at page ends, which costs a
fifth of the time.
"""


class Listed(NamedTuple):
    """Set of code points to search for, none of them ASCII.

    Attributes:
        table: uint8 of shape (0x110000,), 1 for each.
        beginnings: uint8 of shape (65536,), 1 for the first two bytes of each, a cheap
            filter for most characters.
        longer: whether all of them have at least three bytes.
    """

    table: np.ndarray
    beginnings: np.ndarray
    longer: bool


def listed(codes: np.ndarray) -> Listed:
    """Build the set from code points (int64)."""
    table = np.zeros(CODE_POINTS, np.uint8)
    beginnings = np.zeros(1 << 16, np.uint8)
    table[codes] = 1
    for code in codes.tolist():
        first, second = chr(code).encode()[:2]
        beginnings[first << 8 | second] = 1
    return Listed(table, beginnings, not table[:0x800].any())


NONE_LISTED = Listed(np.zeros(CODE_POINTS, np.uint8), np.zeros(1 << 16, np.uint8), True)


@kernel
def scan_texts(
    data: Bytes,
    offsets: Offsets,
    listed: Listed,
    characters: np.ndarray,
    words: np.ndarray,
    hits: np.ndarray,
) -> bool:
    """Count characters and words of n texts, and mark those with a listed code point.

    A word is a run of bytes above U+0020.

    Args:
        data, offsets: as in `kernels.text_buffers`, but possibly invalid UTF-8.
        listed: code points to search for.
        characters, words: int64 of shape (n,), filled.
        hits: bool of shape (n,), filled.

    Returns:
        whether every text is UTF-8; if not, the filled arrays are meaningless.
    """
    tail, wrong = np.zeros(2 * WIDTH, np.uint8), np.uint64(0)
    for text in range(len(offsets) - 1):
        at, end = int(offsets[text]), int(offsets[text + 1])
        number, word_count, hit = np.uint64(0), np.uint64(0), False
        # state of the previous byte: inside a word; expected continuations
        word, expected = np.uint64(0), np.uint64(0)
        while at < end:
            remaining = np.uint64(end - at)
            inside = (
                ~np.uint64(0)
                if remaining >= _64
                else (np.uint64(1) << remaining) - np.uint64(1)
            )
            address = address_of(data) + at
            fetch(address + AHEAD)
            if at + WIDTH >= len(data):
                for place in range(WIDTH + 1):
                    tail[place] = data[at + place] if at + place < len(data) else 0
                address = address_of(tail)
            solid = above_blanks_of_64(address) & inside
            word_count += ones(solid & ~(solid << _1 | word))
            word = solid >> _63
            high = high_of_64(address) & inside
            if high | expected == 0:
                number += ones(inside)
            else:
                leads, threes = (
                    leads_of_64(address) & inside,
                    leads_of_three_of_64(address) & inside,
                )
                fours = leads_of_four_of_64(address) & inside
                continuation = high & ~leads
                number += ones(inside & ~continuation)
                wrong |= never_utf8_of_64(address) & inside
                wrong |= (
                    leads << _1 | threes << _2 | fours << _3 | expected
                ) ^ continuation
                expected = leads >> _63 | threes >> _62 | fours >> _61
                if remaining <= _64:
                    leads, threes = leads & inside >> _1, threes & inside >> _1
                hit = hit or _has_listed(
                    data, at, end, threes if listed.longer else leads, listed
                )
            at += WIDTH
        wrong |= expected
        characters[text], words[text], hits[text] = (
            np.int64(number),
            np.int64(word_count),
            hit,
        )
    return wrong == 0


_1, _2, _3, _61, _62, _63, _64 = (np.uint64(bits) for bits in (1, 2, 3, 61, 62, 63, 64))


@inlined_kernel
def _has_listed(
    data: Bytes, at: int, end: int, leads: np.uint64, listed: Listed
) -> bool:
    """Return whether a listed code point begins at a set bit of data[at:at + 64]; the
    last byte never counts.
    """
    remaining, near = leads, np.uint8(0)
    while remaining != 0:
        place = np.uint64(at) + trailing_zeros(remaining)
        near |= listed.beginnings[
            np.uint64(data[place]) << np.uint64(8) | np.uint64(data[place + _1])
        ]
        remaining &= remaining - _1
    if near == 0:
        return False
    remaining = leads
    while remaining != 0:
        if (
            listed.table[
                _code_point(data, np.uint64(at) + trailing_zeros(remaining), end)
            ]
            != 0
        ):
            return True
        remaining &= remaining - _1
    return False


@inlined_kernel
def _code_point(data: Bytes, at: np.uint64, end: int) -> int:
    """Code point that begins at a byte; 0 if it is cut off by the end."""
    first = int(data[at])
    width = 2 + (first >= 0xE0) + (first >= 0xF0)
    if int(at) + width > end:
        return 0
    code = first & (0xFF >> (width + 1))
    for place in range(1, width):
        code = code << 6 | int(data[at + np.uint64(place)]) & 0x3F
    return min(code, CODE_POINTS - 1)
