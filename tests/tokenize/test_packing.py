"""Rows of a stream packed segment by segment, against packing all of it at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gristmill.tokenize.packing.best_fit import (
    best_fit_decreasing,
    bin_of,
    deal_out,
)
from gristmill.tokenize.packing.packing import (
    Packing,
    RowCounts,
    cut,
)
from gristmill.tokenize.packing.packing_cost import PackingCost

LENGTH = 8
PACKINGS = [Packing(LENGTH, best_fit) for best_fit in (False, True)]
sizes_of_documents = st.lists(st.integers(1, 30), min_size=1, max_size=25)


def starts_of(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def segments_of(starts: np.ndarray, borders: list[int]) -> list[np.ndarray]:
    """Cut a stream of documents into segments at any borders."""
    places = sorted({0, len(starts) - 1, *(border % len(starts) for border in borders)})
    return [starts[first : last + 1] for first, last in pairwise(places)]


def slow_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Search all bins for the smallest sufficient space; of equal ones take the last
    filled.
    """
    bins: list[list[int]] = []  # space, when it was last filled
    bin_of_item = [-1] * len(lengths)
    for step, item in enumerate(
        sorted(range(len(lengths)), key=lambda number: -lengths[number])
    ):
        fitting = [
            (space, -filled, number)
            for number, (space, filled) in enumerate(bins)
            if space >= lengths[item]
        ]
        number = min(fitting)[2] if fitting else len(bins)
        if not fitting:
            bins.append([capacity, step])
        bins[number] = [bins[number][0] - lengths[item], step]
        bin_of_item[item] = number
    return bin_of_item


@dataclass(frozen=True)
class PackedStream:
    """Rows of (begin, end) in the stream, and their counts."""

    rows: list[list[tuple[int, int]]]
    counts: RowCounts


def lay_out(
    segments: list[np.ndarray], ends: list[int], packing: Packing
) -> PackedStream:
    """Count the segments, then cut them, as the stage does."""
    counts, before = RowCounts(ends, packing), []
    for starts in segments:
        before.append(counts.places())
        counts.add(starts)
    rows: dict[int, list[tuple[int, int]]] = {}
    for starts, places in zip(segments, before, strict=True):
        if packing.best_fit:
            pieces = [
                cut(starts, begin, end, LENGTH, places, phase, dealing)
                for phase, ((begin, end), dealing) in enumerate(
                    zip(pairwise([0, *ends]), counts.dealings(), strict=True)
                )
            ]
        else:
            pieces = [cut(starts, 0, ends[-1], LENGTH)]
        for run in pieces:
            for row, entry, offset, length in zip(
                run.row, run.entry, run.offset, run.length, strict=True
            ):
                begin_ = int(starts[entry] + offset)
                rows.setdefault(int(row), []).append((begin_, begin_ + int(length)))
    assert sorted(rows) == list(range(len(rows)))
    return PackedStream([rows[row] for row in range(len(rows))], counts)


def slow_rows(
    sizes: list[int], end: int, packing: Packing
) -> list[list[tuple[int, int]]]:
    """Return the rows of the tokens [0, end) by definition, with all documents in
    memory.
    """
    parts = [
        (begin, min(stop, end))
        for begin, stop in pairwise(starts_of(sizes).tolist())
        if begin < end
    ]
    if packing.best_fit:
        full_rows = [
            [(first, first + LENGTH)]
            for begin, stop in parts
            for first in range(begin, stop - LENGTH + 1, LENGTH)
        ]
        remainders = [
            (stop - (stop - begin) % LENGTH, stop)
            for begin, stop in parts
            if (stop - begin) % LENGTH
        ]
        bins = slow_best_fit([stop - begin for begin, stop in remainders], LENGTH)
        return full_rows + [
            [
                remainder
                for remainder, bin_number in zip(remainders, bins, strict=True)
                if bin_number == number
            ]
            for number in range(max(bins, default=-1) + 1)
        ]
    rows = [
        [(max(begin, row), min(stop, row + LENGTH)) for begin, stop in parts]
        for row in range(0, end, LENGTH)
    ]
    return [[(begin, stop) for begin, stop in row if begin < stop] for row in rows]


@pytest.mark.slow
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 70))
def test_best_fit_equals_a_search_of_all_bins(
    lengths: list[int], capacity: int
) -> None:
    bins, used = best_fit_decreasing(np.array(lengths, dtype=np.int32), capacity)
    assert bins.tolist() == slow_best_fit(lengths, capacity)
    assert used == len(set(bins.tolist()))
    filled = (
        np.bincount(bins, np.array(lengths), minlength=used) if lengths else np.zeros(0)
    )
    assert (filled <= capacity).all()
    begins, dealt, dealt_bins = deal_out(
        np.bincount(lengths, minlength=capacity + 1), capacity
    )
    assert dealt_bins == used
    ranks = dict.fromkeys(lengths, 0)
    for length, expected in zip(lengths, bins.tolist(), strict=True):
        assert bin_of(begins, dealt, capacity, length, ranks[length]) == expected
        ranks[length] += 1


def test_best_fit_prefers_the_fullest_row() -> None:
    """6 and 5 each open a row; 3 fits that of 5 exactly, 2 that of 6."""
    bins, used = best_fit_decreasing(np.array([6, 5, 3, 2], dtype=np.int32), 8)
    assert (bins.tolist(), used) == ([0, 1, 1, 0], 2)


