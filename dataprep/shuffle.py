"""Moving rows to partitions through files, no more files than tasks; sorted columns as groups of equal rows.

Each task writes one Arrow file with one record batch per partition; a task of the next job reads the batch of its
partition from all of them. The files lie in the stage's work folder, which may be in any store that fsspec knows: the
store is all that workers on several machines have in common, and no runner ever holds the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.dataprep.files import atomic_write, is_local


def sort_rows(*columns: np.ndarray) -> np.ndarray:
    """The order (int64) that sorts rows by the first column, then by the second, and so on; stable."""
    order: np.ndarray = np.lexsort(columns[::-1])
    return order


def group_starts(*columns: np.ndarray) -> np.ndarray:
    """Where runs of equal rows begin: int64, ascending. Equal rows must be neighbours."""
    if not len(columns[0]):
        return np.empty(0, np.int64)
    new = np.zeros(len(columns[0]), bool)
    new[0] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(new)


def spread_groups(starts: np.ndarray, rows: int) -> np.ndarray:
    """For each of so many rows, the number of the group that it is in."""
    marks = np.zeros(rows, np.int64)
    marks[starts] = 1
    numbers: np.ndarray = np.cumsum(marks) - 1
    return numbers


def find_pairs(high: np.ndarray, low: np.ndarray, wanted_high: np.ndarray, wanted_low: np.ndarray) -> np.ndarray:
    """The places of pairs of numbers among sorted distinct ones: int64, -1 where a pair is not there."""
    if not len(high):
        return np.full(len(wanted_high), -1, np.int64)
    places = np.searchsorted(high, wanted_high)
    while True:  # more than once only where two keys share their upper half
        inside = np.minimum(places, len(high) - 1)
        behind = (places < len(high)) & (high[inside] == wanted_high) & (low[inside] < wanted_low)
        if not behind.any():
            break
        places = places + behind
    found = (places < len(high)) & (high[inside] == wanted_high) & (low[inside] == wanted_low)
    result: np.ndarray = np.where(found, places, -1).astype(np.int64)
    return result


PARTITION_BYTES = 128_000_000
"""Rows of a partition are sorted in memory, which takes about five times their size."""
FEWEST_PARTITIONS, MOST_PARTITIONS = 8, 4096
MOST_MAPPED = 4096
"""Files that one task maps at a time: Linux lets a process have 65,530 maps (vm.max_map_count), for all its threads."""


def count_partitions(total_bytes: int) -> int:
    """How many partitions to cut so many bytes into; a function of the data alone, never of the workers."""
    return min(max(-(-total_bytes // PARTITION_BYTES), FEWEST_PARTITIONS), MOST_PARTITIONS)


def task_file(work: Path, job: str, name: str) -> Path:
    """The Arrow file that a task of a job leaves in its stage's work folder."""
    return work / job / f"{name}.arrow"


def write_partitions(path: Path, rows: pa.Table, partitions: np.ndarray, num_partitions: int) -> None:
    """Write rows to their partitions, in their order.

    What is shuffled is not forced to the disk (see `engine.finish_task`).

    Args:
        partitions: int64 of shape (rows,), below `num_partitions`; nobody looks at them where there is one.
    """
    ends = np.array([0, len(rows)])
    if num_partitions > 1:
        order = np.argsort(partitions, kind="stable")
        rows = rows.take(order).combine_chunks()
        ends = np.searchsorted(partitions[order], np.arange(num_partitions + 1))
    with atomic_write(path, durable=False) as sink, pa.ipc.new_file(sink, rows.schema) as writer:
        for begin, end in pairwise(ends):
            columns = [column.combine_chunks() for column in rows.slice(begin, end - begin).columns]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=rows.schema))


def read_partition(paths: Iterable[Path], partition: int) -> pa.Table:
    """Read one partition of several files, in their order; at least one."""
    return concat_mapped(paths, lambda file: pa.Table.from_batches([file.get_batch(partition)]))


def concat_mapped(paths: Iterable[Path], read: Callable[[pa.RecordBatchFileReader], pa.Table]) -> pa.Table:
    """Concatenate what is read of several files, in their order; at least one.

    Up to MOST_MAPPED files stay mapped. Of more, what is read is copied, so that never more are mapped at a time.
    """
    listed = list(paths)
    if len(listed) <= MOST_MAPPED:
        return pa.concat_tables([read(open_batches(path)) for path in listed])
    groups = (listed[begin : begin + MOST_MAPPED] for begin in range(0, len(listed), MOST_MAPPED))
    return pa.concat_tables([concat_mapped(group, read).combine_chunks() for group in groups])


def open_batches(path: Path) -> pa.RecordBatchFileReader:
    """Open an Arrow file; a local one is mapped, so that only what is used is read."""
    return pa.ipc.open_file(pa.memory_map(str(path)) if is_local(path) else path.open("rb"))
