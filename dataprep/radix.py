"""Sorting 32-bit hashes inside kernels: by one byte after the other, which costs the same for every input.

A sort by comparison branches on random bits, which a processor cannot predict; this one does not branch (Knuth, The
Art of Computer Programming, volume 3, section 5.2.5).
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.kernels import kernel

FEW = 48
"""Up to so many values, insertion is faster than counting."""
_BYTE = np.uint32(255)


@kernel
def sort_distinct(values: np.ndarray, spare: np.ndarray) -> int:
    """Sort values in place, leaving each once at the front.

    Args:
        values: uint32 of shape (n,).
        spare: uint32, at least n of them; what it holds is lost.

    Returns:
        how many values at the front are distinct, ascending.
    """
    if len(values) <= FEW:
        _insert(values)
    else:
        _sort_bytes(values, spare)
    count = 0
    for value in values:
        if count == 0 or value != values[count - 1]:
            values[count] = value
            count += 1
    return count


@kernel
def _insert(values: np.ndarray) -> None:
    for at in range(1, len(values)):
        value, place = values[at], at
        while place > 0 and values[place - 1] > value:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value


@kernel
def _sort_bytes(values: np.ndarray, spare: np.ndarray) -> None:
    """Four stable passes, lowest byte first; after an even number of them the values are back where they were."""
    places = np.zeros(4 * 256, np.int64)
    for value in values:
        for step in range(4):
            places[256 * step + (value >> np.uint32(8 * step) & _BYTE)] += 1
    for step in range(4):
        total = 0
        for at in range(256 * step, 256 * step + 256):
            total, places[at] = total + places[at], total
    source, target = values, spare
    for step in range(4):
        for at in range(len(values)):
            value = source[at]
            digit = 256 * step + (value >> np.uint32(8 * step) & _BYTE)
            target[places[digit]] = value
            places[digit] += 1
        source, target = target, source
