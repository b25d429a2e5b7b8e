"""Copies of rows from shards into a batch, each compared with its checksum.

The checksum is XXH3 of 64 bits, of rows of at most 240 bytes XXH64 (Collet, "xxHash
fast digest algorithm", specification 0.2.0; seed 0), of a row's bytes as on disk. XXH3
adds 64 bytes at a time in vector instructions, so that comparing a row while it is
copied costs a few hundredths of the copy; XXH64, which multiplies words of 64 bits,
took longer than the copy itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from gristmill.dataprep.text.hashing import first_bytes, load64
from gristmill.dataprep.text.kernels import inner_kernel, kernel, pointer
from gristmill.dataprep.text.simd import fetch, high_half, prefetch

ALL_THERE, NO_SUCH_ROW, DAMAGED = -1, -2, -3
"""Returned by `gather_mapped` instead of a shard's number."""


@kernel
def gather_rows(shard, rows, places, out):  # type: ignore[no-untyped-def]
    """Copy rows of a shard (n, L) to places of a batch: out[places[k]] =
    shard[rows[k]], in one pass without the GIL.

    Args:
        shard: (n, L).
        rows: int64 (k,), in [0, n).
        places: int64 (k,).
        out: (m, L), filled at `places`.
    """
    for number in range(len(rows)):
        source, target = shard[rows[number]], out[places[number]]
        for token in range(len(source)):
            target[token] = source[token]


@kernel
def gather_mapped(addresses, sums, ends, rows, out):  # type: ignore[no-untyped-def]
    """Copy rows out of any of some shards, in one pass without the GIL: out[k] is row
    rows[k] of all shards together.

    Args:
        addresses: uint64 (shards,), address of each shard's first row, 0 if it is not
            open; the caller keeps the memory alive.
        sums: uint64 (shards,), address of its rows' checksums; 0 without any.
        ends: int64 (shards,), ascending: the first row behind each shard.
        rows: int64 (k,).
        out: (k, bytes of a row) uint8, contiguous, filled.

    Returns:
        ALL_THERE; or NO_SUCH_ROW; or the number of a shard that must be opened first;
        or DAMAGED - k for the first place k whose row has another checksum.
    """
    size = out.shape[1]
    target = np.uint64(out.ctypes.data)
    lanes = np.empty(LANES, np.uint64)
    for place in range(len(rows)):
        shard = np.searchsorted(ends, rows[place], side="right")
        if rows[place] < 0 or shard == len(ends):
            return NO_SUCH_ROW
        if not addresses[shard]:
            return shard
        number = rows[place] - (ends[shard - 1] if shard else 0)
        source = addresses[shard] + np.uint64(number * size)
        next_row = rows[min(place + 1, len(rows) - 1)]
        next_source = _address(addresses, ends, next_row, size)
        fetch(_address(sums, ends, next_row, 8))
        checksum = hash_row(
            source, (target + np.uint64(place * size), next_source), size, lanes
        )
        if (
            sums[shard]
            and checksum
            != carray(pointer(sums[shard] + np.uint64(number * 8)), (1,), np.uint64)[0]
        ):
            return DAMAGED - place
    return ALL_THERE


@inner_kernel
def _address(addresses, ends, row, size):  # type: ignore[no-untyped-def]
    """Address of `size` bytes of a row; arbitrary if there is no such row, or its shard
    is not open.
    """
    shard = min(np.searchsorted(ends, row, side="right"), len(ends) - 1)
    return addresses[shard] + np.uint64(
        (row - (ends[shard - 1] if shard else 0)) * size
    )


