"""Operations on eight bytes at once, as one 64-bit number (its lowest byte is the
first), without a branch per byte.

Results are in the high bits of the bytes. A byte below 0x80 is at least `low` if adding
0x80 - low sets its high bit; no such sum carries over into the next byte (Knuth, The
Art of Computer Programming, volume 4A, 7.1.3).
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.hashing import equal_bytes, load64
from gristmill.dataprep.text.kernels import Bytes, inner_kernel

HIGH_BITS = np.uint64(0x8080808080808080)
_ONES = np.uint64(0x0101010101010101)
_SEVEN_BITS = np.uint64(0x7F7F7F7F7F7F7F7F)
_SMALL = np.uint64(0x2020202020202020)
_FROM_A, _BEYOND_Z = np.uint64(0x1F1F1F1F1F1F1F1F), np.uint64(0x0505050505050505)
_FROM_SPACE = np.uint64(0x6060606060606060)
_PLACES = np.uint64(0x0001020304050607)
"""Byte 7 - k is k."""


@inner_kernel
def letters_of(eight: np.uint64) -> np.uint64:
    """High bits of the bytes that are ASCII letters."""
    small = (eight | _SMALL) & _SEVEN_BITS
    return (small + _FROM_A) & ~(small + _BEYOND_Z) & ~eight & HIGH_BITS


@inner_kernel
def controls_of(eight: np.uint64) -> np.uint64:
    """High bits of the bytes below 0x20."""
    return ~((eight & _SEVEN_BITS) + _FROM_SPACE) & ~eight & HIGH_BITS


@inner_kernel
def equal_to(eight: np.uint64, byte: int) -> np.uint64:
    """High bits of the bytes equal to `byte`."""
    differing = eight ^ np.uint64(byte) * _ONES
    return ~((differing & _SEVEN_BITS) + _SEVEN_BITS | differing) & HIGH_BITS


@inner_kernel
def first_of(high_bits: np.uint64) -> np.uint64:
    """Index, from 0 to 7, of the first byte whose high bit is set; at least one must
    be.
    """
    lowest = high_bits & (~high_bits + np.uint64(1))
    return (lowest >> np.uint64(7)) * _PLACES >> np.uint64(56)


@inner_kernel
def number_of(high_bits: np.uint64) -> np.uint64:
    """Number of bytes whose high bit is set; no other bits may be."""
    return (high_bits >> np.uint64(7)) * _ONES >> np.uint64(56)


@inner_kernel
def count_byte(data: Bytes, begin: int, end: int, byte: int) -> int:
    """Number of occurrences of a byte in a range."""
    pos = np.uint64(begin)
    stop = np.uint64(end)
    count = np.uint64(0)
    while pos + np.uint64(8) <= stop:
        count += number_of(equal_to(load64(data, pos), byte))
        pos += np.uint64(8)
    while pos < stop:
        count += np.uint64(data[pos] == byte)
        pos += np.uint64(1)
    return int(np.int64(count))


@inner_kernel
def find_byte(data: Bytes, begin: int, end: int, byte: int) -> int:
    """First position of a byte in a range; the end if there is none."""
    pos = np.uint64(begin)
    stop = np.uint64(end)
    while pos + np.uint64(8) <= stop:
        matches = equal_to(load64(data, pos), byte)
        if matches != 0:
            return int(np.int64(pos + first_of(matches)))
        pos += np.uint64(8)
    while pos < stop and data[pos] != byte:
        pos += np.uint64(1)
    return int(np.int64(pos))


@inner_kernel
def count_pattern(data: Bytes, begin: int, end: int, pattern: np.ndarray) -> int:
    """Number of occurrences of some bytes in a range, from the left and not
    overlapping.
    """
    count = 0
    at = find_byte(data, begin, end, pattern[0])
    while at + len(pattern) <= end:
        is_match = equal_bytes(data, at, pattern, 0, len(pattern))
        count += is_match
        at = find_byte(data, at + (len(pattern) if is_match else 1), end, pattern[0])
    return count
