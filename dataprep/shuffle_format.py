"""Building blocks of a shuffle: groups of equal rows in sorted columns, and Arrow files
with a batch per partition.

`runners/shuffle.py` moves the rows from one job to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.files import atomic_write, is_local


def sort_rows(*columns: np.ndarray) -> np.ndarray:
    """Order (int64) that sorts rows by the first column, then by the second, and so on;
    stable.
    """
    return np.lexsort(columns[::-1])


def sorted_columns(
    columns: Mapping[str, np.ndarray], by: Iterable[str]
) -> dict[str, np.ndarray]:
    """Columns with their rows sorted by some of them (see `sort_rows`)."""
    order = sort_rows(*(columns[name] for name in by))
    return {name: values[order] for name, values in columns.items()}


def group_starts(*columns: np.ndarray) -> np.ndarray:
    """First rows of runs of equal rows: int64, ascending. Equal rows must be
    adjacent.
    """
    if not len(columns[0]):
        return np.empty(0, np.int64)
    new = np.zeros(len(columns[0]), bool)
    new[0] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new)


def spread_groups(starts: np.ndarray, rows: int) -> np.ndarray:
    """Group number of each row."""
    marks = np.zeros(rows, np.int64)
    marks[starts] = 1
    return np.cumsum(marks) - 1


def group_sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Sum of the values of each group."""
    return np.add.reduceat(values, starts) if len(starts) else np.empty(0, np.int64)


def ranges(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Concatenated ranges from each begin to its end."""
    sizes = ends - begins
    return np.arange(sizes.sum()) + np.repeat(begins + sizes - np.cumsum(sizes), sizes)


def find_pairs(
    high: np.ndarray, low: np.ndarray, wanted_high: np.ndarray, wanted_low: np.ndarray
) -> np.ndarray:
    """Positions of pairs of numbers among sorted distinct pairs: int64, -1 for missing
    pairs.
    """
    if not len(high):
        return np.full(len(wanted_high), -1, np.int64)
    places = np.searchsorted(high, wanted_high)
    while True:  # repeats only if two keys share their upper half
        inside = np.minimum(places, len(high) - 1)
        is_equal = (places < len(high)) & (high[inside] == wanted_high)
        is_before = is_equal & (low[inside] < wanted_low)
        if not is_before.any():
            break
        places = places + is_before
    positions = np.where(is_equal & (low[inside] == wanted_low), places, -1)
    return positions.astype(np.int64)


PARTITION_BYTES = 128_000_000
"""Bytes per partition. A partition is sorted in memory, which takes about five times
its size.
"""
FEWEST_PARTITIONS, MOST_PARTITIONS = 8, 4096


def count_partitions(
    total: int, size: int = PARTITION_BYTES, fewest: int = FEWEST_PARTITIONS
) -> int:
    """Number of partitions of this size for so many bytes or rows; a function of the
    data alone, never of the workers.
    """
    return min(max(-(-total // size), fewest), MOST_PARTITIONS)


def hash_partitions(hashes: np.ndarray, num_partitions: int) -> np.ndarray:
    """Partition (int64) of each 64-bit hash, by its upper half."""
    return (hashes >> np.uint64(32)).astype(np.int64) % num_partitions


def columns_of(table: pa.Table) -> dict[str, np.ndarray]:
    """Columns of a table by name."""
    return {name: table[name].to_numpy() for name in table.column_names}


def task_file(work: Path, job: str, name: str) -> Path:
    """Arrow file of a task of a job, in the stage's work folder."""
    return work / job / f"{name}.arrow"


def write_rows(path: Path, rows: pa.Table) -> None:
    """Write rows as a single partition."""
    write_batches(path, rows, np.array([0, len(rows)]))


def by_partition(
    rows: pa.Table, partitions: np.ndarray, num_partitions: int
) -> tuple[pa.Table, np.ndarray]:
    """Rows sorted by partition, and the partitions' bounds: int64 of shape (partitions
    + 1,).

    Args:
        partitions: int64 of shape (rows,), below `num_partitions`; ignored if there is
            only one.
    """
    if num_partitions == 1:
        return rows, np.array([0, len(rows)])
    order = np.argsort(partitions, kind="stable")
    ends = np.searchsorted(partitions[order], np.arange(num_partitions + 1))
    return rows.take(order).combine_chunks(), ends


def write_batches(path: Path, rows: pa.Table, ends: np.ndarray) -> None:
    """Write rows as one batch per partition, without flushing to disk (see
    `tasks.finish_task`).
    """
    with (
        atomic_write(path, durable=False) as sink,
        pa.ipc.new_file(sink, rows.schema) as writer,
    ):
        for begin, end in pairwise(ends.tolist()):
            writer.write_batch(batch_of(rows, begin, end))


def batch_of(rows: pa.Table, begin: int, end: int) -> pa.RecordBatch:
    """Rows `begin` up to `end` as one batch."""
    columns = [
        column.combine_chunks() for column in rows.slice(begin, end - begin).columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def open_batches(path: Path) -> pa.RecordBatchFileReader:
    """Open an Arrow file; a local one is memory-mapped, so that only the used batches
    are read.
    """
    return pa.ipc.open_file(
        pa.memory_map(str(path)) if is_local(path) else path.open("rb")
    )
