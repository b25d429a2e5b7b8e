"""A checksum for every row, so that one row read out of a file is known to be right: XXH64.

XXH64 (Collet, "xxHash fast digest algorithm", specification 0.1.1), seed 0, of a row's bytes as they lie on disk: 64
bits for some kilobytes, several gigabytes per second.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.hashing import first_bytes, load64
from gristmill.dataprep.kernels import kernel

PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
"""The specification's five."""
P1, P2, P3, P4, P5 = (np.uint64(prime) for prime in PRIMES)
STRIPE_BYTES = 32
CHECKSUM_DTYPE = np.dtype("<u8")


def sums_name(file: str) -> str:
    """File name of the checksums beside a shard: uint64, little-endian, one for each row."""
    return f"{file.removesuffix('.bin')}.sums"


def row_checksums(rows: np.ndarray) -> np.ndarray:
    """XXH64 of each row's bytes.

    Args:
        rows: (n, L) of any little-endian dtype.

    Returns:
        uint64 of shape (n,).
    """
    content = np.ascontiguousarray(rows)
    found = np.empty(len(content), dtype=CHECKSUM_DTYPE)
    if len(content):
        hash_rows(content.view(np.uint8).reshape(len(content), -1), found)
    return found


@kernel
def _rotate(value, bits):  # type: ignore[no-untyped-def]
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@kernel
def _round(lane, word):  # type: ignore[no-untyped-def]
    return _rotate(lane + word * P2, 31) * P1


@kernel
def hash_row(row):  # type: ignore[no-untyped-def]
    """The checksum of a row (uint8, (bytes,))."""
    size, at = len(row), 0
    if size >= STRIPE_BYTES:
        a, b, c, d = P1 + P2, P2, np.uint64(0), np.uint64(0) - P1
        while at + STRIPE_BYTES <= size:
            a = _round(a, load64(row, at))
            b = _round(b, load64(row, at + 8))
            c = _round(c, load64(row, at + 16))
            d = _round(d, load64(row, at + 24))
            at += STRIPE_BYTES
        value = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
        for lane in (a, b, c, d):
            value = (value ^ _round(np.uint64(0), lane)) * P1 + P4
    else:
        value = P5
    value += np.uint64(size)
    while at + 8 <= size:
        value = _rotate(value ^ _round(np.uint64(0), load64(row, at)), 27) * P1 + P4
        at += 8
    if at + 4 <= size:
        value = _rotate(value ^ (first_bytes(row, at, 4) * P1), 23) * P2 + P3
        at += 4
    while at < size:
        value = _rotate(value ^ (np.uint64(row[np.uint64(at)]) * P5), 11) * P1
        at += 1
    value = (value ^ (value >> np.uint64(33))) * P2
    value = (value ^ (value >> np.uint64(29))) * P3
    return value ^ (value >> np.uint64(32))


@kernel
def hash_rows(rows, found):  # type: ignore[no-untyped-def]
    """Fill `found` (uint64, (n,)) with the checksums of `rows` (uint8, (n, bytes))."""
    for number in range(len(rows)):
        found[number] = hash_row(rows[number])
