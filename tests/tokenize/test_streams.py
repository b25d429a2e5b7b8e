"""Virtual streams: rows cut from documents that are nowhere written back to back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.mixing.streams import count_split, cut_rows, make_stream


def words(number: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, (number, 2), dtype=np.uint64)


documents = st.lists(st.integers(0, 30), min_size=1, max_size=12)


@given(documents, st.integers(1, 12), st.integers(0, 5), st.integers(0, 100))
def test_rows_are_the_stream_cut_at_their_length(
    lengths: list[int], length: int, rows: int, key: int
) -> None:
    tokens = np.array(lengths)
    stream = make_stream(np.arange(len(tokens)), words(len(tokens), key), tokens, key, rows * length)
    flat = [(document, copy, offset) for document, copy in zip(stream.document, stream.copy, strict=True)
            for offset in range(lengths[document] + 1)]
    assert stream.tokens == len(flat) >= rows * length
    asked = np.random.default_rng(key).permutation(rows)
    pieces = cut_rows(stream, asked, length)
    for place, row in enumerate(asked.tolist()):
        mine = np.flatnonzero(pieces.place == place)
        cut = [(stream.document[entry], stream.copy[entry], offset + step)
               for entry, offset, size in zip(pieces.entry[mine], pieces.offset[mine], pieces.length[mine], strict=True)
               for step in range(size)]
        assert cut == flat[row * length : (row + 1) * length]
        assert pieces.start[mine].tolist() == [0, *np.cumsum(pieces.length[mine])[:-1].tolist()]


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


def test_the_order_depends_on_ids_and_key_alone_and_differs_between_passes() -> None:
    ids, tokens = words(50, 1), np.full(50, 3)
    one = make_stream(np.arange(50), ids, tokens, 7, 400)
    shuffle = np.random.default_rng(2).permutation(50)
    other = make_stream(shuffle, ids[shuffle], tokens, 7, 400)
    assert np.array_equal(one.document, other.document)
    assert not np.array_equal(one.document[:50], one.document[50:100])
    assert not np.array_equal(one.document, make_stream(np.arange(50), ids, tokens, 8, 400).document)


def test_split_documents_are_those_in_several_rows() -> None:
    """Lengths with their ends 4, 4, 6, 2 in rows of 8: the third begins at 8 and ends with row 1; none is split."""
    ids = words(4, 0)
    stream = make_stream(np.arange(4), ids, np.array([3, 3, 3, 3]), 1, 16)
    assert count_split(stream, 2, 8) == 0
    assert count_split(stream, 2, 7) == 2
    assert count_split(stream, 1, 7) == 1
