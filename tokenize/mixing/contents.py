"""What a shard's rows hold: pieces of documents, where they go, and their tokens copied there from the token parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gristmill.dataprep.files import as_path
from gristmill.dataprep.kernels import kernel
from gristmill.tokenize.mixing.best_fit import by_bin
from gristmill.tokenize.mixing.draws import word_ids
from gristmill.tokenize.mixing.layouts import Layout
from gristmill.tokenize.mixing.plan import Documents, Plan, layout_of, load_record
from gristmill.tokenize.mixing.spread import order_below
from gristmill.tokenize.mixing.streams import Pieces, Stream, cut_runs
from gristmill.tokenize.packed_files import DTYPES, PIECES_SCHEMA, read_tokens


@dataclass(frozen=True)
class Contents:
    """Pieces of documents in rows; all of shape (p,), int64 where nothing else is said.

    Attributes:
        row: number within the shard.
        start: first token within the row.
        length: tokens, the end of text counted.
        document: number of the document.
        source: int32, number of its source.
        copy: int32, which pass over the source this is.
        offset: first token within the document.
    """

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    document: np.ndarray
    source: np.ndarray
    copy: np.ndarray
    offset: np.ndarray

    def table(self, documents: Documents, first: int) -> pa.Table:
        """The same as PIECES_SCHEMA, the shard's rows counted from `first`."""
        return pa.table([
            self.row + first, self.start.astype(np.int32), self.length.astype(np.int32),
            word_ids(documents.words[self.document]), self.source, self.copy, self.offset,
        ], schema=PIECES_SCHEMA)


def content_of(plan: Plan, name: str, source: int, rows: np.ndarray, places: np.ndarray) -> Contents:
    """What rows of a source's saved stream hold, laid to places of a shard (both int64 of shape (n,))."""
    stream = load_record(plan.folder, name, Stream)
    pieces = _pieces(stream, load_record(plan.folder, layout_of(name), Layout), rows)
    return Contents(places[pieces.place], pieces.start, pieces.length, stream.document[pieces.entry],
                    np.full(len(pieces.entry), source, dtype=np.int32), stream.copy[pieces.entry], pieces.offset)


def in_order(parts: Sequence[Contents], rows: int) -> Contents:
    """The contents of several sources together by row; a row has pieces of one source, which stay in their order."""
    columns = [np.concatenate(column) for column in zip(*(vars(part).values() for part in parts), strict=True)]
    row = columns[0]
    first = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))]).astype(np.int64)
    order = by_bin(row.astype(np.int32), first)
    return Contents(*(column[order] for column in columns))


def _pieces(stream: Stream, layout: Layout, rows: np.ndarray) -> Pieces:
    """The pieces of rows (int64 of shape (n,)), in the order asked for."""
    first = layout.first[rows]
    counts = layout.first[rows + 1] - first
    before = np.cumsum(counts) - counts
    run = np.arange(counts.sum()) + np.repeat(first - before, counts)
    length = layout.length[run].astype(np.int64)
    passed = np.concatenate([[0], np.cumsum(length)])
    start = passed[:-1] - np.repeat(passed[before], counts)
    return cut_runs(stream, np.repeat(np.arange(len(rows)), counts), start, layout.at[run], length)


def gather_parts(plan: Plan, documents: Documents, contents: Contents, tokens: np.ndarray) -> None:
    """Copy every piece from its token part: part by part, each read from front to back."""
    flat, pieces = tokens.reshape(-1), len(contents.row)
    itemsize = DTYPES[plan.dtype].itemsize
    sizes = [as_path(part).stat().st_size // itemsize for part in plan.parts]
    begins = np.cumsum([0, *sizes], dtype=np.int64)
    origin, target, text = (np.empty(pieces, dtype=np.int64) for _ in range(3))
    route(contents.row, contents.start, contents.length, contents.document, contents.offset, begins, documents.part,
          documents.offset, documents.tokens, plan.sequence_length, plan.eos, flat, origin, target, text)
    order, ordered = order_below(origin, int(begins[-1]))
    bounds = np.searchsorted(ordered, begins).tolist()
    for part, begin, first, last in zip(plan.parts, begins.tolist(), bounds, bounds[1:], strict=False):
        if first < last:
            source = read_tokens(as_path(part), DTYPES[plan.dtype])
            gather(source, begin, order[first:last], origin, target, text, flat)


@kernel
def route(
    row: np.ndarray, start: np.ndarray, length: np.ndarray, document: np.ndarray, offset: np.ndarray,
    begins: np.ndarray, part: np.ndarray, first: np.ndarray, tokens: np.ndarray, row_tokens: int, eos: int,
    flat: np.ndarray, origin: np.ndarray, target: np.ndarray, text: np.ndarray,
) -> None:  # fmt: skip
    """Where each piece comes from and goes to, and the ends of text, which come from nowhere.

    Args:
        row, start, length, document, offset: see Contents.
        begins: int64, tokens in the parts before each.
        part, first, tokens: of all documents, see Documents.
        row_tokens: tokens per row.
        eos: the end of text.
        flat: all tokens of the shard; the ends of text are put there.
        origin: int64, filled: the first token, counted through all parts.
        target: int64, filled: where that goes.
        text: int64, filled: how many follow it.
    """
    for piece in range(len(row)):
        one = document[piece]
        origin[piece] = begins[part[one]] + first[one] + offset[piece]
        target[piece] = row[piece] * row_tokens + start[piece]
        text[piece] = min(length[piece], tokens[one] - offset[piece])
        if text[piece] < length[piece]:
            flat[target[piece] + text[piece]] = eos


@kernel
def gather(
    source: np.ndarray, begin: int, order: np.ndarray, origin: np.ndarray, target: np.ndarray, length: np.ndarray,
    out: np.ndarray,
) -> None:  # fmt: skip
    """Copy runs: `out[target[i]:][:length[i]] = source[origin[i] - begin:][:length[i]]` for all i of an order.

    Args:
        source: tokens, flat.
        begin: number of its first token.
        order: int64 of shape (k,), which runs to copy.
        origin, target, length: int64 of shape (n,).
        out: tokens, flat, of the dtype of `source`.
    """
    for i in order:
        # Unsigned, as no index counts from the end: what makes vector instructions of the loop.
        there, here = np.uint64(target[i]), np.uint64(origin[i] - begin)
        for step in range(np.uint64(length[i])):
            out[there + step] = source[here + step]


@kernel
def pad_rows(tokens: np.ndarray, filled: np.ndarray, pad: int) -> None:
    """Set the tokens (n, L) of each row behind its first `filled` (int64, shape (n,)) to the padding."""
    for row in range(len(tokens)):
        tokens[row, filled[row] :] = pad
