"""Exact shares, and errors that say by how much."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.mixing.quotas import MixError, Supply, largest_remainder, plan_rows

weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(any)


@given(st.integers(0, 10**12), weights)
def test_parts_are_the_shares_rounded_down_or_up_and_sum_exactly(total: int, shares: list[float]) -> None:
    parts = largest_remainder(total, shares)
    assert sum(parts) == total
    for part, weight in zip(parts, shares, strict=True):
        assert abs(part - total * Fraction(weight) / sum(map(Fraction, shares))) < 1


def test_the_largest_remainders_get_the_rest() -> None:
    """10 by 5 : 3 : 1 is 5.56, 3.33, 1.11: the one row left goes to the first."""
    assert largest_remainder(10, [5, 3, 1]) == [6, 3, 1]
    assert largest_remainder(3, [1, 1]) == [2, 1]
    assert largest_remainder(7, [0, 2.5]) == [0, 7]
    with pytest.raises(MixError, match="weights of all sources are 0"):
        largest_remainder(5, [0, 0])


def test_max_epochs_allows_exactly_so_many_tokens() -> None:
    supply = {"a": Supply(1, 2.5, 40)}
    assert plan_rows(100, 10, supply) == {"a": 10}
    with pytest.raises(MixError, match=r"asks for 110 tokens, but 40 tokens x max_epochs 2\.5 fill 100, 10 too few"):
        plan_rows(110, 10, supply)


def test_the_advice_of_an_unreachable_quota_works() -> None:
    supplies = {"a": Supply(0.5, 1, 1000), "b": Supply(0.5, 1, 10_000), "none": Supply(0.0, 1, 0)}
    with pytest.raises(MixError) as caught:
        plan_rows(4000, 10, supplies)
    message = str(caught.value)
    assert "a: weight 0.5 asks for 2000 tokens, but 1000 tokens x max_epochs 1 fill 1000, 1000 too few" in message
    assert "raise its max_epochs to 2, or lower its weight to 0.166" in message
    assert "at most 2000 tokens" in message
    plan_rows(4000, 10, {**supplies, "a": Supply(0.5, 2, 1000)})
    plan_rows(4000, 10, {**supplies, "a": Supply(0.166, 1, 1000)})
    plan_rows(2000, 10, supplies)
    with pytest.raises(MixError):
        plan_rows(2020, 10, supplies)


def test_every_short_source_is_named() -> None:
    with pytest.raises(MixError) as caught:
        plan_rows(1000, 10, {"a": Supply(1, 1, 10), "b": Supply(1, 1, 20), "c": Supply(1, 1, 9000),
                             "empty": Supply(1, 1, 0)})
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == ["a", "b", "empty"]
    assert "no document of it is left" in lines[3]


def test_less_than_a_row_is_refused() -> None:
    with pytest.raises(MixError, match=r"mix\.tokens is 9, which is less than one row of 10 tokens"):
        plan_rows(9, 10, {"a": Supply(1, 1, 1000)})