PRIMES = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
"""The specification's five of 64 bits."""
P1, P2, P3, P4, P5 = (np.uint64(prime) for prime in PRIMES)
SHORT_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
"""The specification's three of 32 bits."""
S1, S2, S3 = (np.uint64(prime) for prime in SHORT_PRIMES)
AVALANCHE = np.uint64(0x165667919E3779F9)
MOST_SHORT = 240
"""Largest row in bytes for which XXH64 is used: XXH3 differs for short inputs."""
LANES, STRIPE_BYTES, BLOCK_STRIPES = 8, 64, 16
BLOCK_BYTES = BLOCK_STRIPES * STRIPE_BYTES
SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
"""The specification's default secret of 192 bytes."""


def row_checksums(rows: np.ndarray) -> np.ndarray:
    """The checksum of each row's bytes.

    Args:
        rows: (n, L) of any little-endian dtype.

    Returns:
        uint64 of shape (n,).
    """
    content = np.ascontiguousarray(rows)
    checksums = np.empty(len(content), "<u8")
    if len(content):
        hash_rows(content.view(np.uint8).reshape(len(content), -1), checksums)
    return checksums


@kernel
def hash_rows(rows, checksums):  # type: ignore[no-untyped-def]
    """Fill `checksums` (uint64, (n,)) with those of `rows` (uint8, (n, bytes),
    contiguous).
    """
    size = rows.shape[1]
    source = np.uint64(rows.ctypes.data)
    lanes = np.empty(LANES, np.uint64)
    for number in range(len(rows)):
        checksums[number] = hash_row(
            source + np.uint64(number * size), None, size, lanes
        )


@kernel
def hash_row(source, copy, size, lanes):  # type: ignore[no-untyped-def]
    """The checksum of a row, which is copied on the way.

    Args:
        source: address of its bytes.
        copy: address of the copy, and of the row that is read next; None for no copy.
        size: bytes.
        lanes: uint64 (8,), for the work.
    """
    row = carray(pointer(source), (size,), np.uint8)
    if size > MOST_SHORT:
        return _xxh3(row, source, copy, lanes)
    if copy is not None:
        target = carray(pointer(copy[0]), (size,), np.uint8)
        for byte in range(size):
            target[byte] = row[byte]
    return _xxh64(row)


@kernel
def _xxh3(row, source, copy, lanes):  # type: ignore[no-untyped-def]
    """XXH3_hashLong_64b of the specification's implementation, with its names in the
    comments.
    """
    size = len(row)
    for lane, start in enumerate((S3, P1, P2, P3, P4, S2, P5, S1)):  # XXH3_INIT_ACC
        lanes[lane] = start
    secret, sums = np.uint64(SECRET.ctypes.data), np.uint64(lanes.ctypes.data)
    end = SECRET.size - STRIPE_BYTES
    stripes = (size - 1) // STRIPE_BYTES
    for first in range(0, stripes, BLOCK_STRIPES):
        count = min(BLOCK_STRIPES, stripes - first)
        at = np.uint64(first * STRIPE_BYTES)
        add_stripes(source + at, _behind(copy, at), secret, sums, np.uint64(count))
        if first * STRIPE_BYTES + BLOCK_BYTES < size:
            for lane in range(LANES):  # XXH3_scrambleAcc
                value = (
                    lanes[lane]
                    ^ (lanes[lane] >> np.uint64(47))
                    ^ load64(SECRET, end + 8 * lane)
                )
                lanes[lane] = value * S1
    # The last 64 bytes, which may lie partly in what came before.
    at = np.uint64(size - STRIPE_BYTES)
    add_stripes(
        source + at, _behind(copy, at), secret + np.uint64(end - 7), sums, np.uint64(1)
    )
    value = np.uint64(size) * P1  # XXH3_mergeAccs
    for lane in range(0, LANES, 2):
        first = lanes[lane] ^ load64(SECRET, 11 + 8 * lane)
        value += _folded_product(first, lanes[lane + 1] ^ load64(SECRET, 19 + 8 * lane))
    value = (value ^ (value >> np.uint64(37))) * AVALANCHE
    return value ^ (value >> np.uint64(32))


