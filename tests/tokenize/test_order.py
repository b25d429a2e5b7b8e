from __future__ import annotations

import random
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tokenize.shuffle import (
    Order,
    ReadOnceError,
    order_key,
    permute,
    rank,
    sources_of_rows,
)
from tests.tokenize import order_definition
from tests.tokenize.order_definition import by_definition, unrank

small_counts = st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any)
seeds = st.integers(-(2**70), 2**70)


def merged(counts: list[int]) -> list[tuple[int, int]]:
    """Merge all rows by their virtual time, in exact fractions."""
    items = [
        (Fraction(2 * j + 1, 2 * n), s, j)
        for s, n in enumerate(counts)
        for j in range(n)
    ]
    return [(s, j) for _, s, j in sorted(items)]


@pytest.mark.slow
@given(small_counts)
def test_rank_and_unrank_merge_rows_by_virtual_time(counts: list[int]) -> None:
    expected, places = merged(counts), range(sum(counts))
    assert [unrank(counts, place) for place in places] == expected
    assert [order_definition.rank(counts, *row) for row in expected] == [*places]


def test_rank_is_exact_where_floats_would_round_up() -> None:
    """Row n - 1 of n comes at n (n + 1) / n - 1 / 2n of the other source's rows, which
    a float rounds to n + 1/2.
    """
    n = 2**38
    for counts, source in (([n + 1, n], 1), ([n, n + 1], 0)):
        assert rank(counts, source, np.array([n - 1])).tolist() == [2 * n - 1]
        assert order_definition.rank(counts, source, n - 1) == 2 * n - 1


@given(small_counts, seeds, st.integers(0, 3))
def test_every_epoch_reads_every_row_exactly_once(
    counts: list[int], seed: int, epoch: int
) -> None:
    total = sum(counts)
    rows = Order(counts, seed).rows(np.arange(epoch * total, (epoch + 1) * total))
    assert sorted(rows.tolist()) == list(range(total))


@given(small_counts, seeds, st.integers(0, 3))
def test_positions_invert_rows(counts: list[int], seed: int, epoch: int) -> None:
    order, total = Order(counts, seed), sum(counts)
    positions = np.arange(epoch * total, (epoch + 1) * total)
    assert np.array_equal(order.positions(order.rows(positions), epoch), positions)


@pytest.mark.slow
@given(small_counts, seeds)
def test_every_prefix_keeps_the_mixture_within_the_stated_bound(
    counts: list[int], seed: int
) -> None:
    total, number = sum(counts), sum(1 for n in counts if n)
    sources = sources_of_rows([counts], Order(counts, seed).rows(np.arange(total)))
    for source, n in enumerate(counts):
        share = Fraction(n, total)
        bound = (1 - share) / 2 + share * (number - 1) / 2
        rows_so_far = np.cumsum(sources == source).tolist()
        assert all(abs(rows_so_far[k] - (k + 1) * share) <= bound for k in range(total))


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(n: int, key: int) -> None:
    image = permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(image), np.arange(n))
    assert np.array_equal(order_definition.permute(np.arange(n), n, key), image)


@pytest.mark.slow
def test_permutations_of_three_are_equally_frequent() -> None:
    """1,200 keys over 6 outcomes: chi-square with 5 degrees of freedom exceeds 25.7
    once in 10,000.
    """
    images = [
        tuple(permute(np.arange(3), 3, order_key(0, "three", k)).tolist())
        for k in range(1200)
    ]
    observed = np.unique(images, axis=0, return_counts=True)[1]
    assert len(observed) == 6
    assert ((observed - 200) ** 2 / 200).sum() < 25.7


def test_permutation_separates_neighbours_over_a_billion_rows() -> None:
    n = 10**9
    image = permute(np.arange(20_000), n, order_key(1, "apart"))
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(image, np.arange(20_000))[0, 1]) < 0.03
    assert np.histogram(image, bins=20, range=(0, n))[0].min() > 850


def test_order_depends_on_seed_and_epoch_only() -> None:
    counts, positions = [40, 0, 60], np.arange(100)
    first = Order(counts, 1).rows(positions)
    assert np.array_equal(first, Order(counts, 1).rows(positions))
    assert not np.array_equal(first, Order(counts, 2).rows(positions))
    assert not np.array_equal(first, Order(counts, 1).rows(positions + 100))
    assert np.array_equal(
        Order(counts, 1).rows(np.array([[150], [3]])),
        [[Order(counts, 1).rows(positions + 100)[50]], [first[3]]],
    )


def test_order_of_a_seed_is_golden() -> None:
    assert Order([3, 5], 7).rows(np.arange(16)).tolist() == GOLDEN


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**37), min_size=1, max_size=6).filter(any),
    seeds,
    st.integers(0, 2**20),
    st.data(),
)
def test_compiled_order_equals_its_definition(
    counts: list[int], seed: int, epoch: int, data: st.DataObject
) -> None:
    total = sum(counts)
    places = np.array(
        data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=20))
    )
    order = Order(counts, seed)
    rows = order.rows(places + epoch * total)
    assert rows.tolist() == by_definition(counts, seed, epoch, places)
    assert (order.positions(rows, epoch) - epoch * total).tolist() == places.tolist()
    assert sources_of_rows([counts], rows).tolist() == [
        unrank(counts, row)[0] for row in rows.tolist()
    ]


