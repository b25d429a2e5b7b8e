"""Training orders without withheld rows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.shuffle import Order, OrderWithout


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(
        lambda counts: sum(counts) > 1
    ),
    st.integers(0, 99),
    st.integers(0, 2),
    st.data(),
)
def test_order_skips_withheld_rows_in_every_epoch(
    counts: list[int], seed: int, epoch: int, data: st.DataObject
) -> None:
    total = sum(counts)
    withheld = data.draw(
        st.lists(st.integers(0, total - 1), max_size=total - 1, unique=True)
    )
    full_order = Order(counts, seed)
    order = OrderWithout(full_order, np.array(withheld, dtype=np.int64))
    kept = [
        row
        for row in full_order.rows(
            np.arange(epoch * total, (epoch + 1) * total)
        ).tolist()
        if row not in withheld
    ]
    assert order.total == len(kept)
    positions = np.arange(epoch * order.total, (epoch + 1) * order.total)
    assert order.rows(positions).tolist() == kept
    assert np.array_equal(order.positions(np.array(kept), epoch), positions)
    first = data.draw(st.integers(0, order.total))
    count = data.draw(st.integers(0, 2 * order.total))
    assert (
        order.span(first, count).tolist()
        == order.rows(np.arange(first, first + count)).tolist()
    )
    assert np.array_equal(
        pickle.loads(pickle.dumps(order)).rows(positions), order.rows(positions)
    )


def test_rows_before_the_first_withheld_one_keep_their_positions() -> None:
    full_order = Order([2**36, 2**35], 4)
    positions = np.array([10**9, 10**10, 10**10 + 5])
    order = OrderWithout(full_order, full_order.rows(positions))
    before = np.arange(10**9 - 3, 10**9)
    assert np.array_equal(order.rows(before), full_order.rows(before))
    assert (
        order.rows(np.array([10**9, 10**10 - 1])).tolist()
        == full_order.rows(np.array([10**9 + 1, 10**10 + 1])).tolist()
    )


def test_phased_order_is_shorter_and_an_empty_order_is_rejected() -> None:
    order = OrderWithout(Order.of_phases([[4], [4]], 0), np.array([1, 6]))
    assert sorted(order.rows(np.arange(6)).tolist()) == [0, 2, 3, 4, 5, 7]
    with pytest.raises(ValueError, match=r"7 rows .* 6"):
        order.rows(np.array([6]))
    with pytest.raises(ValueError, match="row 6 is withheld"):
        order.positions(np.array([6]))
    with pytest.raises(ValueError, match="all 3 rows are withheld"):
        OrderWithout(Order([3], 0), np.arange(3))
