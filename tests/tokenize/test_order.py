from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tokenize import order as order_module
from gristmill.tokenize.order import Order, ReadOnceError, order_key, permute, rank, sources_of_rows, unrank

small_counts = st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any)
seeds = st.integers(-(2**70), 2**70)


def merged(counts: list[int]) -> list[tuple[int, int]]:
    """The definition, in exact fractions."""
    items = [(Fraction(2 * j + 1, 2 * n), s, j) for s, n in enumerate(counts) for j in range(n)]
    return [(s, j) for _, s, j in sorted(items)]


@given(small_counts)
def test_places_are_the_merge_of_all_rows_by_exact_virtual_time(counts: list[int]) -> None:
    expected = merged(counts)
    sources, index = unrank(counts, np.arange(sum(counts)))
    assert list(zip(sources.tolist(), index.tolist(), strict=True)) == expected
    assert rank(counts, sources, index).tolist() == list(range(sum(counts)))


@given(st.lists(st.integers(0, 2**37), min_size=1, max_size=8).filter(any), st.data())
def test_rank_and_unrank_are_exact_for_hundreds_of_billions_of_rows(counts: list[int], data: st.DataObject) -> None:
    total = sum(counts)
    places = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=20))
    sources, index = unrank(counts, np.array(places))
    assert rank(counts, sources, index).tolist() == places
    for place, s, j in zip(places, sources.tolist(), index.tolist(), strict=True):
        exact = j
        for t, n in enumerate(counts):
            if t != s:
                below, rest = divmod((2 * j + 1) * n - counts[s], 2 * counts[s])
                exact += max(0, below + (1 if rest > 0 or t < s else 0))
        assert exact == place


def test_rank_is_exact_where_floating_point_rounds_up_to_the_next_row() -> None:
    """Row n - 1 of n comes at n (n + 1) / n - 1 / 2n of the other source's rows, which a float rounds to n + 1/2."""
    n = 2**38
    assert rank([n + 1, n], np.array(1), np.array(n - 1)) == n - 1 + n
    assert rank([n, n + 1], np.array(0), np.array(n - 1)) == n - 1 + n


@given(small_counts, seeds, st.integers(0, 3))
def test_every_epoch_reads_every_row_exactly_once(counts: list[int], seed: int, epoch: int) -> None:
    total = sum(counts)
    rows = Order(counts, seed).rows(np.arange(epoch * total, (epoch + 1) * total))
    assert sorted(rows.tolist()) == list(range(total))


@given(small_counts, seeds, st.integers(0, 3))
def test_positions_are_where_the_order_reads_a_row(counts: list[int], seed: int, epoch: int) -> None:
    order, total = Order(counts, seed), sum(counts)
    positions = np.arange(epoch * total, (epoch + 1) * total)
    assert np.array_equal(order.positions(order.rows(positions), epoch), positions)


@given(st.lists(st.integers(1, 2**36), min_size=1, max_size=5), seeds, st.data())
def test_positions_are_found_among_hundreds_of_billions_of_rows(
    counts: list[int], seed: int, data: st.DataObject
) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, sum(counts) - 1), min_size=1, max_size=8)))
    order = Order(counts, seed)
    assert order.rows(order.positions(rows, 2)).tolist() == rows.tolist()


@given(small_counts, seeds)
def test_every_prefix_keeps_the_mixture_within_the_stated_bound(counts: list[int], seed: int) -> None:
    total, number = sum(counts), sum(1 for n in counts if n)
    sources, _ = unrank(counts, Order(counts, seed).rows(np.arange(total)))
    for source, n in enumerate(counts):
        share = Fraction(n, total)
        bound = (1 - share) / 2 + share * (number - 1) / 2
        taken = np.cumsum(sources == source).tolist()
        assert all(abs(taken[k] - (k + 1) * share) <= bound for k in range(total))


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_a_permutation_is_a_bijection_and_its_inverse_undoes_it(n: int, key: int) -> None:
    image = permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(image), np.arange(n))
    assert np.array_equal(permute(image, n, key, inverse=True), np.arange(n))


def test_permutations_of_three_are_equally_frequent() -> None:
    """1,200 keys over 6 outcomes: chi-square with 5 degrees of freedom is below 25.7 but once in 10,000."""
    images = [tuple(permute(np.arange(3), 3, order_key(0, "three", k)).tolist()) for k in range(1200)]
    observed = np.unique(images, axis=0, return_counts=True)[1]
    assert len(observed) == 6
    assert ((observed - 200) ** 2 / 200).sum() < 25.7