@pytest.mark.slow
@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**37), min_size=1, max_size=6).filter(any),
    seeds,
    st.integers(0, 2**20),
    st.data(),
)
def test_span_equals_the_rows_of_its_positions(
    counts: list[int], seed: int, epoch: int, data: st.DataObject
) -> None:
    total = sum(counts)
    first = data.draw(st.integers(0, total - 1))
    places = np.arange(first, min(first + data.draw(st.integers(1, 300)), total))
    rows = Order(counts, seed).span(epoch * total + first, len(places))
    assert rows.tolist() == by_definition(counts, seed, epoch, places)


@given(
    st.lists(
        st.lists(st.integers(0, 9), min_size=2, max_size=2).filter(any),
        min_size=1,
        max_size=3,
    ),
    st.data(),
)
def test_span_crosses_phases_and_epochs(
    phases: list[list[int]], data: st.DataObject
) -> None:
    order = Order.of_phases(phases, 9)
    end = order.total if order.has_phases else 3 * order.total
    first = data.draw(st.integers(0, end))
    count = data.draw(st.integers(0, end - first))
    assert (
        order.span(first, count).tolist()
        == order.rows(np.arange(first, first + count)).tolist()
    )


def test_span_outside_a_phased_order_is_rejected() -> None:
    with pytest.raises(ValueError, match="-2"):
        Order([5], 0).span(-2, 4)
    with pytest.raises(ValueError, match=r"7 rows .* 6"):
        Order.of_phases([[4], [2]], 0).span(4, 3)


def test_span_is_exact_where_floats_would_round_up() -> None:
    n = 2**38
    for counts in ([n + 1, n], [n, n + 1]):
        assert Order(counts, 1).span(2 * n - 9, 10).tolist() == by_definition(
            counts, 1, 0, np.arange(2 * n - 9, 2 * n + 1)
        )


def test_order_of_a_trillion_rows_stores_nothing_per_row() -> None:
    counts = [600_000_000_000, 399_999_999_999, 1]
    tracemalloc.start()
    order = Order(counts, 3)
    positions = np.linspace(0, 10**12 - 1, 500, dtype=np.int64)
    rows = order.rows(positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert rows.tolist() == by_definition(counts, 3, 0, positions)
    assert len(set(rows.tolist())) == 500
    assert order.positions(rows).tolist() == positions.tolist()


phase_counts = st.integers(1, 5).flatmap(
    lambda sources: st.lists(
        st.lists(st.integers(0, 30), min_size=sources, max_size=sources).filter(any),
        min_size=1,
        max_size=4,
    )
)


@pytest.mark.slow
@given(phase_counts, seeds)
def test_phases_are_read_in_turn_each_in_its_own_mixture(
    phases: list[list[int]], seed: int
) -> None:
    order, first = Order.of_phases(phases, seed), 0
    for counts in phases:
        number = sum(counts)
        rows = order.rows(np.arange(first, first + number))
        assert sorted(rows.tolist()) == list(range(first, first + number))
        sources = sources_of_rows(phases, rows).tolist()
        assert sources == [source for source, _ in merged(counts)]
        first += number
    assert first == order.total


@given(phase_counts, seeds, st.randoms(use_true_random=False))
def test_phased_order_maps_arrays_of_positions(
    phases: list[list[int]], seed: int, random: random.Random
) -> None:
    order = Order.of_phases(phases, seed)
    expected = order.rows(np.arange(order.total))
    positions = [random.randrange(order.total) for _ in range(12)]
    assert (
        order.rows(np.array(positions).reshape(3, 4)).tolist()
        == expected[positions].reshape(3, 4).tolist()
    )
    assert order.positions(expected[positions]).tolist() == positions


def test_single_phase_equals_an_order_without_phases() -> None:
    positions = np.arange(30)
    assert np.array_equal(
        Order.of_phases([[3, 5]], 7).rows(positions), Order([3, 5], 7).rows(positions)
    )


def test_equal_phases_are_shuffled_differently() -> None:
    rows = Order.of_phases([[100], [100]], 1).rows(np.arange(200))
    assert not np.array_equal(rows[:100], rows[100:] - 100)


def test_phased_order_has_no_second_epoch() -> None:
    order = Order.of_phases([[3, 1], [0, 4]], 7)
    with pytest.raises(ReadOnceError, match=r"9 rows .* 8"):
        order.rows(np.array([0, 8]))
    with pytest.raises(ReadOnceError, match=r"16 rows .* 8"):
        order.positions(np.array([0]), epoch=1)
    with pytest.raises(
        ValueError, match=r"at least one row in every phase, not \[4, 0\]"
    ):
        Order.of_phases([[3, 1], [0, 0]], 7)


def test_invalid_counts_and_positions_are_rejected() -> None:
    with pytest.raises(ValueError, match="not \\[-1\\]"):
        Order([-1], 0)
    with pytest.raises(ValueError, match="at least one row"):
        Order([0, 0], 0)
    with pytest.raises(ValueError, match="between 0 and 1099511627776"):
        Order([2**40, 1], 0)
    with pytest.raises(ValueError, match="-3"):
        Order([4], 0).rows(np.array([-3]))


GOLDEN = [7, 3, 5, 1, 0, 4, 6, 2, 5, 3, 0, 6, 7, 2, 1, 4]
