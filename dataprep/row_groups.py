"""Reading a Parquet file in part: what can hold what is asked for, or the text of a shard one part after the other.

Row groups say the least and the greatest of each. Of a shard's text the next part is read while one is worked on, as
decompression takes as long as a fast kernel, and Arrow does it without the interpreter: whoever needs no more than some
documents at a time holds two parts instead of a shard, and waits for the reading of the first one only.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.dataprep.documents import ID_BYTES, Combined, annotation_stages, check_ids, column_names, open_table
from gristmill.dataprep.edits import EDITS, apply_edits
from gristmill.dataprep.files import is_local
from gristmill.mixtures.sources import INGEST

T = TypeVar("T")


def read_matching(path: Path, column: str, values: Sequence[Any], columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a table whose `column` is one of some values, in the order of the file.

    Row groups whose range holds none of the values are not read: in a file that is sorted by the column these are all
    but a few, so that a look-up takes as long in a large file as in a small one.

    Args:
        path: a Parquet file.
        column: whole numbers, or binary of one length.
        values: what to look for, of the column's Python type.
        columns: what to return of the rows; everything if absent.
    """
    wanted = sorted(set(values))
    with open_table(path) as file:
        groups = [
            number
            for number in range(file.metadata.num_row_groups)
            if _may_hold(file.metadata.row_group(number), column, wanted)
        ]
        read = None if columns is None else list(dict.fromkeys((column, *columns)))
        table = file.read_row_groups(groups, read, use_threads=is_local(path))
    hits = table.filter(pc.is_in(table[column], value_set=_array_of(wanted, table.schema.field(column).type)))
    return hits if columns is None else hits.select(list(columns))


