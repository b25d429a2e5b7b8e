"""Virtual streams: runs cut from documents that are nowhere written back to back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.mixing.best_fit import best_fit_decreasing, count_bins, longest_first
from gristmill.tokenize.mixing.mix_summary import account, compare
from gristmill.tokenize.mixing.packing import Layout, Packing, TokenStream, cut_runs, end_of, lay_out, make_stream, upto


def words(number: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, (number, 2), dtype=np.uint64)


documents = st.lists(st.integers(0, 30), min_size=1, max_size=12)


@given(documents, st.lists(st.tuples(st.integers(0, 80), st.integers(1, 20)), max_size=5), st.integers(0, 100))
def test_pieces_are_the_documents_that_a_run_goes_through(
    lengths: list[int], runs: list[tuple[int, int]], key: int
) -> None:
    tokens = np.array(lengths)
    stream = make_stream(np.arange(len(tokens)), words(len(tokens), key), tokens, key, 100)
    flat = [(document, copy, offset) for document, copy in zip(stream.document, stream.copy, strict=True)
            for offset in range(lengths[document] + 1)]
    assert stream.tokens == len(flat) >= 100
    at, length = (np.array([run[part] for run in runs], dtype=np.int64) for part in (0, 1))
    pieces = cut_runs(stream, np.arange(len(runs)) * 3, at * 7, at, length)
    for number, (begin, size) in enumerate(runs):
        mine = np.flatnonzero(pieces.place == number * 3)
        cut = [(stream.document[entry], stream.copy[entry], offset + step)
               for entry, offset, part in zip(pieces.entry[mine], pieces.offset[mine], pieces.length[mine], strict=True)
               for step in range(part)]
        assert cut == flat[begin : begin + size]
        assert pieces.start[mine].tolist() == [begin * 7, *(begin * 7 + np.cumsum(pieces.length[mine])[:-1]).tolist()]


@given(documents, st.integers(1, 200), st.integers(0, 100))
def test_every_pass_has_every_document_once_and_the_last_stops_where_enough_is_there(
    lengths: list[int], least: int, key: int
) -> None:
    tokens = np.array(lengths)
    stream = make_stream(np.arange(len(tokens)), words(len(tokens), key), tokens, key, least)
    assert stream.starts[-2] < least <= stream.starts[-1]
    for copy in range(int(stream.copy[-1]) + 1):
        members = stream.document[stream.copy == copy]
        assert len(set(members.tolist())) == len(members)
        assert len(members) == len(tokens) or copy == stream.copy[-1]


@given(documents, st.integers(1, 100), st.integers(1, 100))
def test_a_longer_stream_begins_as_the_shorter_one(lengths: list[int], least: int, key: int) -> None:
    tokens = np.array(lengths)
    short, long = (make_stream(np.arange(len(tokens)), words(len(tokens), key), tokens, key, wanted)
                   for wanted in (least, 3 * least))
    cut = upto(long, least)
    for field in ("starts", "document", "copy"):
        assert np.array_equal(getattr(cut, field), getattr(short, field))


def test_the_order_depends_on_ids_and_key_alone_and_differs_between_passes() -> None:
    ids, tokens = words(50, 1), np.full(50, 3)
    one = make_stream(np.arange(50), ids, tokens, 7, 400)
    shuffle = np.random.default_rng(2).permutation(50)
    other = make_stream(shuffle, ids[shuffle], tokens, 7, 400)
    assert np.array_equal(one.document, other.document)
    assert not np.array_equal(one.document[:50], one.document[50:100])
    assert not np.array_equal(one.document, make_stream(np.arange(50), ids, tokens, 8, 400).document)


LENGTH = 8
PACKINGS = [Packing(LENGTH, best_fit, aligned) for best_fit in (False, True) for aligned in (False, True)]
sizes_of_documents = st.lists(st.integers(1, 30), min_size=1, max_size=25)


def stream_of(sizes: list[int]) -> TokenStream:
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return TokenStream(starts, np.arange(len(sizes)), np.zeros(len(sizes), dtype=np.int32))


def slow_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Look through all bins for the smallest space that is large enough; of equal ones take the last filled."""
    bins: list[list[int]] = []  # space, when it was last filled
    found = [-1] * len(lengths)
    for when, item in enumerate(sorted(range(len(lengths)), key=lambda number: -lengths[number])):
        fitting = [(space, -filled, number) for number, (space, filled) in enumerate(bins) if space >= lengths[item]]
        number = min(fitting)[2] if fitting else len(bins)
        if not fitting:
            bins.append([capacity, when])
        bins[number] = [bins[number][0] - lengths[item], when]
        found[item] = number
    return found


