"""A source's virtual token stream: its documents in drawn order, pass after pass, each followed by an end of text.

Row j of a source is tokens [j L, (j + 1) L) of its stream. Nothing is written: a stream is three arrays from which
any row's pieces are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gristmill.tokenize.mixing.draws import drawn_order
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


def make_stream(documents: np.ndarray, words: np.ndarray, tokens: np.ndarray, key: int, least_tokens: int) -> Stream:
    """Lay out whole passes over some documents until at least `least_tokens` tokens are there.

    Args:
        documents: int64 of shape (n,): their numbers.
        words: (n, 2) id words (`draws.id_words`); the order depends on these and the key alone.
        tokens: int64 of shape (n,), without ends of text.
        key: 64 bits; every pass draws anew.
        least_tokens: where to stop; documents that begin after it are left out.
    """
    orders, total, passes = [np.empty(0, dtype=np.int64)], 0, 0
    while len(documents) and total < least_tokens:
        orders.append(drawn_order(words, order_key(key, "pass", passes)))
        total += int(tokens.sum()) + len(tokens)
        passes += 1
    order = np.concatenate(orders)
    starts = np.concatenate([[0], np.cumsum(tokens[order] + 1)]).astype(np.int64)
    used = int(np.searchsorted(starts[:-1], least_tokens))
    copies = np.repeat(np.arange(passes, dtype=np.int32), len(documents))
    return Stream(starts[: used + 1], documents[order[:used]], copies[:used])


def cut_rows(stream: Stream, rows: np.ndarray, sequence_length: int) -> Pieces:
    """The pieces of rows (int64 of shape (n,)) of a stream, which is long enough for all of them."""
    begin = rows * sequence_length
    first = np.searchsorted(stream.starts, begin, side="right") - 1
    last = np.searchsorted(stream.starts, begin + sequence_length, side="left")
    counts = last - first
    place = np.repeat(np.arange(len(rows)), counts)
    entry = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    start = np.maximum(stream.starts[entry], begin[place])
    end = np.minimum(stream.starts[entry + 1], begin[place] + sequence_length)
    return Pieces(place, start - begin[place], end - start, entry, start - stream.starts[entry])


def count_split(stream: Stream, rows: int, sequence_length: int) -> int:
    """How many of the documents in the first `rows` rows lie in more than one row or are cut at the end."""
    first_row = stream.starts[:-1] // sequence_length
    last_row = (stream.starts[1:] - 1) // sequence_length
    return int(((first_row != last_row) & (first_row < rows)).sum())
