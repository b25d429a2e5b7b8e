"""Radix sort of distinct hashes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.text.hashing import FEW, sort_distinct

hashes = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(
    st.one_of(
        st.lists(hashes, max_size=2 * FEW),
        st.lists(st.integers(0, 300), max_size=8 * FEW),
    )
)
def test_distinct_values_are_sorted_to_the_front(values: list[int]) -> None:
    array = np.array(values, np.uint32)
    count = sort_distinct(array, np.empty(len(values), np.uint32))
    assert array[:count].tolist() == sorted(set(values))


@pytest.mark.parametrize("size", [FEW, FEW + 1, 100_000])
def test_every_byte_is_sorted(size: int) -> None:
    array = np.random.default_rng(size).integers(0, 2**32, size, np.uint32)
    expected = np.unique(array)
    count = sort_distinct(array, np.empty(size, np.uint32))
    np.testing.assert_array_equal(array[:count], expected)