def test_neighbours_are_torn_apart_over_a_billion_rows() -> None:
    n = 10**9
    image = permute(np.arange(20_000), n, order_key(1, "apart"))
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(image, np.arange(20_000))[0, 1]) < 0.03
    assert np.histogram(image, bins=20, range=(0, n))[0].min() > 850


def test_seeds_and_epochs_differ_and_the_same_seed_does_not() -> None:
    counts, positions = [40, 0, 60], np.arange(100)
    first = Order(counts, 1).rows(positions)
    assert np.array_equal(first, Order(counts, 1).rows(positions))
    assert not np.array_equal(first, Order(counts, 2).rows(positions))
    assert not np.array_equal(first, Order(counts, 1).rows(positions + 100))
    assert np.array_equal(
        Order(counts, 1).rows(np.array([[150], [3]])), [[Order(counts, 1).rows(positions + 100)[50]], [first[3]]]
    )


def test_the_order_of_a_seed_never_changes_between_releases() -> None:
    assert Order([3, 5], 7).rows(np.arange(16)).tolist() == GOLDEN


def by_definition(counts: list[int], seed: int, epoch: int, places: np.ndarray) -> np.ndarray:
    """Rows at places of an epoch, by the vectorised functions, one source after the other."""
    return order_module.by_definition(np.array(counts), seed, 0, epoch, places)


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**37), min_size=1, max_size=6).filter(any), seeds, st.integers(0, 2**20), st.data())
def test_the_compiled_order_is_the_one_that_the_functions_define(
    counts: list[int], seed: int, epoch: int, data: st.DataObject
) -> None:
    total = sum(counts)
    places = np.array(data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=20)))
    order = Order(counts, seed)
    rows = order.rows(places + epoch * total)
    assert rows.tolist() == by_definition(counts, seed, epoch, places).tolist()
    assert (order.positions(rows, epoch) - epoch * total).tolist() == places.tolist()
    assert sources_of_rows([counts], rows).tolist() == unrank(counts, rows)[0].tolist()


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**37), min_size=1, max_size=6).filter(any), seeds, st.integers(0, 2**20), st.data())
def test_rows_of_a_span_are_those_of_its_positions_one_by_one(
    counts: list[int], seed: int, epoch: int, data: st.DataObject
) -> None:
    total = sum(counts)
    first = data.draw(st.integers(0, total - 1))
    places = np.arange(first, min(first + data.draw(st.integers(1, 300)), total))
    found = Order(counts, seed).span(epoch * total + first, len(places))
    assert found.tolist() == by_definition(counts, seed, epoch, places).tolist()


@given(st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2).filter(any), min_size=1, max_size=3), st.data())
def test_a_span_goes_on_into_the_next_phase_and_the_next_epoch(phases: list[list[int]], data: st.DataObject) -> None:
    order = Order.of_phases(phases, 9)
    end = order.total if order.has_phases else 3 * order.total
    first = data.draw(st.integers(0, end))
    count = data.draw(st.integers(0, end - first))
    assert order.span(first, count).tolist() == order.rows(np.arange(first, first + count)).tolist()


def test_the_first_spans_of_a_process_load_no_kernel_and_are_the_same() -> None:
    asked = (
        "from gristmill.tokenize import order; o = order.Order.of_phases([[70, 30], [5, 6]], 3);"
        "print([o.span(90, 8).tolist(), o.span(101, 8).tolist(), len(order.rows_of_span.overloads),"
        "       o.span(90, 8).tolist(), o.span(101, 8).tolist(), len(order.rows_of_span.overloads)])"
    )
    found = json.loads(subprocess.run([sys.executable, "-c", asked], capture_output=True, check=True).stdout)
    assert found[:2] == found[3:5]
    assert (found[2], found[5]) == (0, 1)


def test_a_span_before_the_beginning_or_behind_the_end_of_a_order_with_phases_is_refused() -> None:
    with pytest.raises(ValueError, match="positions start at 0, not -2"):
        Order([5], 0).span(-2, 4)
    with pytest.raises(ValueError, match="7 rows would be read, but the set with phases has 6, and is read once"):
        Order.of_phases([[4], [2]], 0).span(4, 3)


