"""Packing of a stream's tokens into rows, segment by segment, with a few numbers as the
state between segments.

A stream is the documents of a source in drawn order, pass after pass, each followed by
an end of text (`streams.py`). A segment is a run of its documents that fits in memory;
`starts` holds the first token of each in the stream.

`stream` fills rows consecutively: no padding, but documents are cut at row ends.
`best_fit` keeps documents of at most one row whole (`best_fit.py`); a longer one is
first cut into whole rows and a remainder (Ding et al. 2024, section 3), and the free
end of a row is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from gristmill.core.arrays import offsets_of
from gristmill.dataprep.text.kernels import kernel
from gristmill.mixtures.schema.mix import Mix
from gristmill.tokenize.packing.best_fit import bin_of, deal_out
from gristmill.tokenize.packing.packing_cost import PackingCost


@dataclass(frozen=True)
class Packing:
    """Packing algorithm of a stream.

    Attributes:
        sequence_length: tokens per row, L.
        best_fit: keep documents whole where possible.
    """

    sequence_length: int
    best_fit: bool = False


def packing_of(section: Mix) -> Packing:
    """Packing of a section's training rows."""
    return Packing(section.sequence_length, section.packing == "best_fit")


@dataclass(frozen=True)
class Pieces:
    """Parts of documents in rows, in stream order; all int64 of shape (p,).

    Attributes:
        row: number of the row in the stream.
        entry: number of the document in the segment.
        offset: first token within the document.
        length: tokens, including the end of text.
    """

    row: np.ndarray
    entry: np.ndarray
    offset: np.ndarray
    length: np.ndarray


@dataclass(frozen=True)
class Places:
    """State that the best-fit rows of a segment depend on besides its own documents, of
    p phases.

    Attributes:
        rows: int64 of shape (p,), whole rows of the phase before the segment.
        ranks: int64 of shape (p, L), number of earlier remainders of each length in the
            phase.
    """

    rows: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True)
class Dealing:
    """Bins of a phase's remainders, see `best_fit.deal_out`.

    Attributes:
        rows: int64 of shape (2,), the phase's first row in the stream, and its rows
            filled by one document; the rows of remainders follow them.
        begins, dealt: int64, see `deal_out`.
    """

    rows: np.ndarray
    begins: np.ndarray
    dealt: np.ndarray


def cut(
    starts: np.ndarray,
    begin: int,
    end: int,
    length: int,
    places: Places | None = None,
    phase: int = 0,
    dealing: Dealing | None = None,
) -> Pieces:
    """Pieces of a segment: best-fit if `places` and `dealing` are given, otherwise cut
    at row ends.

    Args:
        starts: int64 of shape (k + 1,), the first token of each document, whose last
            token is its end of text, and the end of the last one.
        begin, end: of the phase in the stream (`best_fit`); otherwise 0 and the end of
            all phases.
        length: tokens per row.
        places: state of the segment.
        phase: its number.
        dealing: of the phase.
    """
    span = max(0, min(int(starts[-1]), end) - int(starts[0]))
    capacity = len(starts) + span // length + 1
    columns = np.empty((4, capacity), np.int64)
    if places is None or dealing is None:
        number = cut_stream(starts, end, length, *columns)
    else:
        first_row, full_rows = dealing.rows.tolist()
        number = cut_best_fit(
            starts,
            begin,
            end,
            length,
            first_row,
            int(places.rows[phase]),
            full_rows,
            places.ranks[phase].copy(),
            dealing.begins,
            dealing.dealt,
            *columns,
        )
    return Pieces(*columns[:, :number])


