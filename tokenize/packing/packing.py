"""Packing of a stream's tokens into rows, segment by segment, with a few numbers as the
state between segments.

A stream is the documents of a source in drawn order, pass after pass, each followed by
an end of text (`streams.py`). A segment is a run of its documents that fits in memory;
`starts` holds the first token of each in the stream.

`stream` fills rows consecutively: no padding, but documents are cut at row ends.
`best_fit` keeps documents of at most one row whole (`best_fit.py`); a longer one is
first cut into whole rows and a remainder (Ding et al. 2024, section 3), and the free
end of a row is padding.

With `aligned` document starts, every row begins with the beginning of a document (like
nanochat's loader): tokens of its documents that do not fit into the row are dropped,
and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from gristmill.dataprep.text.kernels import kernel
from gristmill.mixtures.sections.mix import Mix
from gristmill.tokenize.packing.best_fit import bin_of, deal_out


@dataclass(frozen=True)
class Packing:
    """Packing algorithm of a stream.

    Attributes:
        sequence_length: tokens per row, L.
        best_fit: keep documents whole where possible.
        aligned: begin every row with a document's first token.
    """

    sequence_length: int
    best_fit: bool = False
    aligned: bool = False

    @property
    def name(self) -> str:
        """Name in the summary."""
        name = "best_fit" if self.best_fit else "stream"
        return f"{name}_aligned" if self.aligned else name


def packing_of(section: Mix) -> Packing:
    """Packing of a section's training rows."""
    return Packing(
        section.sequence_length,
        section.packing == "best_fit",
        section.document_starts == "aligned",
    )


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


def ends_of_phases(
    segments: Iterable[np.ndarray], quotas: Sequence[int], packing: Packing
) -> list[int] | None:
    """End of each phase in a stream, such that its rows hold the quota of document
    tokens.

    Args:
        segments: `starts` of consecutive segments: int64 of shape (k + 1,), the first
            token of each document, whose last token is its end of text, and the end of
            the last one. Read only with `aligned`.
        quotas: tokens of each phase, multiples of the row length.
        packing: of the stream.

    Returns:
        the ends, exclusive; None if the segments are too short.
    """
    if not packing.aligned:
        ends: list[int] = np.cumsum(quotas).tolist()
        return ends
    ends, begin = [], 0
    length = packing.sequence_length
    advance = fill_beginnings if packing.best_fit else follow_rows
    segment_iterator = iter(segments)
    starts = np.zeros(1, np.int64)
    for quota in quotas:
        remaining = quota if packing.best_fit else quota // length
        while True:
            begin, remaining = advance(starts, begin, remaining, length)
            if not remaining:
                break
            following = next(segment_iterator, None)
            if following is None:
                return None
            starts = following
        ends.append(int(begin))
    return ends


@kernel
def follow_rows(
    starts: np.ndarray, begin: int, rows_to_begin: int, length: int
) -> tuple[int, int]:
    """Advance until `rows_to_begin` rows have begun, each with a document, none before
    token `begin`.

    Returns:
        end of the last row that has begun, and the number of rows still to begin.
    """
    if rows_to_begin:
        for entry in range(len(starts) - 1):
            if starts[entry] >= begin:
                begin = starts[entry] + length
                rows_to_begin -= 1
                if not rows_to_begin:
                    break
    return begin, rows_to_begin


@kernel
def fill_beginnings(
    starts: np.ndarray, begin: int, tokens_to_fill: int, length: int
) -> tuple[int, int]:
    """Advance until the first `length` tokens of documents from `begin` on add up to
    `tokens_to_fill` tokens.

    Returns:
        the position reached (`begin` if the segment ends first), and the number of
        tokens still missing.
    """
    if tokens_to_fill:
        for entry in range(len(starts) - 1):
            if starts[entry] >= begin:
                size = min(starts[entry + 1] - starts[entry], length)
                if tokens_to_fill <= size:
                    return starts[entry] + tokens_to_fill, 0
                tokens_to_fill -= size
    return begin, tokens_to_fill


@dataclass(frozen=True)
class Places:
    """State that the rows of a segment depend on besides its own documents: of p phases
    with `best_fit`, otherwise of all phases as one.

    Attributes:
        free: int64 of shape (p,), end of the last row that began before the segment
            (`stream`, aligned).
        rows: int64 of shape (p,), rows that began before it (`stream`, aligned); whole
            rows of the phase before it (`best_fit`).
        ranks: int64 of shape (p, L), number of earlier remainders of each length in the
            phase (`best_fit`).
    """

    free: np.ndarray
    rows: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True)
