"""A source's virtual token stream: its documents in drawn order, pass after pass, each followed by an end of text.

Rows are made of runs of it (`layouts.py`). Nothing is written: a stream is three arrays from which any run's pieces
are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gristmill.dataprep.kernels import kernel
from gristmill.tokenize.mixing.draws import draw, ordered_by
from gristmill.tokenize.order import order_key


@dataclass(frozen=True)
class Stream:
    """Documents back to back.

    Attributes:
        starts: int64 of shape (k + 1,): where each begins, its end of text being its last token; then the length.
        document: int64 of shape (k,): number of the document.
        copy: int32 of shape (k,): which pass over the source this is, from 0.
    """

    starts: np.ndarray
    document: np.ndarray
    copy: np.ndarray

    @property
    def tokens(self) -> int:
        """Length of the stream."""
        return int(self.starts[-1])


@dataclass(frozen=True)
class Pieces:
    """Parts of documents in rows, ordered by row and start; all int64 of shape (p,).

    Attributes:
        place: number of the row among those asked for.
        start: first token within the row.
        length: tokens, the end of text counted.
        entry: number of the document in the stream.
        offset: first token within the document.
    """

    place: np.ndarray
    start: np.ndarray
    length: np.ndarray
    entry: np.ndarray
    offset: np.ndarray


def make_stream(
    documents: np.ndarray, words: np.ndarray, tokens: np.ndarray, key: int, least_tokens: int,
    repeats: np.ndarray | None = None,
) -> Stream:
    """Lay out whole passes over some documents until at least `least_tokens` tokens are there.

    Args:
        documents: int64 of shape (n,): their numbers.
        words: (n, 2) id words (`draws.id_words`); the order depends on these and the key alone.
        tokens: int64 of shape (n,), without ends of text.
        key: 64 bits; every pass draws anew.
        least_tokens: where to stop; documents that begin after it are left out.
        repeats: int64 of shape (n,): how often each document is in a pass, all of them in one drawn order; once if
            None. The k-th of at most r in pass p is copy p r + k.
    """
    entries, repeat = _entries(len(documents), repeats)
    most, size = int(repeat.max(initial=0)) + 1, int((tokens[entries] + 1).sum())
    orders, copies, total = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int32)], 0
    while len(entries) and total < least_tokens:
        drawn = _drawn_pass(words, key, len(orders) - 1, entries, repeat)
        orders.append(entries[drawn])
        copies.append(((len(copies) - 1) * most + repeat[drawn]).astype(np.int32))
        total += size
    order = np.concatenate(orders)
    starts = np.concatenate([[0], np.cumsum(tokens[order] + 1)]).astype(np.int64)
    used = int(np.searchsorted(starts[:-1], least_tokens))
    return Stream(starts[: used + 1], documents[order[:used]], np.concatenate(copies)[:used])


def _entries(number: int, repeats: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """A pass before it is drawn: places of documents, and which time each of them is (from 0); both int64."""
    if repeats is None:
        return np.arange(number), np.zeros(number, dtype=np.int64)
    entries = np.repeat(np.arange(number), repeats)
    return entries, np.arange(len(entries)) - np.repeat(np.cumsum(repeats) - repeats, repeats)


def _drawn_pass(words: np.ndarray, key: int, number: int, entries: np.ndarray, repeat: np.ndarray) -> np.ndarray:
    """The order (int64) of a pass: each time of a document has a draw of its own."""
    draws = np.empty(len(entries), dtype=np.uint64)
    for time in range(int(repeat.max(initial=0)) + 1):
        parts = (number, time) if time else (number,)
        chosen = repeat == time
        draws[chosen] = draw(words[entries[chosen]], order_key(key, "pass", *parts))
    return ordered_by(draws, words[entries, 0], words[entries, 1], repeat)


def upto(stream: Stream, end: int) -> Stream:
    """The documents of a stream that begin before a token."""
    used = int(np.searchsorted(stream.starts[:-1], end))
    return Stream(stream.starts[: used + 1], stream.document[:used], stream.copy[:used])


def cut_runs(stream: Stream, place: np.ndarray, start: np.ndarray, at: np.ndarray, length: np.ndarray) -> Pieces:
    """The pieces of runs of a stream, which lie in it whole.

    Args:
        stream: the documents.
        place: int64 of shape (n,), number of the row that a run is in.
        start: int64 of shape (n,), first token within the row.
        at: int64 of shape (n,), first token within the stream.
        length: of shape (n,), tokens.
    """
    first = np.searchsorted(stream.starts, at, side="right") - 1
    counts = np.searchsorted(stream.starts, at + length, side="left") - first
    pieces = Pieces(*(np.empty(int(counts.sum()), dtype=np.int64) for _ in range(5)))
    cut(stream.starts, place, start, at, length, first, counts, pieces.place, pieces.start, pieces.length, pieces.entry,
        pieces.offset)
    return pieces


@kernel
def cut(
    starts: np.ndarray, place: np.ndarray, start: np.ndarray, at: np.ndarray, length: np.ndarray, first: np.ndarray,
    counts: np.ndarray, to_place: np.ndarray, to_start: np.ndarray, to_length: np.ndarray, to_entry: np.ndarray,
    to_offset: np.ndarray,
) -> None:  # fmt: skip
    """Fill the columns of `Pieces` (`to_...`), run after run (see `cut_runs`).

    Args:
        starts: of the stream.
        place, start, at, length: of the runs.
        first: int64 of shape (n,), number of the document in the stream that a run begins in.
        counts: int64 of shape (n,), how many documents it goes through.
        to_place, to_start, to_length, to_entry, to_offset: see `Pieces`.
    """
    piece = 0
    for run in range(len(at)):
        for entry in range(first[run], first[run] + counts[run]):
            begin = max(starts[entry], at[run])
            to_place[piece], to_entry[piece] = place[run], entry
            to_start[piece], to_offset[piece] = start[run] + begin - at[run], begin - starts[entry]
            to_length[piece] = min(starts[entry + 1], at[run] + length[run]) - begin
            piece += 1
