"""What a shard's rows hold: pieces of documents, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gristmill.tokenize.mixing.best_fit import by_bin
from gristmill.tokenize.mixing.draws import word_ids
from gristmill.tokenize.mixing.layouts import Layout
from gristmill.tokenize.mixing.plan import Documents, Plan, layout_of, load_record
from gristmill.tokenize.mixing.streams import Pieces, Stream, cut_runs
from gristmill.tokenize.packed_files import PIECES_SCHEMA


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