def runs_of(layout: Layout) -> list[list[tuple[int, int]]]:
    """Begin and end of the runs of each row."""
    return [[(int(layout.at[run]), int(layout.at[run] + layout.length[run]))
             for run in range(layout.first[row], layout.first[row + 1])] for row in range(layout.rows)]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 70))
def test_best_fit_is_the_slow_search_through_all_bins(lengths: list[int], capacity: int) -> None:
    bins, used = best_fit_decreasing(np.array(lengths, dtype=np.int32), capacity)
    assert bins.tolist() == slow_best_fit(lengths, capacity)
    assert used == len(set(bins.tolist()))
    filled = np.bincount(bins, np.array(lengths), minlength=used) if lengths else np.zeros(0)
    assert (filled <= capacity).all()
    assert count_bins(np.bincount(lengths, minlength=capacity + 1), capacity) == used
    assert longest_first(np.array(lengths, dtype=np.int32), 70).tolist() == sorted(
        range(len(lengths)), key=lambda number: -lengths[number])


def test_best_fit_prefers_the_fullest_row_and_not_the_first() -> None:
    """6 and 5 open a row each, as both leave too little for the other; 3 fits 5's exactly; 2 fits 6's."""
    bins, used = best_fit_decreasing(np.array([6, 5, 3, 2], dtype=np.int32), 8)
    assert (bins.tolist(), used) == ([0, 1, 1, 0], 2)


@given(sizes_of_documents, st.data())
def test_rows_hold_every_token_once_but_those_that_alignment_drops(sizes: list[int], data: st.DataObject) -> None:
    stream = stream_of(sizes)
    end = data.draw(st.integers(1, stream.tokens))
    begin = data.draw(st.integers(0, end - 1))
    for packing in PACKINGS:
        layout = lay_out(stream, begin, end, packing)
        rows = runs_of(layout)
        assert all(0 < sum(b - a for a, b in row) <= LENGTH for row in rows)
        held = sorted(token for row in rows for a, b in row for token in range(a, b))
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(begin, end))
        if not packing.aligned:
            assert held == list(range(begin, end))
        if not packing.best_fit:
            assert all(sum(b - a for a, b in row) == LENGTH for row in rows[:-1])
        costs = account(stream, begin, end, layout, packing)
        assert costs["tokens"] == len(held)
        assert costs["dropped_tokens"] == end - begin - len(held)
        assert costs["padding_tokens"] == layout.rows * LENGTH - len(held)
        within = [max(0, min(b, end) - max(a, begin)) for a, b in pairwise(stream.starts.tolist())]
        assert costs["documents"] == sum(size > 0 for size in within)
        ends = {b for row in rows for _, b in row}
        cut = [any(a < b < stop for b in ends) for a, stop in pairwise(stream.starts.tolist())]
        assert costs["split_documents"] == sum(cut)
        assert costs["split_tokens"] == sum(size for size, split in zip(within, cut, strict=True) if split)


@given(sizes_of_documents, st.data())
def test_the_packings_that_were_not_chosen_cost_what_laying_them_out_shows(
    sizes: list[int], data: st.DataObject
) -> None:
    stream = stream_of(sizes)
    end = data.draw(st.integers(1, stream.tokens))
    layouts = {packing: lay_out(stream, 0, end, packing) for packing in PACKINGS}
    shown = {packing.name: account(stream, 0, end, layout, packing) for packing, layout in layouts.items()}
    for used, layout in layouts.items():
        assert compare(stream, end, used, layout) == shown


