"""Which of a stream's tokens fill which row, segment by segment: what is kept between two segments is some numbers.

A stream is the documents of a source in drawn order, pass after pass, each followed by an end of text (`streams.py`).
A segment is a run of its documents, which fits in memory; `starts` says where each of them begins in the whole stream.

`stream` takes the stream as it is, row after row: no padding, but a document is cut wherever a row ends. `best_fit`
keeps every document of at most a row whole (`best_fit.py`); a longer one is first cut into whole rows and a rest (Ding
et al. 2024, section 3); what a row has left over is padding.

With `aligned` document starts, every row begins with the beginning of a document (as nanochat's loader crops): what
does not fit into the row that a document begins in is dropped, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from gristmill.dataprep.text.kernels import kernel
from gristmill.mixtures.mix import Mix
from gristmill.tokenize.mixing.best_fit import bin_of, deal_out


@dataclass(frozen=True)
class Packing:
    """How rows are made of a stream.

    Attributes:
        sequence_length: tokens per row, L.
        best_fit: whether documents stay whole where that can be.
        aligned: whether every row begins with a document's first token.
    """

    sequence_length: int
    best_fit: bool = False
    aligned: bool = False

    @property
    def name(self) -> str:
        """As the summary names it."""
        return ("best_fit" if self.best_fit else "stream") + ("_aligned" if self.aligned else "")


def packing_of(section: Mix) -> Packing:
    """How a section packs its training rows."""
    return Packing(section.sequence_length, section.packing == "best_fit", section.document_starts == "aligned")


@dataclass(frozen=True)
class Pieces:
    """Parts of documents in rows, in the order of the stream; all int64 of shape (p,).

    Attributes:
        row: number of the row, of all of the stream.
        entry: number of the document in the segment.
        offset: first token within the document.
        length: tokens, the end of text counted.
    """

    row: np.ndarray
    entry: np.ndarray
    offset: np.ndarray
    length: np.ndarray


def ends_of_phases(segments: Iterable[np.ndarray], quotas: Sequence[int], packing: Packing) -> list[int] | None:
    """Up to where in a stream each phase goes, so that its rows hold a quota of tokens of documents.

    Args:
        segments: `starts` of each segment, one after another: int64 of shape (k + 1,), where each document begins, its
            end of text being its last token, and where the last one ends. They are looked at only with `aligned`.
        quotas: of each phase, whole rows' worth.
        packing: how.

    Returns:
        the ends, exclusive; None where the segments are too short.
    """
    if not packing.aligned:
        ends: list[int] = np.cumsum(quotas).tolist()
        return ends
    ends, begin, length = [], 0, packing.sequence_length
    shares = [quota if packing.best_fit else quota // length for quota in quotas]
    left = shares[0]
    go_on = fill_beginnings if packing.best_fit else follow_rows
    remaining = iter(segments)
    starts = np.zeros(1, dtype=np.int64)
    while True:
        begin, left = go_on(starts, begin, left, length)
        if left:
            following = next(remaining, None)
            if following is None:
                return None
            starts = following
            continue
        ends.append(int(begin))
        if len(ends) == len(shares):
            return ends
        left = shares[len(ends)]


@kernel
def follow_rows(starts: np.ndarray, begin: int, left: int, length: int) -> tuple[int, int]:
    """Go on until `left` rows have begun, each with a document, none before token `begin`.

    Returns:
        where the last row that has begun ends, and how many are left to begin.
    """
    if left:
        for entry in range(len(starts) - 1):
            if starts[entry] >= begin:
                begin = starts[entry] + length
                left -= 1
                if not left:
                    break
    return begin, left


@kernel
def fill_beginnings(starts: np.ndarray, begin: int, left: int, length: int) -> tuple[int, int]:
    """Go on until the first `length` tokens of the documents that begin behind `begin` are `left` tokens.

    Returns:
        where that is (`begin` where it is behind this segment), and how many are left.
    """
    if left:
        for entry in range(len(starts) - 1):
            if starts[entry] >= begin:
                size = min(starts[entry + 1] - starts[entry], length)
                if left <= size:
                    return starts[entry] + left, 0
                left -= size
    return begin, left


@dataclass(frozen=True)
class Places:
    """What the rows of a segment depend on besides its own documents.

    Attributes:
        free: up to where the last row has gone that began before the segment (`stream`, aligned).
        rows: how many rows began before it (`stream`, aligned); whole rows of the phase before it (`best_fit`).
        ranks: int64 of shape (L,), how many rests of each length the phase had before it (`best_fit`).
    """

    free: int
    rows: int
    ranks: np.ndarray


@dataclass(frozen=True)
class Dealing:
    """Where the rests of a phase go (`best_fit`), see `best_fit.deal_out`.

    Attributes:
        first_row: of the phase, among all rows of the stream.
        whole: rows that one document fills; those of the rests follow them.
        begins, dealt: int64, see `deal_out`.
    """

    first_row: int
    whole: int
    begins: np.ndarray
    dealt: np.ndarray


def cut(
    starts: np.ndarray,
    begin: int,
    end: int,
    packing: Packing,
    places: Places | None = None,
    dealing: Dealing | None = None,
) -> Pieces:
    """The pieces of a segment.

    Args:
        starts: int64 of shape (k + 1,), see `ends_of_phases`.
        begin, end: of the phase, in the stream (`best_fit`); else 0 and the end of all phases.
        packing: how rows are made.
        places: needed by all packings but `stream` with any document starts.
        dealing: needed by `best_fit`.
    """
    length, span = packing.sequence_length, max(0, min(int(starts[-1]), end) - int(starts[0]))
    most = len(starts) + span // length + 1
    columns = [np.empty(most, dtype=np.int64) for _ in range(4)]
    if not packing.best_fit and not packing.aligned:
        number = cut_stream(starts, end, length, *columns)
    else:
        assert places is not None
        if packing.best_fit:
            assert dealing is not None
            number = cut_best_fit(
                starts,
                begin,
                end,
                length,
                packing.aligned,
                dealing.first_row,
                places.rows,
                dealing.whole,
                places.ranks.copy(),
                dealing.begins,
                dealing.dealt,
                *columns,
            )
        else:
            number = cut_aligned(starts, end, length, places.free, places.rows, *columns)
    return Pieces(*(column[:number] for column in columns))


@kernel
def cut_stream(
    starts: np.ndarray, end: int, length: int, row: np.ndarray, entry: np.ndarray, offset: np.ndarray, size: np.ndarray
) -> int:
    """Fill the columns of `Pieces` (the last four) with documents that are cut wherever a row ends; how many."""
    number = 0
    for one in range(len(starts) - 1):
        at, stop = starts[one], min(starts[one + 1], end)
        while at < stop:
            until = min(stop, (at // length + 1) * length)
            row[number], entry[number], offset[number], size[number] = at // length, one, at - starts[one], until - at
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
    """Fill the columns of `Pieces` with the rows that each begin with a document; how many pieces there are."""
    number = 0
    for one in range(len(starts) - 1):
        at = starts[one]
        if at >= end:
            break
        if at >= free:
            free = at + length
            rows += 1
        row[number], entry[number], offset[number] = rows - 1, one, 0
        size[number] = min(starts[one + 1], free, end) - at
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
    whole: int,
    ranks: np.ndarray,
    begins: np.ndarray,
    dealt: np.ndarray,
    row: np.ndarray,
    entry: np.ndarray,
    offset: np.ndarray,
    size: np.ndarray,
) -> int:
    """Fill the columns of `Pieces` with whole rows and rests of the documents of a phase; how many pieces there are.

    Args:
        ranks: int64 of shape (L,), see `Places`; counts on.
    """
    number = 0
    for one in range(len(starts) - 1):
        if starts[one + 1] <= begin or (aligned and starts[one] < begin):
            continue
        if starts[one] >= end:
            break
        at = max(starts[one], begin)
        left = min(starts[one + 1], end) - at
        if aligned:
            left = min(left, length)
        while left:
            taken = min(left, length)
            if taken == length:
                row[number] = first_row + rows
                rows += 1
            else:
                row[number] = first_row + whole + bin_of(begins, dealt, length, taken, ranks[taken])
                ranks[taken] += 1
            entry[number], offset[number], size[number] = one, at - starts[one], taken
            number += 1
            at += taken
            left -= taken
    return number


@kernel
def measure_stream(starts: np.ndarray, end: int, length: int, found: np.ndarray) -> None:
    """Add to `found` how many documents are cut where a row ends, and their tokens before `end` (int64 (2,))."""
    for one in range(len(starts) - 1):
        at = starts[one]
        if at >= end:
            break
        if min((at // length + 1) * length, end) < starts[one + 1]:
            found[0] += 1
            found[1] += min(starts[one + 1], end) - at


@kernel
def measure_aligned(starts: np.ndarray, end: int, length: int, found: np.ndarray) -> None:
    """Count rows that begin with documents on.

    Args:
        found: int64 of shape (5,): documents that are cut, their tokens before `end`, rows, tokens in them, and up to
            where the last row goes.
    """
    for one in range(len(starts) - 1):
        at, stop = starts[one], starts[one + 1]
        if at >= end:
            break
        if at >= found[4]:
            found[4] = at + length
            found[2] += 1
        until = min(stop, found[4], end)
        found[3] += until - at
        if until < stop:
            found[0] += 1
            found[1] += min(stop, end) - at


@kernel
def measure_best_fit(
    starts: np.ndarray,
    begin: int,
    end: int,
    last: int,
    length: int,
    aligned: bool,
    found: np.ndarray,
    rests: np.ndarray,
) -> None:
    """Count what the best fit makes of the tokens [begin, end) of a stream on, without laying it out.

    Args:
        last: where the last phase ends.
        found: int64 of shape (4,): documents that are cut, their tokens before `last`, whole rows, tokens in rows.
        rests: int64 of shape (L,), how many rests there are of each length.
    """
    for one in range(len(starts) - 1):
        start, stop = starts[one], starts[one + 1]
        if stop <= begin or (aligned and start < begin):
            continue
        if start >= end:
            break
        at = max(start, begin)
        size = min(stop, end) - at
        # One that goes on from the phase before was cut there.
        if start >= begin and min(at + length, end) < stop:
            found[0] += 1
            found[1] += min(stop, last) - start
        if aligned:
            size = min(size, length)
        found[2] += size // length
        rests[size % length] += 1
        found[3] += size


class Costs:
    """What every packing makes of the tokens [0, end) of a stream, counted segment after segment.

    The packing that is used goes phase by phase, the others through all of it at one go.

    Args:
        ends: of the phases.
        used: the packing that is used.
    """

    def __init__(self, ends: Sequence[int], used: Packing) -> None:
        self._ends, self._used, self._length = [0, *ends], used, used.sequence_length
        self._stream, self._aligned = np.zeros(2, dtype=np.int64), np.zeros(5, dtype=np.int64)
        self._fits = {
            aligned: Fit(self._length, aligned, [0, ends[-1]] if not self._is_used(aligned) else self._ends)
            for aligned in (False, True)
        }
        self._documents = 0

    def _is_used(self, aligned: bool) -> bool:
        return self._used == Packing(self._length, True, aligned)

    def places(self) -> list[Places]:
        """What the rows of the next segment depend on: one of these, or one for each phase (`best_fit`)."""
        if self._used.best_fit:
            return self._fits[self._used.aligned].places()
        return [Places(int(self._aligned[4]), int(self._aligned[2]), np.empty(0, dtype=np.int64))]

    def add(self, starts: np.ndarray) -> None:
        """Count a segment: `starts` as in `ends_of_phases`."""
        end = self._ends[-1]
        measure_stream(starts, end, self._length, self._stream)
        measure_aligned(starts, end, self._length, self._aligned)
        for fit in self._fits.values():
            fit.add(starts)
        self._documents += int(np.searchsorted(starts[:-1], end))

    def dealings(self) -> list[Dealing]:
        """Where the rests of each phase go; none if the packing that is used has no rests."""
        return self._fits[self._used.aligned].dealings() if self._used.best_fit else []

    def rows_of_phases(self) -> list[int]:
        """How many rows the packing that is used makes of each phase."""
        if self._used.best_fit:
            return self._fits[self._used.aligned].rows()
        if self._used.aligned:
            raise ValueError("rows that begin with documents are as many as the phases ask for")
        return [-(-end // self._length) - -(-begin // self._length) for begin, end in pairwise(self._ends)]

    def accounts(self) -> dict[str, dict[str, Any]]:
        """What each packing costs, by its name.

        Returns:
            `rows`, `tokens` (of documents), `padding_tokens`, `dropped_tokens` (of [0, end), in no row), `documents`,
            and `split_documents` and `split_tokens`: those that a row's end cuts, and their tokens in [0, end).
        """
        end, (cut, cut_tokens, rows, tokens, _) = self._ends[-1], self._aligned.tolist()
        found = {
            "stream": self._account(-(-end // self._length), end, *self._stream.tolist()),
            "stream_aligned": self._account(rows, tokens, cut, cut_tokens),
        }
        for aligned, fit in self._fits.items():
            name = Packing(self._length, True, aligned).name
            found[name] = self._account(sum(fit.rows()), fit.tokens, *fit.cut)
        return found

    def _account(self, rows: int, tokens: int, cut: int, cut_tokens: int) -> dict[str, Any]:
        return {
            "rows": rows,
            "tokens": tokens,
            "padding_tokens": rows * self._length - tokens,
            "dropped_tokens": self._ends[-1] - tokens,
            "documents": self._documents,
            "split_documents": cut,
            "split_tokens": cut_tokens,
        }


class Fit:
    """What the best fit makes of some phases of a stream, counted segment after segment."""

    def __init__(self, length: int, aligned: bool, ends: Sequence[int]) -> None:
        self._length, self._aligned, self._ends = length, aligned, ends
        phases = len(ends) - 1
        self._found = np.zeros((phases, 4), dtype=np.int64)
        self._rests = np.zeros((phases, length), dtype=np.int64)
        self._dealt: list[tuple[np.ndarray, np.ndarray, int]] | None = None

    def places(self) -> list[Places]:
        """What the rows of the next segment depend on, phase by phase."""
        return [Places(0, int(found[2]), rests.copy()) for found, rests in zip(self._found, self._rests, strict=True)]

    def add(self, starts: np.ndarray) -> None:
        """Count a segment."""
        for phase, (begin, end) in enumerate(pairwise(self._ends)):
            if begin < starts[-1] and end > starts[0]:
                measure_best_fit(
                    starts,
                    begin,
                    end,
                    self._ends[-1],
                    self._length,
                    self._aligned,
                    self._found[phase],
                    self._rests[phase],
                )

    @property
    def tokens(self) -> int:
        """Tokens of documents in all rows."""
        return int(self._found[:, 3].sum())

    @property
    def cut(self) -> tuple[int, int]:
        """How many documents are cut, and their tokens."""
        return int(self._found[:, 0].sum()), int(self._found[:, 1].sum())

    def rows(self) -> list[int]:
        """Rows of each phase."""
        whole: list[int] = self._found[:, 2].tolist()
        return [number + used for number, (_, _, used) in zip(whole, self._deal(), strict=True)]

    def dealings(self) -> list[Dealing]:
        """Where the rests of each phase go."""
        first = np.cumsum([0, *self.rows()]).tolist()
        return [
            Dealing(row, int(found[2]), begins, dealt)
            for row, found, (begins, dealt, _) in zip(first, self._found, self._deal(), strict=False)
        ]

    def _deal(self) -> list[tuple[np.ndarray, np.ndarray, int]]:
        if self._dealt is None:
            padded = np.pad(self._rests, ((0, 0), (0, 1)))  # a whole row is no rest
            padded[:, 0] = 0
            self._dealt = [deal_out(rests, self._length) for rests in padded]
        return self._dealt
