"""Which tokens of a source's stream make its rows: the two packings, and rows that all begin with a document.

`stream` takes the stream as it is, row after row: no padding, but a document is cut wherever a row ends. `best_fit`
keeps every document of at most a row whole (`best_fit.py`); a longer one is first cut into whole rows and a rest (Ding
et al. 2024, section 3); what a row has left over is padding.

With `aligned` document starts, every row begins with the beginning of a document (as nanochat's loader crops): what
does not fit into the row that a document begins in is dropped, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gristmill.dataprep.kernels import kernel
from gristmill.tokenize.mixing.best_fit import MOST_DOCUMENTS, best_fit_decreasing, by_bin
from gristmill.tokenize.mixing.streams import Stream


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


@dataclass(frozen=True)
class Layout:
    """The runs of the stream that fill each row, one after the other from its beginning.

    Attributes:
        first: int64 of shape (rows + 1,), where each row's runs begin in the other two.
        at: int64 of shape (runs,), first token within the stream.
        length: int32 of shape (runs,), tokens.
    """

    first: np.ndarray
    at: np.ndarray
    length: np.ndarray

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.first) - 1

    @property
    def tokens(self) -> int:
        """Tokens of documents in all rows."""
        return int(self.length.sum(dtype=np.int64))


def end_of(stream: Stream, begin: int, tokens: int, packing: Packing) -> int | None:
    """Up to where a stream must be packed, from token `begin` on, so that the rows hold `tokens` tokens of documents.

    Args:
        stream: the documents.
        begin: where to begin.
        tokens: a whole number of rows' worth.
        packing: how.

    Returns:
        the end, exclusive; None if the stream is too short.
    """
    if not packing.aligned:
        return begin + tokens if begin + tokens <= stream.tokens else None
    if not tokens:
        return begin
    if packing.best_fit:
        return _end_of_beginnings(stream, begin, tokens, packing.sequence_length)
    at = aligned_rows(stream.starts, begin, stream.tokens, packing.sequence_length)
    rows = tokens // packing.sequence_length
    end = int(at[rows - 1]) + packing.sequence_length if rows <= len(at) else stream.tokens + 1
    return end if end <= stream.tokens else None


def lay_out(stream: Stream, begin: int, end: int, packing: Packing) -> Layout:
    """Make rows of the tokens [begin, end) of a stream; the last one may be padded in any packing."""
    length = packing.sequence_length
    if packing.best_fit:
        return _best_fit(stream, begin, end, packing)
    at = aligned_rows(stream.starts, begin, end, length) if packing.aligned else np.arange(begin, end, length)
    return Layout(np.arange(len(at) + 1, dtype=np.int64), at.astype(np.int64),
                  np.minimum(length, end - at).astype(np.int32))


def join_layouts(layouts: Sequence[Layout]) -> Layout:
    """The rows of several layouts of one stream, one after another."""
    runs = np.cumsum([0, *(len(layout.at) for layout in layouts)])
    firsts = [layout.first[:-1] + before for layout, before in zip(layouts, runs, strict=False)]
    return Layout(np.concatenate([*firsts, runs[-1:]]).astype(np.int64),
                  np.concatenate([layout.at for layout in layouts]),
                  np.concatenate([layout.length for layout in layouts]))


def _parts(stream: Stream, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Begin and length (int64) of every document's part of [begin, end)."""
    first = int(np.searchsorted(stream.starts, begin, side="right")) - 1
    last = int(np.searchsorted(stream.starts, end, side="left"))
    at = np.maximum(stream.starts[first:last], begin)
    return at, np.minimum(stream.starts[first + 1 : last + 1], end) - at


def _best_fit(stream: Stream, begin: int, end: int, packing: Packing) -> Layout:
    length = packing.sequence_length
    if packing.aligned:
        begin = _next_start(stream, begin, end)
    at, size = _parts(stream, begin, end)
    if packing.aligned:
        size = np.minimum(size, length)
    whole, rest = np.divmod(size, length)
    number = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    full = np.repeat(at, whole) + number * length
    left = np.flatnonzero(rest)
    if len(left) > MOST_DOCUMENTS:
        raise ValueError(f"best_fit packs at most {MOST_DOCUMENTS} documents of a source at a time, not {len(left)}; "
                         "split the source, or set mix.packing to stream")
    lengths = rest[left].astype(np.int32)
    bins, used = best_fit_decreasing(lengths, length)
    first = np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=used))]).astype(np.int64)
    order = by_bin(bins, first)
    return Layout(
        np.concatenate([np.arange(len(full)), len(full) + first]),
        np.concatenate([full, (at + whole * length)[left][order]]),
        np.concatenate([np.full(len(full), length, dtype=np.int32), lengths[order]]),
    )


def _end_of_beginnings(stream: Stream, begin: int, tokens: int, length: int) -> int | None:
    """Where the first `length` tokens of each document, from `begin` on, are `tokens` tokens together."""
    begin = _next_start(stream, begin, stream.tokens)
    at, size = _parts(stream, begin, stream.tokens)
    total = np.cumsum(np.minimum(size, length))
    last = int(np.searchsorted(total, tokens))
    if last == len(total):
        return None
    return int(at[last] + min(size[last], length) - (total[last] - tokens))


def _next_start(stream: Stream, begin: int, end: int) -> int:
    entry = int(np.searchsorted(stream.starts, begin))
    return min(int(stream.starts[entry]), end)


@kernel
def aligned_rows(starts: np.ndarray, begin: int, end: int, length: int) -> np.ndarray:
    """Where rows begin that each take `length` tokens from the next document's beginning on.

    Args:
        starts: int64 of shape (k + 1,), see `Stream`.
        begin: no row begins before this token.
        end: nor at or behind this one.
        length: tokens per row.

    Returns:
        int64 of shape (rows,).
    """
    rows = np.empty(max(0, end - begin) // length + 1, dtype=np.int64)
    found, free = 0, begin
    for entry in range(np.searchsorted(starts, begin), len(starts) - 1):
        if starts[entry] >= end:
            break
        if starts[entry] >= free:
            rows[found] = starts[entry]
            found += 1
            free = starts[entry] + length
    return rows[:found]
