from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.packed_files import sums_name
from gristmill.tokenize.row_bytes import row_checksums


def test_checksums_are_those_that_the_specification_lists() -> None:
    """XXH64 with seed 0 of "a" and "abc" (as xxhsum -H64 prints them)."""
    assert [hex(row_checksums(np.frombuffer(text, np.uint8)[None])[0]) for text in (b"a", b"abc")] == [
        "0xd24ec4f1a98c6e5b",
        "0x44bc2cf5ad770999",
    ]
    assert sums_name("train-00003.bin") == "train-00003.sums"
    assert row_checksums(np.empty((0, 8), dtype="<u2")).shape == (0,)


@given(st.integers(1, 200), st.integers(1, 4), st.sampled_from(["<u2", "<u4"]), st.integers(0, 2**32))
def test_each_row_s_checksum_is_the_library_s(length: int, rows: int, dtype: str, seed: int) -> None:
    xxhash = pytest.importorskip("xxhash")
    tokens = np.random.default_rng(seed).integers(0, 60_000, (rows, length)).astype(dtype)
    assert row_checksums(tokens).tolist() == [xxhash.xxh64_intdigest(row.tobytes()) for row in tokens]
    if length > 1:
        assert row_checksums(tokens[:, ::-1]).tolist() == [
            xxhash.xxh64_intdigest(row[::-1].tobytes()) for row in tokens
        ]