def test_dealing_billions_of_items_takes_little_memory() -> None:
    """Up to a billion items of each length, in rows of 2,048."""
    counts = np.random.default_rng(3).integers(0, 10**9, 2049)
    begins, dealt, bins = deal_out(counts, 2048)
    assert len(dealt) < 20 * 2048
    tokens = int((counts * np.arange(2049)).sum())
    assert tokens / 2048 <= bins < 1.01 * tokens / 2048
    assert 0 <= bin_of(begins, dealt, 2048, 700, int(counts[700]) - 1) < bins


borders_of_segments = st.lists(st.integers(0, 25), max_size=4)


@pytest.mark.slow
@given(sizes_of_documents, borders_of_segments, st.data())
def test_rows_do_not_depend_on_segments(
    sizes: list[int], borders: list[int], data: st.DataObject
) -> None:
    starts = starts_of(sizes)
    end = data.draw(st.integers(1, int(starts[-1])))
    for packing in PACKINGS:
        laid = lay_out(segments_of(starts, borders), [end], packing)
        assert laid.rows == slow_rows(sizes, end, packing)
        assert all(0 < sum(b - a for a, b in row) <= LENGTH for row in laid.rows)


@given(sizes_of_documents, borders_of_segments, st.data())
def test_cost_of_a_packing_equals_that_of_its_rows(
    sizes: list[int], borders: list[int], data: st.DataObject
) -> None:
    starts = starts_of(sizes)
    end = data.draw(st.integers(1, int(starts[-1])))
    within = [
        max(0, min(stop, end) - begin) for begin, stop in pairwise(starts.tolist())
    ]
    for packing in PACKINGS:
        rows = slow_rows(sizes, end, packing)
        ends = {stop for row in rows for _, stop in row}
        split = [
            any(begin < place < stop for place in ends)
            for begin, stop in pairwise(starts.tolist())
        ]
        counts = lay_out(segments_of(starts, borders), [end], packing).counts
        assert counts.cost() == PackingCost(
            rows=len(rows),
            tokens=end,
            padding_tokens=len(rows) * LENGTH - end,
            documents=sum(size > 0 for size in within),
            split_documents=sum(split),
            split_tokens=sum(
                size for size, is_split in zip(within, split, strict=True) if is_split
            ),
        )
        if packing.best_fit:
            assert counts.rows() == [len(rows)]


@given(
    sizes_of_documents,
    borders_of_segments,
    st.lists(st.integers(0, 6), min_size=1, max_size=3).filter(any),
)
def test_every_phase_fills_its_quota_in_its_own_rows(
    sizes: list[int], borders: list[int], rows: list[int]
) -> None:
    starts = starts_of(sizes)
    segments = segments_of(starts, borders)
    ends = (np.cumsum(rows) * LENGTH).tolist()
    assume(ends[-1] <= starts[-1])
    for packing in PACKINGS:
        laid = lay_out(segments, ends, packing)
        tokens_per_row = [sum(b - a for a, b in row) for row in laid.rows]
        per_phase = laid.counts.rows() if packing.best_fit else rows
        borders_of_phases = np.cumsum([0, *per_phase]).tolist()
        assert len(laid.rows) == borders_of_phases[-1]
        for phase, (first, last) in enumerate(pairwise(borders_of_phases)):
            assert sum(tokens_per_row[first:last]) == rows[phase] * LENGTH
            begin = 0 if not phase else ends[phase - 1]
            assert all(
                begin <= a and b <= ends[phase]
                for row in laid.rows[first:last]
                for a, b in row
            )
        cost = laid.counts.cost()
        assert (cost.rows, cost.tokens) == (len(laid.rows), sum(tokens_per_row))
        run_ends = {b for row in laid.rows for _, b in row}
        assert cost.split_documents == sum(
            any(a < b < stop for b in run_ends) for a, stop in pairwise(starts.tolist())
        )


@given(sizes_of_documents)
def test_best_fit_splits_only_documents_longer_than_a_row(sizes: list[int]) -> None:
    starts = starts_of(sizes)
    laid = lay_out([starts], [int(starts[-1])], Packing(LENGTH, best_fit=True))
    runs = {run for row in laid.rows for run in row}
    for begin, end in pairwise(starts.tolist()):
        assert end - begin > LENGTH or (begin, end) in runs
    assert laid.counts.cost().split_documents == sum(size > LENGTH for size in sizes)


def test_costs_of_packings_are_derived_by_hand() -> None:
    """Documents of 5, 5, 3 and 11 tokens in rows of 8.

    stream: 0-8, 8-16, 16-24 cuts the second (at 8) and the fourth (at 16). best_fit: 8
    of the fourth alone, 5 + 3, 5 + 3 of the fourth.
    """
    starts = starts_of([5, 5, 3, 11])
    stream, best_fit = (lay_out([starts], [24], packing) for packing in PACKINGS)
    cost = PackingCost(
        rows=3,
        tokens=24,
        padding_tokens=0,
        documents=4,
        split_documents=2,
        split_tokens=16,
    )
    assert stream.counts.cost() == cost
    assert best_fit.counts.cost() == replace(cost, split_documents=1, split_tokens=11)
    assert best_fit.rows == [[(13, 21)], [(0, 5), (21, 24)], [(5, 10), (10, 13)]]