class Dealing:
    """Bins of a phase's remainders (`best_fit`), see `best_fit.deal_out`.

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
    packing: Packing,
    places: Places | None = None,
    phase: int = 0,
    dealing: Dealing | None = None,
) -> Pieces:
    """Pieces of a segment.

    Args:
        starts: int64 of shape (k + 1,), see `ends_of_phases`.
        begin, end: of the phase in the stream (`best_fit`); otherwise 0 and the end of
            all phases.
        packing: of the stream.
        places: required except for `stream` without alignment.
        phase: number of the phase (`best_fit`).
        dealing: of the phase; required for `best_fit`.
    """
    length = packing.sequence_length
    span = max(0, min(int(starts[-1]), end) - int(starts[0]))
    capacity = len(starts) + span // length + 1
    columns = np.empty((4, capacity), np.int64)
    if places is None or not (packing.best_fit or packing.aligned):
        number = cut_stream(starts, end, length, *columns)
    elif dealing is None:
        number = cut_aligned(
            starts, end, length, int(places.free[0]), int(places.rows[0]), *columns
        )
    else:
        first_row, full_rows = dealing.rows.tolist()
        number = cut_best_fit(
            starts,
            begin,
            end,
            length,
            packing.aligned,
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
def cut_aligned(
    starts: np.ndarray,
    end: int,
    length: int,
    free: int,
    rows: int,
    row: np.ndarray,
    entry: np.ndarray,
    offset: np.ndarray,
    size: np.ndarray,
) -> int:
    """Fill the columns of `Pieces` with rows that begin with a document; returns the
    number of pieces.
    """
    number = 0
    for document in range(len(starts) - 1):
        at = starts[document]
        if at >= end:
            break
        if at >= free:
            free = at + length
            rows += 1
        row[number], entry[number], offset[number] = rows - 1, document, 0
        size[number] = min(starts[document + 1], free, end) - at
        number += 1
    return number


@kernel
def cut_best_fit(
    starts: np.ndarray,
    begin: int,
    end: int,
    length: int,
    aligned: bool,
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
        if starts[document + 1] <= begin or (aligned and starts[document] < begin):
            continue
        if starts[document] >= end:
            break
        at = max(starts[document], begin)
        remaining = min(starts[document + 1], end) - at
        if aligned:
            remaining = min(remaining, length)
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
def measure_stream(
    starts: np.ndarray, end: int, length: int, totals: np.ndarray
) -> None:
    """Add to `totals` the number of documents cut at row ends, and their tokens before
    `end` (int64 (2,)).
    """
    for document in range(len(starts) - 1):
        at = starts[document]
        if at >= end:
            break
        if min((at // length + 1) * length, end) < starts[document + 1]:
            totals[0] += 1
            totals[1] += min(starts[document + 1], end) - at


@kernel
def measure_aligned(
    starts: np.ndarray, end: int, length: int, totals: np.ndarray
) -> None:
    """Count rows that begin with documents.

    Args:
        totals: int64 of shape (5,), updated: cut documents, their tokens before `end`,
            rows, tokens in rows, and the end of the last row.
    """
    for document in range(len(starts) - 1):
        at, stop = starts[document], starts[document + 1]
        if at >= end:
            break
        if at >= totals[4]:
            totals[4] = at + length
            totals[2] += 1
        until = min(stop, totals[4], end)
        totals[3] += until - at
        if until < stop:
            totals[0] += 1
            totals[1] += min(stop, end) - at


@kernel
def measure_best_fit(
    starts: np.ndarray,
    begin: int,
    end: int,
    last: int,
    length: int,
    aligned: bool,
    totals: np.ndarray,
    rests: np.ndarray,
) -> None:
    """Count the best-fit rows of the tokens [begin, end) of a stream without laying
    them out.

    Args:
        last: end of the last phase.
        totals: int64 of shape (4,), updated: cut documents, their tokens before `last`,
            whole rows, tokens in rows.
        rests: int64 of shape (L,), updated: number of remainders of each length.
    """
    for document in range(len(starts) - 1):
        start, stop = starts[document], starts[document + 1]
        if stop <= begin or (aligned and start < begin):
            continue
        if start >= end:
            break
        at = max(start, begin)
        size = min(stop, end) - at
        # A document that continues from the previous phase was counted there.
        if start >= begin and min(at + length, end) < stop:
            totals[0] += 1
            totals[1] += min(stop, last) - start
        if aligned:
            size = min(size, length)
        totals[2] += size // length
        rests[size % length] += 1
        totals[3] += size


@dataclass(frozen=True)
class PackingCost:
    """Cost of a packing of the tokens [0, end) of a stream.

    Attributes:
        rows: of the packing.
        tokens: of documents in them.
        padding_tokens: in them.
        dropped_tokens: of [0, end), in no row.
        documents: that begin before the end.
        split_documents: documents cut at a row end.
        split_tokens: tokens of these in [0, end).
    """

    rows: int
    tokens: int
    padding_tokens: int
    dropped_tokens: int
    documents: int
    split_documents: int
    split_tokens: int


class Costs:
    """Cost of every packing of the tokens [0, end) of a stream, counted segment by
    segment.

    The packing in use is counted by phase, the others over all phases at once.

    Args:
        ends: of the phases.
        used: the packing in use.
    """

    def __init__(self, ends: Sequence[int], used: Packing) -> None:
        self._ends = [0, *ends]
        self._used = used
        self._length = used.sequence_length
        self._stream = np.zeros(2, np.int64)
        self._aligned = np.zeros(5, np.int64)
        self._fits = {
            packing: Fit(packing, self._ends if packing == used else [0, ends[-1]])
            for packing in (
                Packing(self._length, True, aligned) for aligned in (False, True)
            )
        }
        self._documents = 0

    def places(self) -> Places:
        """State for the rows of the next segment."""
        if self._used.best_fit:
            return self._fits[self._used].places()
        return Places(
            self._aligned[4:].copy(),
            self._aligned[2:3].copy(),
            np.empty((1, 0), np.int64),
        )

    def add(self, starts: np.ndarray) -> None:
        """Count a segment: `starts` as in `ends_of_phases`."""
        end = self._ends[-1]
        measure_stream(starts, end, self._length, self._stream)
        measure_aligned(starts, end, self._length, self._aligned)
        for fit in self._fits.values():
            fit.add(starts)
        self._documents += int(np.searchsorted(starts[:-1], end))

    def dealings(self) -> list[Dealing]:
        """Bins of each phase's remainders; empty unless the packing in use is
        `best_fit`.
        """
        return self._fits[self._used].dealings() if self._used.best_fit else []

    def rows_of_phases(self) -> list[int]:
        """Rows of each phase with the packing in use."""
        if self._used.best_fit:
            return self._fits[self._used].rows()
        if self._used.aligned:
            raise ValueError(
                "rows that begin with documents are as many as the phases ask for"
            )
        ends = [-(-end // self._length) for end in self._ends]
        return [end - begin for begin, end in pairwise(ends)]

    def by_packing(self) -> dict[str, PackingCost]:
        """Cost of each packing, by name."""
        end = self._ends[-1]
        cut, cut_tokens, rows, tokens, _ = self._aligned.tolist()
        measured = {
            "stream": (-(-end // self._length), end, *self._stream.tolist()),
            "stream_aligned": (rows, tokens, cut, cut_tokens),
            **{packing.name: fit.cost() for packing, fit in self._fits.items()},
        }
        return {
            name: PackingCost(
                rows=rows,
                tokens=tokens,
                padding_tokens=rows * self._length - tokens,
                dropped_tokens=end - tokens,
                documents=self._documents,
                split_documents=cut,
                split_tokens=cut_tokens,
            )
            for name, (rows, tokens, cut, cut_tokens) in measured.items()
        }


class Fit:
    """Counts of the best-fit rows of some phases of a stream, updated segment by
    segment.
    """

    def __init__(self, packing: Packing, ends: Sequence[int]) -> None:
        self._packing = packing
        self._ends = ends
        phases = len(ends) - 1
        self._totals = np.zeros((phases, 4), np.int64)
        self._rests = np.zeros((phases, packing.sequence_length), np.int64)

    def places(self) -> Places:
        """State for the rows of the next segment."""
        full_rows = self._totals[:, 2].copy()
        return Places(np.zeros_like(full_rows), full_rows, self._rests.copy())

    def add(self, starts: np.ndarray) -> None:
        """Count a segment."""
        for phase, (begin, end) in enumerate(pairwise(self._ends)):
            if begin < starts[-1] and end > starts[0]:
                measure_best_fit(
                    starts,
                    begin,
                    end,
                    self._ends[-1],
                    self._packing.sequence_length,
                    self._packing.aligned,
                    self._totals[phase],
                    self._rests[phase],
                )

    def cost(self) -> tuple[int, int, int, int]:
        """Rows and document tokens of all phases, cut documents and their tokens."""
        cut, cut_tokens, _, tokens = self._totals.sum(axis=0).tolist()
        return sum(self.rows()), tokens, cut, cut_tokens

    def rows(self) -> list[int]:
        """Rows of each phase."""
        counts = zip(self._totals[:, 2].tolist(), self._dealt, strict=True)
        return [number + used for number, (_, _, used) in counts]

    def dealings(self) -> list[Dealing]:
        """Bins of each phase's remainders."""
        first = np.cumsum([0, *self.rows()])
        return [
            Dealing(np.array([row, counts[2]]), begins, dealt)
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