def test_a_span_is_exact_where_floating_point_rounds_up_to_the_next_row() -> None:
    n = 2**38
    for counts in ([n + 1, n], [n, n + 1]):
        assert (
            Order(counts, 1).span(2 * n - 9, 10).tolist()
            == by_definition(counts, 1, 0, np.arange(2 * n - 9, 2 * n + 1)).tolist()
        )


def test_a_million_million_rows_are_ordered_without_storing_anything_per_row() -> None:
    counts = [600_000_000_000, 399_999_999_999, 1]
    tracemalloc.start()
    order = Order(counts, 3)
    positions = np.linspace(0, 10**12 - 1, 500, dtype=np.int64)
    rows = order.rows(positions)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1_000_000
    assert rows.tolist() == by_definition(counts, 3, 0, positions).tolist()
    assert len(set(rows.tolist())) == 500
    assert order.positions(rows).tolist() == positions.tolist()


@settings(max_examples=20)
@given(st.lists(st.integers(1, 2**36), min_size=1, max_size=5), seeds)
def test_a_huge_order_can_be_read_anywhere_without_storing_it(counts: list[int], seed: int) -> None:
    total = sum(counts)
    positions = np.array([0, total - 1, total, 5 * total + total // 2])
    rows = Order(counts, seed).rows(positions)
    assert ((rows >= 0) & (rows < total)).all()
    assert np.array_equal(unrank(counts, rows)[0], unrank(counts, positions % total)[0])


phase_counts = st.integers(1, 5).flatmap(
    lambda sources: st.lists(
        st.lists(st.integers(0, 30), min_size=sources, max_size=sources).filter(any), min_size=1, max_size=4
    )
)


@given(phase_counts, seeds)
def test_phases_are_read_one_after_another_each_whole_and_in_its_own_mixture(
    phases: list[list[int]], seed: int
) -> None:
    order, first = Order.of_phases(phases, seed), 0
    for counts in phases:
        number = sum(counts)
        rows = order.rows(np.arange(first, first + number))
        assert sorted(rows.tolist()) == list(range(first, first + number))
        assert np.array_equal(sources_of_rows(phases, rows), unrank(counts, np.arange(number))[0])
        first += number
    assert first == order.total


@given(phase_counts, seeds, st.randoms(use_true_random=False))
def test_any_positions_of_a_order_with_phases_can_be_asked_for_at_once(
    phases: list[list[int]], seed: int, random: random.Random
) -> None:
    order = Order.of_phases(phases, seed)
    expected = order.rows(np.arange(order.total))
    asked = [random.randrange(order.total) for _ in range(12)]
    assert order.rows(np.array(asked).reshape(3, 4)).tolist() == expected[asked].reshape(3, 4).tolist()
    assert order.positions(expected[asked]).tolist() == asked


def test_one_phase_is_the_order_without_phases_for_all_epochs() -> None:
    positions = np.arange(30)
    assert np.array_equal(Order.of_phases([[3, 5]], 7).rows(positions), Order([3, 5], 7).rows(positions))


def test_two_phases_of_the_same_counts_are_shuffled_differently() -> None:
    rows = Order.of_phases([[100], [100]], 1).rows(np.arange(200))
    assert not np.array_equal(rows[:100], rows[100:] - 100)


def test_a_set_with_phases_has_no_second_epoch() -> None:
    order = Order.of_phases([[3, 1], [0, 4]], 7)
    with pytest.raises(ReadOnceError, match="9 rows would be read, but the set with phases has 8, and is read once"):
        order.rows(np.array([0, 8]))
    with pytest.raises(ReadOnceError, match="16 rows would be read"):
        order.positions(np.array([0]), epoch=1)
    with pytest.raises(ValueError, match=r"at least one row in every phase, not \[4, 0\]"):
        Order.of_phases([[3, 1], [0, 0]], 7)


def test_counts_that_cannot_be_ordered_are_refused() -> None:
    with pytest.raises(ValueError, match="not \\[-1\\]"):
        Order([-1], 0)
    with pytest.raises(ValueError, match="at least one row"):
        Order([0, 0], 0)
    with pytest.raises(ValueError, match="between 0 and 1099511627776"):
        Order([2**40, 1], 0)
    with pytest.raises(ValueError, match="positions start at 0, not -3"):
        Order([4], 0).rows(np.array([-3]))
    with pytest.raises(ValueError, match="places are in \\[0, 4\\)"):
        unrank([4], np.array([4]))


GOLDEN = [7, 3, 5, 1, 0, 4, 6, 2, 5, 3, 0, 6, 7, 2, 1, 4]
