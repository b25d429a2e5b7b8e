"""Partial reads of Parquet files: row groups that may match a query, or the text of a
shard in parts.

Row groups have minimum and maximum statistics. The next part of a shard's text is read
in a thread while the current one is processed: decompression takes as long as a fast
kernel, and Arrow releases the interpreter lock. A reader holds two parts instead of a
shard, and only waits for the first.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.core.arrays import offsets_of
from gristmill.core.files import is_local
from gristmill.dataprep.documents import (
    ID_BYTES,
    Combined,
    Inputs,
    annotation_stages,
    check_ids,
    column_names,
    open_table,
    read_table,
    shard_names,
    stored_text_bytes,
)
from gristmill.dataprep.edits import EDITS, apply_edits
from gristmill.mixtures.schema.sources import INGEST

T = TypeVar("T")


def read_matching(
    path: Path, column: str, values: Sequence[Any], columns: Sequence[str] | None = None
) -> pa.Table:
    """Rows of a table whose `column` is one of some values, in the order of the file.

    Row groups whose range has none of the values are skipped; in a file sorted by the
    column that is all but a few, so that a look-up takes as long in a large file as in
    a small one.

    Args:
        path: a Parquet file.
        column: integers, or fixed-size binary.
        values: of the column's Python type.
        columns: returned columns; all if None.
    """
    sorted_values = sorted(set(values))
    with open_table(path) as file:
        groups = [
            number
            for number in range(file.metadata.num_row_groups)
            if _may_hold(file.metadata.row_group(number), column, sorted_values)
        ]
        read = None if columns is None else list(dict.fromkeys((column, *columns)))
        table = file.read_row_groups(groups, read, use_threads=is_local(path))
    value_set = pa.array(sorted_values, table.schema.field(column).type)
    hits = table.filter(pc.is_in(table[column], value_set=value_set))
    return hits if columns is None else hits.select(columns)


def read_rows(
    path: Path, rows: Sequence[int], columns: Sequence[str] | None = None
) -> pa.Table:
    """Rows of a table by number, in the requested order; reads only the row groups that
    have them.
    """
    with open_table(path) as file:
        sizes = [
            file.metadata.row_group(number).num_rows
            for number in range(file.metadata.num_row_groups)
        ]
        ends = offsets_of(sizes)
        numbers = np.asarray(rows, dtype=np.int64)
        groups = np.searchsorted(ends, numbers, side="right") - 1
        used = np.unique(groups)
        table = file.read_row_groups(
            used.tolist(),
            columns,
            use_threads=is_local(path),
        )
    starts = offsets_of([sizes[group] for group in used.tolist()])
    return table.take(starts[np.searchsorted(used, groups)] + numbers - ends[groups])


SEARCHING = 8
"""Shards searched at the same time."""


def find_ids(
    folder: Path, shards: Sequence[str], beginning: str
) -> list[tuple[str, int]]:
    """Find documents by a prefix of their ids: shard and row of each, in order.

    Reads only ids, 16 bytes per document, of SEARCHING shards at a time. A full id ends
    the search at its first match, as ids are unique.

    Args:
        folder: output of `ingest`.
        shards: its document shards, or some.
        beginning: prefix of 1 to 32 hexadecimal digits.
    """
    digits = 2 * ID_BYTES
    low, high = (int(beginning.ljust(digits, filler), 16) for filler in "0f")
    places: list[tuple[str, int]] = []
    # For local files, more threads than cores only contend for the interpreter lock.
    threads = min(SEARCHING, os.cpu_count() or 1) if is_local(folder) else SEARCHING
    with ThreadPoolExecutor(threads, "ids") as pool:
        for first in range(0, len(shards), SEARCHING):
            batch = shards[first : first + SEARCHING]
            search = partial(_rows_between, low=low, high=high)
            rows_of_shards = pool.map(search, [folder / shard for shard in batch])
            for shard, rows in zip(batch, rows_of_shards, strict=True):
                places += [(shard, row) for row in rows]
            if places and len(beginning) == digits:
                break
    return places


def _rows_between(path: Path, low: int, high: int) -> list[int]:
    """Row numbers of ids that, as integers, lie in [low, high]."""
    with open_table(path) as file:
        ids = file.read(["id"], use_threads=False)["id"]
    rows = []
    before = 0
    for chunk in ids.chunks:
        words = np.frombuffer(
            chunk.buffers()[1], ">u8", 2 * len(chunk), ID_BYTES * chunk.offset
        )[::2]
        for index in np.flatnonzero((words >= low >> 64) & (words <= high >> 64)):
            if low <= int.from_bytes(chunk[int(index)].as_py()) <= high:
                rows.append(before + int(index))
        before += len(chunk)
    return rows


def read_document_rows(
    inputs: Inputs,
    shard: str,
    rows: Sequence[int],
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Documents of a shard by row number (all columns, or some), in the requested
    order, with the edits of all stages.

    Reads only the row groups that have them.

    Raises:
        MisalignedError: a stage's annotations belong to other documents.
    """
    document_columns = (
        None if columns is None else list(dict.fromkeys(["id", *columns]))
    )
    table = read_rows(inputs[INGEST] / shard, rows, document_columns)
    for stage in annotation_stages(inputs) if "text" in table.column_names else ():
        if EDITS in column_names(inputs[stage] / shard):
            edits = read_annotation_rows(
                inputs, shard, stage, rows, table["id"], [EDITS]
            )[EDITS]
            place = table.column_names.index("text")
            table = table.set_column(
                place, table.schema.field(place), apply_edits(table["text"], edits)
            )
    return table if columns is None else table.select(columns)