@kernel
def _behind(copy, bytes_on):  # type: ignore[no-untyped-def]
    """The addresses of a copy and of the next row, some bytes further on."""
    if copy is None:
        return None
    return copy[0] + bytes_on, copy[1] + bytes_on


@intrinsic
def add_stripes(
    typing: Any, source: Any, copy: Any, secret: Any, lanes: Any, count: Any
) -> Any:
    """Add `count` stripes of 64 bytes at an address to eight lanes (XXH3_accumulate).

    All arguments but the number are addresses. `copy` has two, where the stripes are
    copied to and the next row, which the processor begins to load, because it cannot
    predict that address. Without a copy it is None.

    Each lane gets the product of its word's two halves, after the secret, and its
    neighbour's word. The loop is written with LLVM's vectors, which become vector
    instructions of the processor; numba does not vectorise it.
    """
    copies = not isinstance(copy, types.NoneType)
    word = ir.IntType(64)
    vector = ir.VectorType(word, LANES)
    neighbours = ir.Constant(
        ir.VectorType(ir.IntType(32), LANES), [lane ^ 1 for lane in range(LANES)]
    )

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, copy, secret, lanes, count = arguments

        def vector_at(address: Any) -> Any:
            return builder.inttoptr(address, ir.PointerType(vector))

        begin = builder.load(vector_at(lanes), align=8)
        before = builder.block
        loop, end = (
            builder.append_basic_block("stripe"),
            builder.append_basic_block("stripes_end"),
        )
        builder.branch(loop)
        builder.position_at_end(loop)
        number, sums = builder.phi(word), builder.phi(vector)
        at = builder.mul(number, word(STRIPE_BYTES))
        words = builder.load(vector_at(builder.add(source, at)), align=1)
        if copies:
            target, next_source = (
                builder.extract_value(copy, number) for number in range(2)
            )
            builder.store(words, vector_at(builder.add(target, at)), align=1)
            prefetch(builder, builder.add(next_source, at))
        key = builder.load(
            vector_at(builder.add(secret, builder.mul(number, word(8)))), align=1
        )
        keyed = builder.xor(words, key)
        low = builder.and_(keyed, ir.Constant(vector, [0xFFFFFFFF] * LANES))
        high = builder.lshr(keyed, ir.Constant(vector, [32] * LANES))
        added = builder.add(
            builder.shuffle_vector(words, words, neighbours), builder.mul(low, high)
        )
        new_sums, next_number = builder.add(sums, added), builder.add(number, word(1))
        number.add_incoming(word(0), before)
        number.add_incoming(next_number, loop)
        sums.add_incoming(begin, before)
        sums.add_incoming(new_sums, loop)
        builder.cbranch(builder.icmp_unsigned("<", next_number, count), loop, end)
        builder.position_at_end(end)
        builder.store(new_sums, vector_at(lanes), align=8)
        return context.get_dummy_value()

    address = types.uint64
    addresses = types.UniTuple(address, 2) if copies else copy
    return types.void(address, addresses, address, address, address), generate


@inner_kernel
def _folded_product(first, second):  # type: ignore[no-untyped-def]
    """The two halves of a product of 128 bits, by exclusive or (XXH3_mul128_fold64)."""
    return high_half(first, second) ^ first * second


@inner_kernel
def _rotate(value, bits):  # type: ignore[no-untyped-def]
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@inner_kernel
def _round(lane, word):  # type: ignore[no-untyped-def]
    return _rotate(lane + word * P2, 31) * P1


@inner_kernel
def _xxh64(row):  # type: ignore[no-untyped-def]
    size, at = len(row), 0
    if size >= 32:
        a, b, c, d = P1 + P2, P2, np.uint64(0), np.uint64(0) - P1
        while at + 32 <= size:
            a = _round(a, load64(row, at))
            b = _round(b, load64(row, at + 8))
            c = _round(c, load64(row, at + 16))
            d = _round(d, load64(row, at + 24))
            at += 32
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