@given(sizes_of_documents)
def test_best_fit_cuts_no_document_that_fits_a_row_and_pads_fewer_rows_than_it_saves(sizes: list[int]) -> None:
    stream = stream_of(sizes)
    layout = lay_out(stream, 0, stream.tokens, Packing(LENGTH, best_fit=True))
    runs = {run for row in runs_of(layout) for run in row}
    for begin, end in zip(stream.starts[:-1].tolist(), stream.starts[1:].tolist(), strict=True):
        assert end - begin > LENGTH or (begin, end) in runs
    assert account(stream, 0, stream.tokens, layout, Packing(LENGTH, True))["split_documents"] == sum(
        size > LENGTH for size in sizes)


@given(sizes_of_documents, st.integers(0, 20))
def test_aligned_rows_begin_with_a_document_and_drop_only_the_rest_of_a_cut_one(sizes: list[int], begin: int) -> None:
    stream = stream_of(sizes)
    begin = min(begin, stream.tokens)
    beginnings = set(stream.starts[:-1].tolist())
    for packing in PACKINGS:
        if not packing.aligned:
            continue
        rows = runs_of(lay_out(stream, begin, stream.tokens, packing))
        assert {row[0][0] for row in rows} <= beginnings
        held = {token for row in rows for a, b in row for token in range(a, b)}
        for start, end in zip(stream.starts[:-1].tolist(), stream.starts[1:].tolist(), strict=True):
            inside = [token in held for token in range(start, end)]
            if start >= begin:
                assert inside[0]  # every document is begun, and what is dropped is its end
                assert inside == sorted(inside, reverse=True)
                assert not packing.best_fit or sum(inside) == min(end - start, LENGTH)


@given(sizes_of_documents, st.integers(0, 12), st.integers(1, 6))
def test_the_end_is_where_the_rows_hold_exactly_the_quota(sizes: list[int], begin: int, rows: int) -> None:
    stream = stream_of(sizes)
    begin = min(begin, stream.tokens)
    for packing in PACKINGS:
        end = end_of(stream, begin, rows * LENGTH, packing)
        if end is None:
            assert lay_out(stream, begin, stream.tokens, packing).tokens < rows * LENGTH or not packing.best_fit
            continue
        layout = lay_out(stream, begin, end, packing)
        assert layout.tokens == rows * LENGTH
        assert layout.rows == rows or packing.best_fit
        assert end_of(stream, begin, 0, packing) == begin


def test_what_packings_cost_is_counted_by_hand() -> None:
    """Documents of 5, 5, 3 and 11 tokens in rows of 8.

    stream: 0-8, 8-16, 16-24 cuts the second (at 8) and the fourth (at 16). best_fit: 8 of the fourth alone, 5 + 3,
    5 + 3 of the fourth. Aligned to documents, the stream crops the second at 8, the fourth at 3 of 11. The best fit
    that is aligned drops 3 of the fourth.
    """
    stream = stream_of([5, 5, 3, 11])
    used = Packing(LENGTH, best_fit=True)
    costs = compare(stream, 24, used, lay_out(stream, 0, 24, used))
    keys = ("rows", "tokens", "padding_tokens", "dropped_tokens", "split_documents", "split_tokens")
    assert {name: tuple(found[key] for key in keys) for name, found in costs.items()} == {
        "stream": (3, 24, 0, 0, 2, 16),
        "stream_aligned": (2, 16, 0, 8, 2, 16),
        "best_fit": (3, 24, 0, 0, 1, 11),
        "best_fit_aligned": (3, 21, 3, 3, 1, 11),
    }
    rows = [[(13, 21)], [(0, 5), (21, 24)], [(5, 10), (10, 13)]]
    assert runs_of(lay_out(stream, 0, 24, Packing(LENGTH, True))) == rows


def test_too_many_documents_for_one_packing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.tokenize.mixing.packing.MOST_DOCUMENTS", 2)
    with pytest.raises(ValueError, match="at most 2 documents of a source at a time, not 3"):
        lay_out(stream_of([1, 2, 3]), 0, 6, Packing(LENGTH, True))
