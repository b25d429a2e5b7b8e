"""Packing token lists that are in memory, by the rules of the mixture: for loops that
make their rows themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gristmill.tokenize.mixing.best_fit import best_fit_rows
from gristmill.tokenize.packed_files import PADDING


@dataclass(frozen=True)
class PackedDocuments:
    """Rows of R times L tokens, and whose they are.

    Attributes:
        tokens: (R, L) int64.
        positions: (R, L) int64, each token's number within its piece of a document,
            PADDING (-1) where there is none: a 0 begins a piece.
        documents: (R, L) int64, the number of each token's document, PADDING where
            there is none.
    """

    tokens: np.ndarray
    positions: np.ndarray
    documents: np.ndarray

    @property
    def fill(self) -> float:
        """The share of all places that hold tokens of documents."""
        return float((self.positions != PADDING).mean()) if self.positions.size else 0.0


def pack(
    documents: Sequence[Sequence[int] | np.ndarray],
    sequence_length: int,
    method: Literal["best_fit", "stream"] = "best_fit",
    pad: int = 0,
) -> PackedDocuments:
    """Pack documents into rows of one length; every token lies in one row, in the order
    of its document.

    Args:
        documents: token ids of each; an end of text is theirs to have. Empty ones lie
            in no row.
        sequence_length: L, tokens per row.
        method: "best_fit": no document of at most L tokens is cut; longer ones are cut
            into whole rows and a rest, and the pieces put together, longest first, so
            that little is padded (Ding et al. 2024, section 3). "stream": documents
            back to back, cut wherever a row ends; only the last row is padded.
        pad: what fills rows up.

    Raises:
        ValueError: `sequence_length` is below 1, or there is no such method.

    >>> packed = pack([[1, 2, 3, 4, 5], [6, 7], [8]], sequence_length=4)
    >>> packed.tokens.tolist()
    [[1, 2, 3, 4], [5, 6, 7, 8]]
    >>> packed.documents.tolist()
    [[0, 0, 0, 0], [0, 1, 1, 2]]
    >>> pack([[1, 2, 3], [4, 5, 6]], sequence_length=4, method="stream").positions.tolist()
    [[0, 1, 2, 0], [0, 1, -1, -1]]
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be 1 or more, not {sequence_length}")
    lengths = np.array([len(document) for document in documents], np.int64)
    if method == "stream":
        rows = _cut_stream(lengths, sequence_length)
    elif method == "best_fit":
        rows = _best_fit(lengths, sequence_length)
    else:
        raise ValueError(f"method must be best_fit or stream, not {method!r}")
    shape = (len(rows), sequence_length)
    tokens = np.full(shape, pad, np.int64)
    positions = np.full(shape, PADDING)
    of = np.full(shape, PADDING)
    for row, pieces in enumerate(rows):
        place = 0
        for document, start, end in pieces:
            here = slice(place, place + end - start)
            tokens[row, here] = documents[document][start:end]
            positions[row, here] = np.arange(end - start)
            of[row, here] = document
            place = here.stop
    return PackedDocuments(tokens, positions, of)


Row = list[tuple[int, int, int]]
"""Pieces of documents: which one, from where, up to where in it."""


def _best_fit(lengths: np.ndarray, capacity: int) -> list[Row]:
    full_rows = [
        [(document, start, start + capacity)]
        for document, length in enumerate(lengths.tolist())
        for start in range(0, length - capacity + 1, capacity)
    ]
    rests = lengths % capacity
    with_rest = np.flatnonzero(rests)
    if not len(with_rest):
        return full_rows
    return full_rows + [
        [
            (document, int(lengths[document] - rests[document]), int(lengths[document]))
            for document in with_rest[row].tolist()
        ]
        for row in best_fit_rows(rests[with_rest], capacity)
    ]


def _cut_stream(lengths: np.ndarray, capacity: int) -> list[Row]:
    rows: list[Row] = []
    room = 0
    for document, length in enumerate(lengths.tolist()):
        start = 0
        while start < length:
            if not room:
                rows.append([])
                room = capacity
            end = min(length, start + room)
            rows[-1].append((document, start, end))
            start, room = end, room - (end - start)
    return rows
