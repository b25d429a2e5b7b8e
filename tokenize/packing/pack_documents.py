"""Packing token lists that are in memory, by the rules of the mixture: for loops that
make their rows themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gristmill.core.arrays import offsets_of
from gristmill.tokenize.packed_files import PADDING
from gristmill.tokenize.packing.packing import Packing, RowCounts, cut


@dataclass(frozen=True)
class PackedDocuments:
    """R rows of L tokens, with the documents that they belong to.

    Attributes:
        tokens: (R, L) int64.
        positions: (R, L) int64, each token's number within its piece of a document,
            PADDING (-1) for padding: a 0 begins a piece.
        documents: (R, L) int64, the number of each token's document, PADDING for
            padding.
    """

    tokens: np.ndarray
    positions: np.ndarray
    documents: np.ndarray

    @property
    def fill(self) -> float:
        """Share of the rows' positions that have tokens of documents."""
        return float((self.positions != PADDING).mean()) if self.positions.size else 0.0


def pack(
    documents: Sequence[Sequence[int] | np.ndarray],
    sequence_length: int,
    method: Literal["best_fit", "stream"] = "best_fit",
    pad: int = 0,
) -> PackedDocuments:
    """Pack documents into rows of one length; every token is in exactly one row, in the
    order of its document.

    Args:
        documents: token ids of each, with an end of text if desired. Empty documents
            are left out.
        sequence_length: L, tokens per row.
        method: "best_fit": no document of at most L tokens is cut; longer ones are cut
            into whole rows and a remainder, and the pieces are packed longest first, so
            that little is padded (Ding et al. 2024, section 3). "stream": documents
            back to back, cut wherever a row ends; only the last row is padded.
        pad: id of padding.

    Raises:
        ValueError: `sequence_length` is below 1, or the method is unknown.

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
    if method not in ("best_fit", "stream"):
        raise ValueError(f"method must be best_fit or stream, not {method!r}")
    starts = offsets_of([len(document) for document in documents])
    end = int(starts[-1])
    places, dealing = None, None
    if method == "best_fit":
        counts = RowCounts([end], Packing(sequence_length, best_fit=True))
        places = counts.places()
        counts.add(starts)
        (dealing,) = counts.dealings()
    pieces = cut(starts, 0, end, sequence_length, places, dealing=dealing)
    shape = (int(pieces.row.max(initial=-1)) + 1, sequence_length)
    tokens = np.full(shape, pad, np.int64)
    positions = np.full(shape, PADDING)
    of = np.full(shape, PADDING)
    filled = [0] * len(tokens)
    columns = (column.tolist() for column in vars(pieces).values())
    for row, document_number, start, size in zip(*columns, strict=True):
        here = slice(filled[row], filled[row] + size)
        tokens[row, here] = documents[document_number][start : start + size]
        positions[row, here] = np.arange(size)
        of[row, here] = document_number
        filled[row] = here.stop
    return PackedDocuments(tokens, positions, of)
