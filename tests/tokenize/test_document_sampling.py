"""Orders of drawn documents."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.document_sampling import (
    LARGEST_BUCKET,
    draw,
    drawn_order,
    order_below,
    order_of_spread,
    ordered_by,
)
from gristmill.tokenize.shuffle import mix_bits

columns = st.integers(0, 60).flatmap(
    lambda number: st.tuples(
        *(
            st.lists(st.integers(0, most), min_size=number, max_size=number)
            for most in (20, 3, 2)
        )
    )
)


@given(columns)
def test_order_by_columns_is_lexicographic(
    given_columns: tuple[list[int], list[int], list[int]],
) -> None:
    arrays = [np.array(column, dtype=np.uint64) for column in given_columns]
    expected = sorted(
        range(len(given_columns[0])),
        key=lambda k: tuple(column[k] for column in given_columns),
    )
    assert ordered_by(*arrays).tolist() == expected
    rows = np.arange(len(expected))[::-1]
    assert (
        ordered_by(
            arrays[0], *(array[::-1] for array in arrays[1:]), rows=rows
        ).tolist()
        == expected
    )
    assert ordered_by(arrays[0]).tolist() == sorted(
        range(len(expected)), key=lambda k: given_columns[0][k]
    )


def test_documents_are_drawn_in_the_order_of_their_hashes() -> None:
    words = np.random.default_rng(3).integers(0, 2**64, (500, 2), dtype=np.uint64)
    order = drawn_order(words, 7)
    assert (np.diff(draw(words, 7)[order].astype(object)) > 0).all()
    key = np.uint64(7)
    assert (
        draw(words, 7).tolist()
        == mix_bits(mix_bits(words[:, 0], key) ^ words[:, 1], key).tolist()
    )
    assert sorted(order.tolist()) == list(range(500))


@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=40), st.integers(0, 2 * LARGEST_BUCKET)
)
def test_keys_are_ordered_whether_spread_or_sharing_a_prefix(
    keys: list[int], alike: int
) -> None:
    given_keys = np.array([*keys, *range(alike), *keys], dtype=np.uint64)
    order, ordered = order_of_spread(given_keys)
    assert order.tolist() == sorted(
        range(len(given_keys)), key=given_keys.tolist().__getitem__
    )
    assert ordered.tolist() == sorted(given_keys.tolist())


@given(
    st.integers(0, 2**40).flatmap(
        lambda end: st.tuples(st.just(end), st.lists(st.integers(0, end), max_size=30))
    )
)
def test_numbers_below_an_end_are_ordered(drawn: tuple[int, list[int]]) -> None:
    end, numbers = drawn
    order, ordered = order_below(np.array(numbers, dtype=np.int64), end)
    assert order.tolist() == sorted(range(len(numbers)), key=numbers.__getitem__)
    assert ordered.tolist() == sorted(numbers)
