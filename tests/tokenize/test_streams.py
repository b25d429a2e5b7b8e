"""Virtual streams: runs cut from documents that are nowhere written back to back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.mixing.streams import cut_runs, make_stream, upto


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
