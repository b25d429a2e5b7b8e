"""Fast hashes and a sort for numba kernels. The hashes do not resist deliberate
collisions.

Their values are part of stored data (shingles, bands), so they must not change.

A comparison sort branches on random bits, which a processor cannot predict; this radix
sort does not branch (Knuth, The Art of Computer Programming, volume 3, section 5.2.5).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gristmill.dataprep.text.kernels import Bytes, Offsets, inner_kernel, kernel

ODD = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio (Knuth, The Art of Computer Programming, volume 3,
section 6.4).
"""
OTHER_ODD = np.uint64(0xC2B2AE3D27D4EB4F)
"""xxHash's second 64-bit prime (Collet, BSD)."""


@inner_kernel
def fmix32(value: np.uint32) -> np.uint32:
    """MurmurHash3's 32-bit finaliser, a bijection in which every bit reaches every
    other (Appleby, public domain).
    """
    value = np.uint32(value ^ (value >> np.uint32(16)))
    value = np.uint32(value * np.uint32(0x85EBCA6B))
    value = np.uint32(value ^ (value >> np.uint32(13)))
    value = np.uint32(value * np.uint32(0xC2B2AE35))
    return np.uint32(value ^ (value >> np.uint32(16)))


@inner_kernel
def fmix64(value: np.uint64) -> np.uint64:
    """MurmurHash3's 64-bit finaliser, a bijection in which every bit reaches every
    other (Appleby, public domain).
    """
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xFF51AFD7ED558CCD)
    value ^= value >> np.uint64(33)
    value *= np.uint64(0xC4CEB9FE1A85EC53)
    return value ^ (value >> np.uint64(33))


@inner_kernel
def append_hash(value: np.uint64, item: np.uint64) -> np.uint64:
    """Append a number to a hash of a sequence that is independent of `hash_bytes`; end
    it with `fmix64`.
    """
    value = (value + item) * OTHER_ODD
    return value ^ (value >> np.uint64(29))


@inner_kernel
def splitmix64(value: np.uint64) -> np.uint64:
    """SplitMix64's finaliser, a bijection that mixes like `fmix64` (Steele, Lea & Flood
    2014, figure 13).
    """
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _pointer_to_64(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    place = builder.gep(array.data, [arguments[1]], inbounds=True)
    return builder.bitcast(place, ir.IntType(64).as_pointer())


@intrinsic
def load64(typing: Any, data: Any, at: Any) -> Any:
    """Eight bytes of a contiguous array as a little-endian number, from a position
    on.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _pointer_to_64(context, builder, signature, arguments)
        return builder.load(place, align=1)

    return types.uint64(data, types.int64), generate


@intrinsic
def store64(typing: Any, data: Any, at: Any, value: Any) -> Any:
    """Write eight bytes of a contiguous array, lowest first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _pointer_to_64(context, builder, signature, arguments)
        builder.store(arguments[2], place, align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), generate


@inner_kernel
def first_bytes(data: Bytes, start: int, length: int) -> np.uint64:
    """Up to eight bytes as a little-endian number, zeros above."""
    if length >= 8:
        return load64(data, start)
    if start + 8 <= len(data):
        return load64(data, start) & (
            (np.uint64(1) << np.uint64(8 * length)) - np.uint64(1)
        )
    value = np.uint64(0)
    for step in range(length):
        value |= np.uint64(data[start + step]) << np.uint64(8 * step)
    return value


@inner_kernel
def hash_bytes(data: Bytes, begin: int, end: int) -> np.uint64:
    """64-bit hash of `data[begin:end]`, eight bytes at a time, seeded with the
    length.
    """
    value = np.uint64(end - begin) * ODD
    while end - begin >= 8:
        value = (value ^ load64(data, begin)) * ODD
        value ^= value >> np.uint64(32)
        begin += 8
    tail = np.uint64(0)
    for pos in range(np.uint64(begin), np.uint64(end)):
        tail = tail << np.uint64(8) | np.uint64(data[pos])
    return fmix64((value ^ tail) * ODD)


@kernel
def hash_texts(data: Bytes, offsets: Offsets) -> np.ndarray:
    """`hash_bytes` of every text: uint64 of shape (n,)."""
    hashes = np.empty(len(offsets) - 1, np.uint64)
    for text in range(len(hashes)):
        hashes[text] = hash_bytes(data, offsets[text], offsets[text + 1])
    return hashes


@inner_kernel
def equal_bytes(
    one: np.ndarray, first: int, other: np.ndarray, second: int, length: int
) -> bool:
    """True if a range of bytes of one array equals a range of another."""
    step = 0
    while length - step >= 8:
        if load64(one, first + step) != load64(other, second + step):
            return False
        step += 8
    while step < length:
        if one[np.uint64(first + step)] != other[np.uint64(second + step)]:
            return False
        step += 1
    return True


FEW = 48
"""Largest number of values for which insertion sort is faster than radix sort."""
_BYTE = np.uint32(255)


@kernel
def sort_distinct(values: np.ndarray, spare: np.ndarray) -> int:
    """Sort values in place, with distinct values at the front.

    Args:
        values: uint32 of shape (n,).
        spare: uint32, at least n values; overwritten.

    Returns:
        number of distinct values at the front, ascending.
    """
    if len(values) > FEW:
        # Four stable passes, lowest byte first; after an even number of passes the
        # result is in `values`.
        places = np.zeros(4 * 256, np.int64)
        for value in values:
            for step in range(4):
                places[256 * step + (value >> np.uint32(8 * step) & _BYTE)] += 1
        for step in range(4):
            total = 0
            for pos in range(256 * step, 256 * step + 256):
                total, places[pos] = total + places[pos], total
        source = values
        target = spare
        for step in range(4):
            for pos in range(len(values)):
                value = source[pos]
                digit = 256 * step + (value >> np.uint32(8 * step) & _BYTE)
                target[places[digit]] = value
                places[digit] += 1
            source, target = target, source
    else:
        for pos in range(1, len(values)):
            value = values[pos]
            place = pos
            while place > 0 and values[place - 1] > value:
                values[place] = values[place - 1]
                place -= 1
            values[place] = value
    count = 0
    for value in values:
        if count == 0 or value != values[count - 1]:
            values[count] = value
            count += 1
    return count
