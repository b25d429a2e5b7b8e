from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.packed_files import sums_name
from gristmill.tokenize.row_bytes import (
    ALL_THERE,
    DAMAGED,
    NO_SUCH_ROW,
    gather_mapped,
    row_checksums,
)


def test_checksums_equal_published_xxh64_values() -> None:
    """XXH64 with seed 0 of "a" and "abc", as printed by xxhsum -H64."""
    assert [
        hex(row_checksums(np.frombuffer(text, np.uint8)[None])[0])
        for text in (b"a", b"abc")
    ] == [
        "0xd24ec4f1a98c6e5b",
        "0x44bc2cf5ad770999",
    ]
    assert sums_name("train-00003.bin") == "train-00003.sums"
    assert row_checksums(np.empty((0, 8), dtype="<u2")).shape == (0,)


def _digest(row: np.ndarray) -> int:
    xxhash = pytest.importorskip("xxhash")
    content = row.tobytes()
    digest: int = (
        xxhash.xxh3_64_intdigest(content)
        if len(content) > 240
        else xxhash.xxh64_intdigest(content)
    )
    return digest


@pytest.mark.parametrize(
    "length", [1, 31, 120, 121, 128, 511, 512, 513, 544, 1024, 2049]
)
@given(st.integers(1, 4), st.sampled_from(["<u2", "<u4"]), st.integers(0, 2**32))
def test_row_checksums_equal_those_of_xxhash(
    length: int, rows: int, dtype: str, seed: int
) -> None:
    tokens = (
        np.random.default_rng(seed).integers(0, 60_000, (rows, length)).astype(dtype)
    )
    assert row_checksums(tokens).tolist() == [_digest(row) for row in tokens]
    assert row_checksums(tokens[:, ::-1]).tolist() == [
        _digest(row[::-1]) for row in tokens
    ]


@pytest.mark.parametrize("length", [8, 241, 1500])
def test_gathered_rows_are_copied_and_verified(length: int) -> None:
    shards = [
        np.random.default_rng(seed).integers(0, 256, (3, length)).astype(np.uint8)
        for seed in range(2)
    ]
    sums = [row_checksums(shard) for shard in shards]
    addresses = np.array([shard.ctypes.data for shard in shards], np.uint64)
    sum_addresses = np.array([part.ctypes.data for part in sums], np.uint64)
    ends, rows, copy = (
        np.array([3, 6]),
        np.array([5, 0, 2, 3, 3]),
        np.empty((5, length), np.uint8),
    )
    assert gather_mapped(addresses, sum_addresses, ends, rows, copy) == ALL_THERE
    assert (copy == np.concatenate(shards)[rows]).all()
    shards[0][2, length - 1] ^= 1
    assert gather_mapped(addresses, sum_addresses, ends, rows, copy) == DAMAGED - 2
    assert (
        gather_mapped(addresses, sum_addresses, ends, np.array([1, 6]), copy[:2])
        == NO_SUCH_ROW
    )
    addresses[1] = 0
    assert (
        gather_mapped(addresses, sum_addresses, ends, np.array([1, 4]), copy[:2]) == 1
    )
