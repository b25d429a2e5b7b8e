"""Writer of the shards of a packed set: gathers the tokens of each row from the token
parts.

The pieces of each shard are in shuffled files that any machine can read. A task holds
the pieces of one shard, 250 bytes each, and BLOCK_BYTES of tokens; the token parts
are memory-mapped. Tokens are gathered in blocks of rows that stay in the cache for
hashing and writing: gathering a whole shard first would read every token from main
memory three times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pyarrow as pa
from numba import carray

from gristmill.core.arrays import offsets_of
from gristmill.core.files import as_path
from gristmill.dataprep.runners.shuffle import Shuffled
from gristmill.dataprep.runners.tasks import Done, Task
from gristmill.dataprep.shuffle_format import columns_of, group_starts, group_sums
from gristmill.dataprep.text.kernels import kernel, pointer
from gristmill.tokenize.document_sampling import (
    order_below,
    word_ids,
    words_of,
)
from gristmill.tokenize.mixing.exclude import EmptiedRows, drop_rows
from gristmill.tokenize.mixing.send_tokens import receive_tokens, received_places
from gristmill.tokenize.packed_files import (
    DTYPES,
    PIECES_SCHEMA,
    ShardEntry,
    files_of,
    read_tokens,
)
from gristmill.tokenize.packed_writing import write_blocks, write_rows
from gristmill.tokenize.packing.best_fit import bin_begins, by_bin


@dataclass(frozen=True)
class RowPlan:
    """Inputs of the workers that write shards.

    Attributes:
        placed: pieces of each shard (`row_layout.py`).
        out: output folder of the stage.
        parts: token files, by number.
        dtype: of all tokens, by name.
        sequence_length: tokens per row.
        eos: id that ends a document.
        pad: id that fills the end of an incomplete row.
        excluded: ids of documents whose rows are emptied.
    """

    placed: Shuffled
    out: str
    parts: tuple[str, ...]
    dtype: str
    sequence_length: int
    eos: int
    pad: int
    excluded: tuple[bytes, ...] = ()
    sent: Shuffled | None = None
    """Tokens of each shard if workers do not read the parts (`send_tokens.py`)."""


@dataclass(frozen=True)
class WrittenShard:
    """Result of a task that wrote a shard.

    Attributes:
        entry: of packed.json.
        touched: ids, hexadecimal, of all documents in the rows that were emptied or
            dropped because they hold an excluded document.
        text_bytes: bytes of the held-out text.
    """

    entry: ShardEntry
    touched: Sequence[str]
    text_bytes: int = 0


def write_shard(task: Task, plan: RowPlan, token_bytes: str) -> Done:
    """Write a shard of training rows, or of a source's held-out rows if payload
    `held_out` is set.
    """
    if not task.payload["held_out"]:
        return write_train_shard(task, plan)
    rows = task.payload["rows"]
    contents = read_contents(plan, task.payload["partition"], rows)
    tokens = next(blocks_of(plan, contents, rows, block_rows=rows))
    tokens, pieces, touched = drop_rows(tokens, contents.table(0), plan.excluded)
    path = as_path(plan.out) / task.payload["file"]
    entry = write_rows(path, tokens, pieces)
    with as_path(token_bytes).open("rb") as stream:
        sizes = np.load(stream)
    text_bytes = int(sizes[tokens].sum(dtype=np.int64))
    return Done(files_of(path), asdict(WrittenShard(entry, touched, text_bytes)))


def write_train_shard(task: Task, plan: RowPlan) -> Done:
    """Write training rows [first, first + rows): payload `file`, `partition`, `first`,
    `rows`.
    """
    first = task.payload["first"]
    rows = task.payload["rows"]
    contents = read_contents(plan, task.payload["partition"], rows)
    path = as_path(plan.out) / task.payload["file"]
    emptied = EmptiedRows(contents.table(first), first, plan.excluded, plan.pad)
    blocks = emptied.blocks(blocks_of(plan, contents, rows))
    entry = emptied.describe(write_blocks(path, blocks, emptied.pieces, first))
    return Done(files_of(path), asdict(WrittenShard(entry, emptied.touched)))


@dataclass(frozen=True)
class Contents:
    """Pieces of documents in rows, ordered by row and start; all of shape (p,), int64
    unless stated.

    Attributes:
        row: number within the shard.
        start: first token within the row.
        length: tokens, including the end of text.
        words: uint64 of shape (p, 2), the document's id.
        source: int32, number of its source.
        copy: int32, pass over the source.
        offset: first token within the document.
        part: number of the token part.
        first: first token within the part.
        text: tokens without the end of text; less than `length` if an end of text
            follows.
        sent: the shard's tokens, which `first` indexes, if they were sent; else None.
        end: int32, id of the token after each run if documents are rearranged
            (`fill_in_middle.py`); else None.
    """

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    words: np.ndarray
    source: np.ndarray
    copy: np.ndarray
    offset: np.ndarray
    part: np.ndarray
    first: np.ndarray
    text: np.ndarray
    sent: np.ndarray | None = None
    end: np.ndarray | None = None

    def table(self, first: int) -> pa.Table:
        """Pieces as PIECES_SCHEMA, with their runs joined and the shard's rows counted
        from `first`.
        """
        begins = np.arange(len(self.row))
        length = self.length
        if self.end is not None:
            # The runs of a piece follow one another in their document.
            document_start = self.offset - np.cumsum(self.length) + self.length
            begins = group_starts(self.row, self.copy, document_start, *self.words.T)
            length = group_sums(self.length, begins)
        return pa.table(
            [
                self.row[begins] + first,
                self.start[begins].astype(np.int32),
                length.astype(np.int32),
                word_ids(self.words.take(begins, axis=0)),
                self.source[begins],
                self.copy[begins],
                self.offset[begins],
            ],
            schema=PIECES_SCHEMA,
        )


def read_contents(plan: RowPlan, partition: int, rows: int) -> Contents:
    """Read the pieces of a shard of `rows` rows, ordered by row and, within a row, in
    stream order.
    """
    columns = columns_of(plan.placed.read(partition))
    first = bin_begins(columns["row"], rows)
    order = by_bin(columns["row"], first)
    columns = {name: column[order] for name, column in columns.items()}
    row, length, part, begin, text = (
        columns[name].astype(np.int64)
        for name in ("row", "length", "part", "first", "text")
    )
    passed = np.cumsum(length) - length
    sent = None
    if plan.sent is not None:
        sent = receive_tokens(plan.sent, partition, DTYPES[plan.dtype])
        begin = received_places(part, begin, text)
        part = np.zeros_like(part)
    return Contents(
        row,
        passed - passed[first[row]] if len(length) else passed,
        length,
        words_of(columns),
        columns["source"],
        columns["copy"],
        columns["offset"],
        part,
        begin,
        text,
        sent,
        columns.get("end"),
    )


BLOCK_BYTES = 1_000_000
"""Roughly the second-level cache of a core."""


def blocks_of(
    plan: RowPlan, contents: Contents, rows: int, block_rows: int | None = None
) -> Iterator[np.ndarray]:
    """Gather the tokens of a shard in blocks of rows.

    Args:
        plan: of the mixture.
        contents: of the shard, ordered by row.
        rows: of the shard.
        block_rows: rows per block; None for BLOCK_BYTES.

    Yields:
        (n, sequence_length) in the plan's dtype, in memory that the next block reuses;
        one empty block if there are no rows.
    """
    dtype = DTYPES[plan.dtype]
    parts = (
        [read_tokens(as_path(path), dtype) for path in plan.parts]
        if contents.sent is None
        else [contents.sent]
    )
    begins = offsets_of([len(part) for part in parts])
    addresses = np.array([part.ctypes.data for part in parts], np.uint64)
    length = plan.sequence_length
    per_block = block_rows or max(1, BLOCK_BYTES // (length * dtype.itemsize))
    per_block = max(1, min(per_block, rows))
    blocks = max(1, -(-rows // per_block))
    origin = begins[contents.part] + contents.first
    target = contents.row * length + contents.start
    order, _ = order_below(origin, int(begins[-1]))
    block = (contents.row // per_block).astype(np.int32)
    bounds = np.searchsorted(block, np.arange(blocks + 1))
    order = order[by_bin(block[order], bounds)]  # sorted by origin within each block
    ends = contents.end
    if ends is None:
        ends = np.full(1, plan.eos, np.int32)
    filled = np.bincount(contents.row, contents.length, rows).astype(np.int64)
    out = np.empty((per_block, length), dtype)
    for number in range(blocks):
        first = number * per_block
        block_tokens = out[: min(per_block, rows - first)]
        gather(
            addresses,
            begins,
            order[bounds[number] : bounds[number + 1]],
            contents.part,
            origin,
            target,
            contents.text,
            contents.length,
            first * length,
            ends,
            block_tokens.reshape(-1),
        )
        pad_rows(block_tokens, filled[first : first + len(block_tokens)], plan.pad)
        yield block_tokens


@kernel
def gather(
    addresses: np.ndarray,
    begins: np.ndarray,
    chosen: np.ndarray,
    part: np.ndarray,
    origin: np.ndarray,
    target: np.ndarray,
    text: np.ndarray,
    length: np.ndarray,
    before: int,
    ends: np.ndarray,
    out: np.ndarray,
) -> None:
    """Copy pieces to their targets, each followed by its end of text.

    Args:
        addresses: uint64 (parts,), address of each part's first token; the caller keeps
            the parts alive.
        begins: int64 of shape (parts + 1,), tokens before each part.
        chosen: int64 of shape (k,), numbers of the pieces.
        part, text, length: of the pieces, see `Contents`.
        origin: int64, first token of each piece, counted through all parts.
        target: int64, its target, counted through all rows of the shard.
        before: target of the first token of `out`.
        ends: int32, id of the token after each piece; a single one for all.
        out: tokens, flat.
    """
    size = np.uint64(out.itemsize)
    for piece in chosen:
        # Unsigned indices cannot be negative, which lets the compiler vectorise the
        # loop.
        position, number = np.uint64(target[piece] - before), np.uint64(text[piece])
        if number:
            passed = np.uint64(origin[piece] - begins[part[piece]])
            source = carray(
                pointer(addresses[part[piece]] + passed * size), (number,), out.dtype
            )
            for step in range(number):
                out[position + step] = source[step]
        if number < np.uint64(length[piece]):
            out[position + number] = ends[piece if len(ends) > 1 else 0]


@kernel
def pad_rows(tokens: np.ndarray, filled: np.ndarray, pad: int) -> None:
    """Fill each row of tokens (n, L) with padding after its first `filled` (int64,
    shape (n,)) tokens.
    """
    for row in range(len(tokens)):
        tokens[row, filled[row] :] = pad