def read_rows(path: Path, rows: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
    """Rows of a table by their number, in the order asked for; reads only the row groups that hold them."""
    with open_table(path) as file:
        sizes = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
        ends = np.cumsum([0, *sizes])
        numbers = np.asarray(rows, dtype=np.int64)
        groups = np.searchsorted(ends, numbers, side="right") - 1
        used = np.unique(groups)
        table = file.read_row_groups(
            used.tolist(), None if columns is None else list(columns), use_threads=is_local(path)
        )
    starts = np.cumsum([0, *(sizes[group] for group in used.tolist())])
    return table.take(integers(starts[np.searchsorted(used, groups)] + numbers - ends[groups]))


SEARCHING = 8
"""Shards whose ids are looked through at the same time."""


def find_ids(folder: Path, shards: Sequence[str], beginning: str) -> list[tuple[str, int]]:
    """Where documents are, by the first hexadecimal digits of their ids: shard and row, in their order.

    It reads nothing but ids, 16 bytes of each document, and holds those of SEARCHING shards. A whole id ends the search
    where it is found, as no other document has it.

    Args:
        folder: of `ingest`.
        shards: its document shards, or some.
        beginning: 1 to 32 digits.
    """
    digits = 2 * ID_BYTES
    low, high = (int(beginning.ljust(digits, filler), 16) for filler in "0f")
    found: list[tuple[str, int]] = []
    # Of files in memory, more threads than cores only take the interpreter from each other.
    threads = min(SEARCHING, os.cpu_count() or 1) if is_local(folder) else SEARCHING
    with ThreadPoolExecutor(threads, "ids") as pool:
        for first in range(0, len(shards), SEARCHING):
            some = shards[first : first + SEARCHING]
            paths = [folder / shard for shard in some]
            for shard, rows in zip(some, pool.map(partial(_rows_between, low=low, high=high), paths), strict=True):
                found += [(shard, row) for row in rows]
            if found and len(beginning) == digits:
                break
    return found


def _rows_between(path: Path, low: int, high: int) -> list[int]:
    """The rows whose ids, as numbers, lie in [low, high]."""
    with open_table(path) as file:
        ids = file.read(["id"], use_threads=False)["id"]
    found, before = [], 0
    for chunk in ids.chunks:
        words = np.frombuffer(chunk.buffers()[1], ">u8", 2 * len(chunk), ID_BYTES * chunk.offset)[::2]
        near = np.flatnonzero((words >= low >> 64) & (words <= high >> 64))
        found += [before + row for row in near.tolist() if low <= int.from_bytes(chunk[row].as_py()) <= high]
        before += len(chunk)
    return found


def read_document_rows(
    inputs: Mapping[str, Path], shard: str, rows: Sequence[int], columns: Sequence[str] | None = None
) -> pa.Table:
    """Documents of a shard by their row (all columns, or some), in the order asked for; the text has the edits of the
    stages among the inputs. Reads only the row groups that hold them.

    Raises:
        MisalignedError: what a stage says there is of other documents.
    """
    wanted = None if columns is None else list(dict.fromkeys(["id", *columns]))
    table = read_rows(inputs[INGEST] / shard, rows, wanted)
    for stage in annotation_stages(inputs) if "text" in table.column_names else ():
        if EDITS in column_names(inputs[stage] / shard):
            edits = read_annotation_rows(inputs, shard, stage, rows, table["id"], [EDITS])[EDITS]
            place = table.column_names.index("text")
            table = table.set_column(place, table.schema.field(place), apply_edits(table["text"], edits))
    return table if columns is None else table.select(list(columns))


def read_annotation_rows(
    inputs: Mapping[str, Path],
    shard: str,
    stage: str,
    rows: Sequence[int],
    ids: pa.ChunkedArray,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """What a stage says of documents of a shard by their row: `id` and its columns, all or some.

    Args:
        ids: of these documents.

    Raises:
        MisalignedError: its table has others there.
    """
    table = read_rows(inputs[stage] / shard, rows, None if columns is None else ["id", *columns])
    check_ids(inputs, shard, stage, table["id"], ids)
    return table


def ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """The same items; the next one is made in a thread while the one before is used. Errors come where the item would.

    It ends with the iterator: where that is closed or garbage, after the item that is being made.
    """
    end = object()
    with ThreadPoolExecutor(1, "ahead") as pool:
        coming = pool.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = pool.submit(next, items, end)
            yield item  # type: ignore[misc]


def read_texts(inputs: Mapping[str, Path], shard: str, found: Combined, part_bytes: int) -> Iterator[pa.Array]:
    """The text of the documents that every stage kept, with the edits of all, in parts of about so many bytes.

    A part has as many documents as have these bytes in the mean; it is larger where long ones follow one another.

    Args:
        inputs: `ingest`.
        shard: name of the shard.
        found: what the stages say of its documents, with their edits (`documents.combine_annotations`).
        part_bytes: of the text before edits.

    Raises:
        DamagedTableError: it cannot be read as it was written.
    """
    with open_table(inputs[INGEST] / shard) as file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        places = [group.column(place) for group in groups for place in range(group.num_columns)]
        size = sum(column.total_uncompressed_size for column in places if column.path_in_schema == "text")
        rows = max(1, file.metadata.num_rows * part_bytes // max(size, 1))
        begin = 0
        for batch in file.iter_batches(rows, columns=["text"], use_threads=False):
            texts, part = batch["text"], slice(begin, begin + len(batch))
            if found.edits is not None:
                texts = apply_edits(texts, found.edits[part])
            yield texts if found.keep[part].all() else texts.filter(pa.array(found.keep[part]))
            begin = part.stop


def _array_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_integer(kind):
        return integers(np.array(values, dtype=np.int64)).cast(kind)
    if pa.types.is_fixed_size_binary(kind):
        return pa.FixedSizeBinaryArray.from_buffers(kind, len(values), [None, pa.py_buffer(b"".join(values))])
    return pa.array(values, kind)


def integers(values: np.ndarray) -> pa.Array:
    """int64 as an array. `pa.array` would import pandas to see what it is given: a quarter of a look-up's time."""
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _may_hold(group: pq.RowGroupMetaData, column: str, wanted: Sequence[Any]) -> bool:
    """Whether a row group's statistics admit one of the sorted values; without statistics it may hold any."""
    place = next(number for number in range(group.num_columns) if group.column(number).path_in_schema == column)
    statistics = group.column(place).statistics
    if statistics is None or not statistics.has_min_max:
        return True
    first = bisect_left(wanted, statistics.min)
    return first < len(wanted) and bool(wanted[first] <= statistics.max)
