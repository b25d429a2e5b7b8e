"""Rows that are left out of an order."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.order import Order, OrderWithout


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(lambda counts: sum(counts) > 1),
    st.integers(0, 99),
    st.integers(0, 2),
    st.data(),
)
def test_it_is_the_order_with_the_withheld_rows_taken_out_in_every_epoch(
    counts: list[int], seed: int, epoch: int, data: st.DataObject
) -> None:
    total = sum(counts)
    withheld = data.draw(st.lists(st.integers(0, total - 1), max_size=total - 1, unique=True))
    whole = Order(counts, seed)
    order = OrderWithout(whole, np.array(withheld, dtype=np.int64))
    left = [row for row in whole.rows(np.arange(epoch * total, (epoch + 1) * total)).tolist() if row not in withheld]
    assert order.total == len(left)
    positions = np.arange(epoch * order.total, (epoch + 1) * order.total)
    assert order.rows(positions).tolist() == left
    assert np.array_equal(order.positions(np.array(left), epoch), positions)
    first = data.draw(st.integers(0, order.total))
    count = data.draw(st.integers(0, 2 * order.total))
    assert order.span(first, count).tolist() == order.rows(np.arange(first, first + count)).tolist()
    assert np.array_equal(pickle.loads(pickle.dumps(order)).rows(positions), order.rows(positions))


def test_everything_before_the_first_withheld_row_is_read_as_before() -> None:
    whole = Order([2**36, 2**35], 4)
    positions = np.array([10**9, 10**10, 10**10 + 5])
    order = OrderWithout(whole, whole.rows(positions))
    before = np.arange(10**9 - 3, 10**9)
    assert np.array_equal(order.rows(before), whole.rows(before))
    assert order.rows(np.array([10**9, 10**10 - 1])).tolist() == whole.rows(np.array([10**9 + 1, 10**10 + 1])).tolist()


def test_a_set_with_phases_ends_earlier_and_nothing_left_is_refused() -> None:
    order = OrderWithout(Order.of_phases([[4], [4]], 0), np.array([1, 6]))
    assert sorted(order.rows(np.arange(6)).tolist()) == [0, 2, 3, 4, 5, 7]
    with pytest.raises(ValueError, match="7 rows would be read, but the set with phases has 6"):
        order.rows(np.array([6]))
    with pytest.raises(ValueError, match="row 6 is withheld"):
        order.positions(np.array([6]))
    with pytest.raises(ValueError, match="all 3 rows are withheld"):
        OrderWithout(Order([3], 0), np.arange(3))