def documents_of(
    inputs: Inputs, ids: Iterable[bytes], columns: Sequence[str]
) -> dict[bytes, dict[str, Any]]:
    """Requested columns of some documents by id, their texts with all edits; of other
    documents only the ids are read.
    """
    id_values = pa.array(sorted(set(ids)), pa.binary(ID_BYTES))
    documents: dict[bytes, dict[str, Any]] = {}
    if not len(id_values):
        return documents
    for shard in shard_names(inputs[INGEST]):
        ids_of_shard = read_table(inputs[INGEST] / shard, ["id"])["id"]
        rows = pc.indices_nonzero(pc.is_in(ids_of_shard, id_values)).to_pylist()
        if rows:
            table = read_document_rows(inputs, shard, rows, ["id", *columns])
            documents |= {document["id"]: document for document in table.to_pylist()}
        if len(documents) == len(id_values):
            break
    return documents


def read_annotation_rows(
    inputs: Inputs,
    shard: str,
    stage: str,
    rows: Sequence[int],
    ids: pa.ChunkedArray,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Annotations of a stage by row number: `id` and its columns, all or some.

    Args:
        ids: of these documents.

    Raises:
        MisalignedError: the annotations belong to other documents.
    """
    table = read_rows(
        inputs[stage] / shard, rows, None if columns is None else ["id", *columns]
    )
    check_ids(inputs, shard, stage, table["id"], ids)
    return table


def ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """Prefetch an iterator: the next item is computed in a thread while the current one
    is used. Errors come in order.

    Closing or garbage collection waits for the item being computed.
    """
    exhausted = object()
    with ThreadPoolExecutor(1, "ahead") as pool:
        future = pool.submit(next, items, exhausted)
        while (item := future.result()) is not exhausted:
            future = pool.submit(next, items, exhausted)
            yield item  # type: ignore[misc]


def read_texts(
    inputs: Inputs, shard: str, annotations: Combined, part_bytes: int
) -> Iterator[pa.Array]:
    """Text of the documents kept by every stage, with all edits, in parts of about
    `part_bytes`.

    Parts have equal numbers of documents, so a part with long documents is larger.

    Args:
        inputs: `ingest`.
        shard: name of the shard.
        annotations: annotations of its documents, with their edits
            (`documents.combine_annotations`).
        part_bytes: mean bytes of a part's text before edits.

    Raises:
        DamagedTableError: the table is damaged.
    """
    with open_table(inputs[INGEST] / shard) as file:
        size = max(stored_text_bytes(file), 1)
        rows = max(1, file.metadata.num_rows * part_bytes // size)
        begin = 0
        for batch in file.iter_batches(rows, columns=["text"], use_threads=False):
            texts = batch["text"]
            part = slice(begin, begin + len(batch))
            if annotations.edits is not None:
                texts = apply_edits(texts, annotations.edits[part])
            kept = annotations.keep[part]
            yield texts if kept.all() else texts.filter(kept)
            begin = part.stop


def _may_hold(
    group: pq.RowGroupMetaData, column: str, sorted_values: Sequence[Any]
) -> bool:
    """True if a row group's statistics admit one of the sorted values, or are
    missing.
    """
    columns = map(group.column, range(group.num_columns))
    statistics = next(
        part.statistics for part in columns if part.path_in_schema == column
    )
    if statistics is None or not statistics.has_min_max:
        return True
    first = bisect_left(sorted_values, statistics.min)
    return first < len(sorted_values) and bool(sorted_values[first] <= statistics.max)