@kernel
def cut_stream(
    starts: np.ndarray,
    end: int,
    length: int,
    row: np.ndarray,
    entry: np.ndarray,
    offset: np.ndarray,
    size: np.ndarray,
) -> int:
    """Fill the columns of `Pieces` (last four arguments) with documents cut at row
    ends; returns their number.
    """
    number = 0
    for document in range(len(starts) - 1):
        at, stop = starts[document], min(starts[document + 1], end)
        while at < stop:
            until = min(stop, (at // length + 1) * length)
            row[number], entry[number], offset[number], size[number] = (
                at // length,
                document,
                at - starts[document],
                until - at,
            )
            number += 1
            at = until
    return number


@kernel
def cut_best_fit(
    starts: np.ndarray,
    begin: int,
    end: int,
    length: int,
    first_row: int,
    rows: int,
    full_rows: int,
    ranks: np.ndarray,
    begins: np.ndarray,
    dealt: np.ndarray,
    row: np.ndarray,
    entry: np.ndarray,
    offset: np.ndarray,
    size: np.ndarray,
) -> int:
    """Fill the columns of `Pieces` with whole rows and remainders of a phase's
    documents; returns the number of pieces.

    Args:
        ranks: int64 of shape (L,), see `Places`; updated.
    """
    number = 0
    for document in range(len(starts) - 1):
        if starts[document + 1] <= begin:
            continue
        if starts[document] >= end:
            break
        at = max(starts[document], begin)
        remaining = min(starts[document + 1], end) - at
        while remaining:
            piece_length = min(remaining, length)
            if piece_length == length:
                row[number] = first_row + rows
                rows += 1
            else:
                row[number] = (
                    first_row
                    + full_rows
                    + bin_of(begins, dealt, length, piece_length, ranks[piece_length])
                )
                ranks[piece_length] += 1
            entry[number], offset[number], size[number] = (
                document,
                at - starts[document],
                piece_length,
            )
            number += 1
            at += piece_length
            remaining -= piece_length
    return number


@kernel
def measure_rows(
    starts: np.ndarray,
    begin: int,
    end: int,
    last: int,
    length: int,
    best_fit: bool,
    totals: np.ndarray,
    rests: np.ndarray,
) -> None:
    """Count the documents, whole rows and remainders of the tokens [begin, end) of a
    stream without laying them out.

    Args:
        last: end of the last phase.
        totals: int64 of shape (4,), updated: documents, cut documents, tokens of these
            before `last`, whole rows (`best_fit`).
        rests: int64 of shape (L,), updated: number of remainders of each length
            (`best_fit`).
    """
    for document in range(len(starts) - 1):
        start, stop = starts[document], starts[document + 1]
        if stop <= begin:
            continue
        if start >= end:
            break
        # A document that continues from the previous phase was counted there.
        if start >= begin:
            totals[0] += 1
            row_end = start + length if best_fit else (start // length + 1) * length
            if min(row_end, end) < stop:
                totals[1] += 1
                totals[2] += min(stop, last) - start
        size = min(stop, end) - max(start, begin)
        totals[3] += size // length
        rests[size % length] += 1


class RowCounts:
    """Counts of the rows of a stream, updated segment by segment.

    Args:
        ends: of the phases.
        packing: of the stream.
    """

    def __init__(self, ends: Sequence[int], packing: Packing) -> None:
        self._ends = [0, *ends] if packing.best_fit else [0, ends[-1]]
        self._packing = packing
        phases = len(self._ends) - 1
        self._totals = np.zeros((phases, 4), np.int64)
        self._rests = np.zeros((phases, packing.sequence_length), np.int64)

    def places(self) -> Places:
        """State for the best-fit rows of the next segment."""
        return Places(self._totals[:, 3].copy(), self._rests.copy())

    def add(self, starts: np.ndarray) -> None:
        """Count a segment: `starts` as in `cut`."""
        for phase, (begin, end) in enumerate(pairwise(self._ends)):
            if begin < starts[-1] and end > starts[0]:
                measure_rows(
                    starts,
                    begin,
                    end,
                    self._ends[-1],
                    self._packing.sequence_length,
                    self._packing.best_fit,
                    self._totals[phase],
                    self._rests[phase],
                )

    def cost(self) -> PackingCost:
        """Cost of the rows of all phases."""
        end, length = self._ends[-1], self._packing.sequence_length
        rows = sum(self.rows()) if self._packing.best_fit else -(-end // length)
        documents, cut_documents, cut_tokens, _ = self._totals.sum(axis=0).tolist()
        return PackingCost(
            rows, end, rows * length - end, documents, cut_documents, cut_tokens
        )

    def rows(self) -> list[int]:
        """Best-fit rows of each phase."""
        counts = zip(self._totals[:, 3].tolist(), self._dealt, strict=True)
        return [number + used for number, (_, _, used) in counts]

    def dealings(self) -> list[Dealing]:
        """Bins of each phase's remainders (`best_fit`)."""
        first = offsets_of(self.rows())
        return [
            Dealing(np.array([row, counts[3]]), begins, dealt)
            for row, counts, (begins, dealt, _) in zip(
                first, self._totals, self._dealt, strict=False
            )
        ]

    @cached_property
    def _dealt(self) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """Bins of all segments' remainders, see `deal_out`."""
        # a whole row is not a remainder
        padded = np.pad(self._rests, ((0, 0), (0, 1)))
        padded[:, 0] = 0
        return [deal_out(rests, self._packing.sequence_length) for rests in padded]
