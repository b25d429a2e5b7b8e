"""Writing the shards of a packed set: what each row holds, and its tokens out of the token parts.

What the workers must know (which documents make which rows) is saved as files that any machine can read. Tokens are
copied from the memory-mapped token parts some rows at a time, while these are in the cache: what is gathered is hashed
and written next, and of a whole shard every token would come from the main memory three times.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numba import carray

from gristmill.dataprep.files import as_path, atomic_write, is_local
from gristmill.dataprep.jobs.engine import Done, Task
from gristmill.dataprep.text.kernels import kernel
from gristmill.tokenize.document_sampling import order_below, word_ids
from gristmill.tokenize.mixing.best_fit import by_bin
from gristmill.tokenize.mixing.candidates import Documents
from gristmill.tokenize.mixing.exclude import EmptiedRows, documents_beside, drop_rows
from gristmill.tokenize.mixing.packing import Layout, Pieces, TokenStream, cut_runs
from gristmill.tokenize.order import half_bits_of, order_key, phase_parts, round_keys
from gristmill.tokenize.order_kernels import permute_all, unrank_all
from gristmill.tokenize.packed_files import DTYPES, PIECES_SCHEMA, files_of, read_tokens
from gristmill.tokenize.packed_writing import write_blocks, write_rows
from gristmill.tokenize.row_bytes import pointer

Record = TypeVar("Record", Documents, TokenStream, Layout)
"""A dataclass whose fields are all arrays."""
ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector instruction."""


@dataclass(frozen=True)
class RowPlan:
    """All that a worker must know to write a shard; the arrays are files in `folder`, for any machine to read.

    Attributes:
        folder: where `save` put the arrays.
        out: output folder of the stage.
        parts: token files, by number.
        dtype: of all tokens, by name.
        sequence_length: tokens per row.
        eos: id that ends a document.
        pad: id behind the last document of a row that is not full.
        seed: of the order of the rows.
        sources: names, in the order of the source numbers.
        phases: training rows of each source, for every phase in order.
        excluded: ids of the documents whose rows are emptied.
    """

    folder: str
    out: str
    parts: tuple[str, ...]
    dtype: str
    sequence_length: int
    eos: int
    pad: int
    seed: int
    sources: tuple[str, ...]
    phases: tuple[tuple[int, ...], ...]
    excluded: tuple[bytes, ...] = ()


def save(folder: Path, name: str, record: Documents | TokenStream | Layout) -> None:
    """Write the arrays of a record to one file: a line of JSON that says of each its dtype and shape, then all bytes.

    The line is filled up with blanks, so that every array begins at a multiple of ALIGNMENT.
    """
    arrays = {field: np.ascontiguousarray(array) for field, array in vars(record).items()}
    described = json.dumps({field: [array.dtype.str, array.shape] for field, array in arrays.items()}).encode()
    # Every attempt writes its plan again, so that none has to survive the machine.
    with atomic_write(folder / name, durable=False) as sink:
        sink.write(described.ljust(_aligned(len(described) + 1) - 1) + b"\n")
        for array in arrays.values():
            sink.write(array.data.cast("B") if array.size else b"")
            sink.write(bytes(_aligned(array.nbytes) - array.nbytes))


def load_record(folder: str, name: str, kind: type[Record]) -> Record:
    """A record that `save` wrote; its arrays are memory-mapped where they are local."""
    path = as_path(folder) / name
    with path.open("rb") as stream:
        line = stream.readline()
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if is_local(path) else line + stream.read()
    arrays, begin = {}, len(line)
    for field, (dtype, shape) in json.loads(line).items():
        arrays[field] = np.frombuffer(content, dtype, math.prod(shape), begin).reshape(shape)
        begin += _aligned(arrays[field].nbytes)
    return kind(**arrays)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def train_stream(source: int) -> str:
    """The saved name of a source's training stream."""
    return f"train-{source}"


def validation_stream(source: int) -> str:
    """The saved name of a source's held-out stream."""
    return f"validation-{source}"


def layout_of(stream: str) -> str:
    """The saved name of the layout of a stream that is saved under some name."""
    return f"{stream}-layout"


def write_shard(task: Task, plan: RowPlan, token_bytes: str) -> Done:
    """Write a shard of training rows, or of a source's held-out rows: payload `source` is there for these."""
    if "source" in task.payload:
        return write_validation_shard(task, plan, token_bytes)
    return write_train_shard(task, plan)


def write_train_shard(task: Task, plan: RowPlan) -> Done:
    """Write training rows [first, first + rows): payload `file`, `first`, `rows`."""
    first, rows = task.payload["first"], task.payload["rows"]
    sources, drawn = _rows_of_places(plan, np.arange(first, first + rows))
    chosen = {source: np.flatnonzero(sources == source) for source in np.unique(sources).tolist()}
    contents = in_order([content_of(plan, train_stream(source), source, drawn[places], places)
                         for source, places in chosen.items()], rows)
    documents = load_record(plan.folder, "documents", Documents)
    emptied = EmptiedRows(contents.table(documents, first), first, plan.excluded, plan.pad)
    path = as_path(plan.out) / task.payload["file"]
    blocks = emptied.blocks(blocks_of(plan, documents, contents, rows))
    return Done(files_of(path), {**write_blocks(path, blocks, emptied.pieces, first), **emptied.entry()})


