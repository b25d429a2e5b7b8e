"""Whole rows from exact ones: every cell, line and column rounded down or up."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.mixing.rounding import round_table


def largest_remainder(total: int, weights: list[Fraction]) -> list[int]:
    """The method of Hamilton, as it is defined."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [floor(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in by_remainder[: total - sum(parts)]:
        parts[number] += 1
    return parts


weights = st.fractions(0, 10, max_denominator=50)
line = st.lists(weights, min_size=1, max_size=7).filter(any)


@st.composite
def tables(draw: st.DrawFn) -> list[list[Fraction]]:
    """Exact rows of some stages, each with a whole sum."""
    sources = draw(st.integers(1, 6))
    lines = draw(st.lists(st.lists(weights, min_size=sources, max_size=sources).filter(any), min_size=1, max_size=5))
    return [_scaled(parts, draw(st.integers(0, 50))) for parts in lines]


def _scaled(parts: list[Fraction], total: int) -> list[Fraction]:
    return [part * total / sum(parts) for part in parts]


@given(tables())
def test_cells_lines_and_columns_are_rounded_down_or_up(table: list[list[Fraction]]) -> None:
    rounded = round_table(table)
    for exact, whole in zip(table, rounded, strict=True):
        assert sum(whole) == sum(exact)
        assert all(abs(number - part) < 1 for number, part in zip(whole, exact, strict=True))
    for exact_column, column in zip(zip(*table, strict=True), zip(*rounded, strict=True), strict=True):
        assert floor(sum(exact_column)) <= sum(column) <= ceil(sum(exact_column))


@given(st.integers(0, 10**12), line)
def test_a_single_stage_is_rounded_by_the_largest_remainders(total: int, parts: list[Fraction]) -> None:
    assert round_table([_scaled(parts, total)]) == [largest_remainder(total, parts)]


def test_the_largest_remainders_get_the_rest() -> None:
    """10 by 5 : 3 : 1 is 5.56, 3.33, 1.11: the one row left goes to the first; of equals the first gets it."""
    assert round_table([_scaled([Fraction(5), Fraction(3), Fraction(1)], 10)]) == [[6, 3, 1]]
    assert round_table([_scaled([Fraction(1), Fraction(1)], 3)]) == [[2, 1]]


def test_two_stages_with_halves_share_the_rounding() -> None:
    """1.5 and 1.5 in both stages: each source's sum is 3, so that it has its second row once."""
    half = [Fraction(3, 2), Fraction(3, 2)]
    assert round_table([half, half]) == [[2, 1], [1, 2]]


def test_a_stage_with_a_part_of_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a stage has 1\.5 rows, which is no whole number"):
        round_table([[Fraction(3, 2)]])