def _rows_of_places(plan: RowPlan, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which source is at each place of the files, and which of the rows that it was laid out in; both int64."""
    ends = np.cumsum([sum(counts) for counts in plan.phases])
    phases = np.searchsorted(ends, places, side="right")
    sources, drawn = np.empty_like(places), np.empty_like(places)
    for phase in np.unique(phases).tolist():
        counts, chosen = np.array(plan.phases[phase], dtype=np.int64), np.flatnonzero(phases == phase)
        own, ranked = np.empty_like(chosen), np.empty_like(chosen)
        unrank_all(counts, places[chosen] - (ends[phase] - counts.sum()), own, ranked)
        keys = np.array([round_keys(order_key(plan.seed, "mix", "rows", *phase_parts(phase), name))[::-1]
                         for name in plan.sources])
        permute_all(own, ranked, counts, np.array([half_bits_of(count) for count in counts.tolist()]), keys, True)
        before = np.array(plan.phases[:phase], dtype=np.int64).reshape(phase, len(counts)).sum(axis=0)
        sources[chosen], drawn[chosen] = own, before[own] + ranked
    return sources, drawn


def write_validation_shard(task: Task, plan: RowPlan, token_bytes: str) -> Done:
    """Write all held-out rows of a source: payload `file`, `source`, `rows`; also counts the text that they hold."""
    source, rows = task.payload["source"], task.payload["rows"]
    order = np.arange(rows)
    documents = load_record(plan.folder, "documents", Documents)
    contents = content_of(plan, validation_stream(source), source, order, order)
    tokens = next(blocks_of(plan, documents, contents, rows, block_rows=rows))
    pieces = contents.table(documents, 0)
    touched = documents_beside(pieces, plan.excluded)
    tokens, pieces = drop_rows(tokens, pieces, plan.excluded)
    path = as_path(plan.out) / task.payload["file"]
    entry = {**write_rows(path, tokens, pieces), **touched}
    with as_path(token_bytes).open("rb") as stream:
        sizes = np.load(stream)
    text_bytes = int(sizes[tokens].sum(dtype=np.int64))
    return Done(files_of(path), {**entry, "bytes": text_bytes})


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


def content_of(plan: RowPlan, name: str, source: int, rows: np.ndarray, places: np.ndarray) -> Contents:
    """What rows of a source's saved stream hold, laid to places of a shard (both int64 of shape (n,))."""
    stream = load_record(plan.folder, name, TokenStream)
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


def _pieces(stream: TokenStream, layout: Layout, rows: np.ndarray) -> Pieces:
    """The pieces of rows (int64 of shape (n,)), in the order asked for."""
    first = layout.first[rows]
    counts = layout.first[rows + 1] - first
    before = np.cumsum(counts) - counts
    run = np.arange(counts.sum()) + np.repeat(first - before, counts)
    length = layout.length[run].astype(np.int64)
    passed = np.concatenate([[0], np.cumsum(length)])
    start = passed[:-1] - np.repeat(passed[before], counts)
    return cut_runs(stream, np.repeat(np.arange(len(rows)), counts), start, layout.at[run], length)


BLOCK_BYTES = 1_000_000
"""About the second-level cache of a core."""


def blocks_of(
    plan: RowPlan, documents: Documents, contents: Contents, rows: int, block_rows: int | None = None
) -> Iterator[np.ndarray]:
    """The tokens of a shard, some rows after the other.

    Args:
        plan: of the mixture.
        documents: all of them.
        contents: of the shard, ordered by row.
        rows: of the shard.
        block_rows: rows at a time; as BLOCK_BYTES say if None.

    Yields:
        (n, sequence_length) in the plan's dtype, in memory that the next block takes; one empty block of no rows.
    """
    parts = TokenParts([as_path(part) for part in plan.parts], DTYPES[plan.dtype])
    length, pieces = plan.sequence_length, len(contents.row)
    # What is not on a local disk is read part by part, whole: so only once.
    each = rows if not parts.local else block_rows or max(1, BLOCK_BYTES // (length * parts.dtype.itemsize))
    each = max(1, min(each, rows))
    blocks = max(1, -(-rows // each))
    part, origin, target, text = (np.empty(pieces, dtype=np.int64) for _ in range(4))
    route(contents.row, contents.start, contents.length, contents.document, contents.offset, parts.begins,
          documents.part, documents.offset, documents.tokens, length, part, origin, target, text)
    order, _ = order_below(origin, int(parts.begins[-1]))
    block = (contents.row // each).astype(np.int32)
    bounds = np.searchsorted(block, np.arange(blocks + 1))
    order = order[by_bin(block[order], bounds)]  # by origin within each block
    filled = np.bincount(contents.row, contents.length, rows).astype(np.int64)
    out = np.empty((each, length), dtype=parts.dtype)
    for number in range(blocks):
        first = number * each
        taken = out[: min(each, rows - first)]
        for opened, chosen in parts.opened(order[bounds[number] : bounds[number + 1]], origin):
            gather(opened, parts.begins, chosen, part, origin, target, text, contents.length, first * length, plan.eos,
                   taken.reshape(-1))
        pad_rows(taken, filled[first : first + len(taken)], plan.pad)
        yield taken


class TokenParts:
    """The token parts of a mixture, opened when they are first needed.

    Args:
        paths: of the files, by number.
        dtype: of the tokens.

    Attributes:
        begins: int64 of shape (parts + 1,), tokens in the parts before each.
        local: whether all of them lie on a local disk.
    """

    def __init__(self, paths: Sequence[Path], dtype: np.dtype[Any]) -> None:
        self.dtype, self.local = dtype, all(map(is_local, paths))
        sizes = [path.stat().st_size // dtype.itemsize for path in paths]
        self.begins = np.cumsum([0, *sizes], dtype=np.int64)
        self._paths, self._mapped = paths, list[np.ndarray]()
        self._addresses = np.zeros(len(paths), dtype=np.uint64)

    def opened(self, chosen: np.ndarray, origin: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Pieces whose parts are in memory: all at once where that is a memory map, else those of one part at a time.

        Args:
            chosen: int64 of shape (k,), numbers of pieces, ordered by their origin.
            origin: int64 of shape (n,), first token of every piece, counted through all parts.

        Yields:
            where the first token of each part lies in memory (uint64 of shape (parts,); valid until the next step), and
            some of `chosen`.
        """
        if self.local:
            if not self._mapped:
                self._mapped = [read_tokens(path, self.dtype) for path in self._paths]
                self._addresses[:] = [part.ctypes.data for part in self._mapped]
            yield self._addresses, chosen
            return
        bounds = [*np.searchsorted(origin[chosen], self.begins[:-1]).tolist(), len(chosen)]
        for number, (first, last) in enumerate(pairwise(bounds)):
            if first < last:
                part = read_tokens(self._paths[number], self.dtype)
                self._addresses[number] = part.ctypes.data
                yield self._addresses, chosen[first:last]


@kernel
def route(
    row: np.ndarray, start: np.ndarray, length: np.ndarray, document: np.ndarray, offset: np.ndarray,
    begins: np.ndarray, parts: np.ndarray, first: np.ndarray, tokens: np.ndarray, row_tokens: int, part: np.ndarray,
    origin: np.ndarray, target: np.ndarray, text: np.ndarray,
) -> None:  # fmt: skip
    """Where each piece comes from and goes to.

    Args:
        row, start, length, document, offset: see Contents.
        begins: see TokenParts.
        parts, first, tokens: of all documents, see Documents.
        row_tokens: tokens per row.
        part: int64, filled: the number of its part.
        origin: int64, filled: the first token, counted through all parts.
        target: int64, filled: where that goes.
        text: int64, filled: how many tokens there are; what is missing to `length` is an end of text.
    """
    for piece in range(len(row)):
        one = document[piece]
        part[piece] = parts[one]
        origin[piece] = begins[parts[one]] + first[one] + offset[piece]
        target[piece] = row[piece] * row_tokens + start[piece]
        text[piece] = min(length[piece], tokens[one] - offset[piece])


@kernel
def gather(
    addresses: np.ndarray, begins: np.ndarray, chosen: np.ndarray, part: np.ndarray, origin: np.ndarray,
    target: np.ndarray, text: np.ndarray, length: np.ndarray, before: int, eos: int, out: np.ndarray,
) -> None:  # fmt: skip
    """Copy pieces to where they go, each with its end of text.

    Args:
        addresses: uint64 (parts,), where each part's first token lies in memory; who calls keeps them there.
        begins: see TokenParts.
        chosen: int64 of shape (k,), which pieces.
        part, origin, target, text: see `route`.
        length: of the pieces, the end of text counted.
        before: target of the first token of `out`.
        eos: the end of text.
        out: tokens, flat.
    """
    size = np.uint64(out.itemsize)
    for piece in chosen:
        # Unsigned, as no index counts from the end: what makes vector instructions of the loop.
        here, number = np.uint64(target[piece] - before), np.uint64(text[piece])
        if number:
            passed = np.uint64(origin[piece] - begins[part[piece]])
            source = carray(pointer(addresses[part[piece]] + passed * size), (number,), out.dtype)
            for step in range(number):
                out[here + step] = source[step]
        if number < np.uint64(length[piece]):
            out[here + number] = eos


@kernel
def pad_rows(tokens: np.ndarray, filled: np.ndarray, pad: int) -> None:
    """Set the tokens (n, L) of each row behind its first `filled` (int64, shape (n,)) to the padding."""
    for row in range(len(tokens)):
        tokens[row, filled[row] :] = pad
