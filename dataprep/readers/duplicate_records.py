"""Repeated records of one source: same locator (id) and same text, so the same document
id.

Only an `id_field` and the record ids of WARC files can repeat; all other locators are a
path and a record number. The first in the order of the sorted listing is kept,
whichever worker read it; the others are removed from the written shards. A rewritten
shard differs in size from its task's record, so an interrupted attempt repeats that
task and ends with the same bytes.

No process holds a row per document of the source.

1. ids: the ids of each shard by partition, NOTE_BYTES per document.
2. find: per partition, about SORTED_BYTES of ids in six times as much memory, the
   repeated rows by group of shards.
3. drop: per group, remove these rows from their shards, with one shard in memory at a
   time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.core.files import as_path, atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counts, SourceCounts
from gristmill.dataprep.documents import (
    ID_BYTES,
    ROW_GROUP_ROWS,
    read_table,
    write_table,
)
from gristmill.dataprep.readers.document_shards import DROPPED_SCHEMA, ReadFiles
from gristmill.dataprep.readers.sources import SourceError
from gristmill.dataprep.runners.shuffle import Sending, Sent, Shuffled, run_shuffle
from gristmill.dataprep.runners.tasks import (
    PROCESS_BYTES,
    Done,
    OfShard,
    PartitionTask,
    Task,
    partition_tasks,
    run_tasks,
)
from gristmill.dataprep.shuffle_format import group_starts, open_batches, sort_rows

REPEATED = "ingest/repeated"
"""Reason for dropping a repeated record."""
MOST_PARTITIONS = MOST_GROUPS = 4096
NOTE_SCHEMA = pa.schema(
    [
        ("high", pa.uint64()),
        ("low", pa.uint64()),
        ("shard", pa.int32()),
        ("row", pa.int32()),
    ]
)
NOTE_BYTES = 24
SORTED_BYTES = 16 << 20
"""Bytes of ids per partition, which a task sorts in six times as much memory."""


class DuplicateIdError(SourceError):
    """Two records of a source are the same document: same id field and same text."""


@dataclass(frozen=True)
class Repeats:
    """Repeated documents of a source."""

    source: str
    documents: int
    text_bytes: int
    first: str
    """Locator of the first one."""
    emptied_shards: int
    """Number of shards without remaining documents."""

    def counts(self) -> Counts:
        """Changes to the ledger, which counted them as kept."""
        change = SourceCounts(
            kept=-self.documents,
            dropped={REPEATED: self.documents},
            bytes_kept=-self.text_bytes,
        )
        return {**change, "sources": {self.source: change}}

    def describe(self) -> str:
        """Sentence for a warning."""
        return (
            f"source {self.source!r}: {self.documents:,} records repeat the id and "
            "the text of one before, first "
            f"{self.first!r}; they are dropped (`on_repeat: fail` refuses them)"
        )


def shards_of(out: Path, source: str, results: Sequence[ReadFiles]) -> list[Path]:
    """Shards of a source in the order of its listing."""
    return [
        out / f"part-{task:05d}-{piece:03d}.parquet"
        for task, result in enumerate(results)
        if result["source"] == source
        for piece in range(result["totals"]["shards"])
    ]


class IdsPayload(OfShard):
    """Payload of a task that sends the ids of a shard."""

    path: str


class Removed(TypedDict):
    """Result of removing repeated documents."""

    documents: int
    text_bytes: int
    emptied_shards: int
    first: str
    """Locator of the first one."""


def send_ids(name: str, num_partitions: int, task: Task[IdsPayload]) -> Sending:
    """Send the ids of a shard under a name."""
    column = read_table(as_path(task.payload["path"]), ["id"])["id"].combine_chunks()
    halves = np.frombuffer(
        column.buffers()[1], np.uint64, len(column) * 2, column.offset * ID_BYTES
    ).reshape(-1, 2)
    shard = np.full(len(column), task.payload["shard"], np.int32)
    row = np.arange(len(column), dtype=np.int32)
    rows = pa.table([halves[:, 0].copy(), halves[:, 1].copy(), shard, row], NOTE_SCHEMA)
    partitions = (halves[:, 0] >> np.uint64(32)) * np.uint64(
        num_partitions
    ) >> np.uint64(32)
    yield Sent(name, rows, partitions.astype(np.int64))
    return Done()


def settle_repeats(
    source: str,
    shards: Sequence[Path],
    documents: int,
    job: str,
    refuse: bool,
    ledger: Path,
    context: Context,
) -> Repeats | None:
    """Remove repeated documents from their shards and list them in `ledger`; None if
    there are none.

    A shard without remaining documents is removed.

    Args:
        source: name of the source.
        shards: of the source, in the order of its listing.
        documents: number of documents in the shards.
        job: prefix of the jobs' names.
        refuse: raise instead of changing shards.
        ledger: file for the list of dropped documents.
        context: of the stage.

    Raises:
        DuplicateIdError: there are repeated documents, and `refuse` is set.
    """
    if not shards:
        return None
    number = min(max(-(-NOTE_BYTES * documents // SORTED_BYTES), 1), MOST_PARTITIONS)
    sorting = _alone(context, NOTE_BYTES * documents)
    tasks = [
        Task(shard.stem, IdsPayload(path=str(shard), shard=place))
        for place, shard in enumerate(shards)
    ]
    ids = f"{job}-ids"
    _, sent = run_shuffle(
        ids, tasks, partial(send_ids, ids, number), sorting, {ids: number}, direct=True
    )
    find = partial(find_repeats, job, len(shards), sent[ids])
    find_results, rows = run_shuffle(
        f"{job}-find",
        partition_tasks(number),
        find,
        sorting,
        {job: _num_groups(len(shards))},
        direct=True,
    )
    groups = sorted({group for result in find_results for group in result["groups"]})
    if not groups:
        return None
    folder = context.work / f"{job}-dropped"
    ledgers = [dropped_file(folder, group) for group in groups]
    # may be from an earlier attempt, with shards that have been written again since
    for file in ledgers:
        file.unlink(missing_ok=True)
    drop = partial(drop_repeats, [*map(str, shards)], rows[job], str(folder), refuse)
    size = sum(shard.stat().st_size for shard in shards)
    results = run_tasks(
        f"{job}-drop",
        [Task(f"{group:05d}", {"partition": group}) for group in groups],
        drop,
        _alone(context, size),
        direct=True,
    )
    repeats = Repeats(
        source,
        sum(result["documents"] for result in results),
        sum(result["text_bytes"] for result in results),
        results[0]["first"],
        sum(result["emptied_shards"] for result in results),
    )
    if refuse:
        raise DuplicateIdError(
            f"source {source!r}: {repeats.documents} records repeat the id and the "
            f"text of another, one of them {repeats.first!r}; name a field that is "
            "unique as `id_field`, leave it out, list every WARC file once, or keep "
            "the first of each with `on_repeat: keep_first`"
        )
    with (
        atomic_write(ledger) as sink,
        pq.ParquetWriter(  # the same bytes as `write_table`
            sink, DROPPED_SCHEMA, compression="zstd", write_page_checksum=True
        ) as writer,
    ):
        for rows_of_group in _row_groups(ledgers):
            number = len(rows_of_group)
            constants = ([source] * number, [""] * number, [0] * number)
            columns = [*constants, rows_of_group.combine_chunks(), [REPEATED] * number]
            writer.write_table(pa.table(columns, DROPPED_SCHEMA), ROW_GROUP_ROWS)
    return repeats


def _alone(context: Context, size: int) -> Context:
    """Use one worker for jobs that take less time than a pipeline's start."""
    return context if size >= PROCESS_BYTES else context.with_one_worker()


def _num_groups(shards: int) -> int:
    return min(shards, MOST_GROUPS)


def find_repeats(
    name: str, shards: int, ids: Shuffled, task: PartitionTask
) -> Sending[dict[str, list[int]]]:
    """Find the rows of a partition whose id is in an earlier shard or row; send `shard`
    and `row` of each.

    Args:
        name: to send them under.
        shards: number of shards.
        ids: of all shards.
        task: for a partition.
    """
    table = ids.read(task.payload["partition"])
    high, low = (table[name].to_numpy() for name in ("high", "low"))
    order = sort_rows(high, low)  # stable: the first of equal ids stays first
    first = np.zeros(len(order), bool)
    first[group_starts(high[order], low[order])] = True
    repeated = order[~first]
    shard, row = (table[column].to_numpy()[repeated] for column in ("shard", "row"))
    groups = shard.astype(np.int64) * _num_groups(shards) // shards
    yield Sent(name, pa.table({"shard": shard, "row": row}), groups)
    return Done([], {"groups": np.unique(groups).tolist()})


def dropped_file(folder: Path, group: int) -> Path:
    """File with the locators of the documents removed from a group of shards."""
    return folder / f"{group:05d}.arrow"


def drop_repeats(
    shards: Sequence[str],
    repeated_rows: Shuffled,
    folder: str,
    refuse: bool,
    task: PartitionTask,
) -> Done[Removed]:
    """Remove the repeated documents from a group of shards.

    Args:
        shards: all shards of the source, in order.
        repeated_rows: rows of `find_repeats`, by group.
        folder: for the locators of removed documents.
        refuse: only count them.
        task: for a group.
    """
    rows = repeated_rows.read(task.payload["partition"])
    shard, row = (rows[name].to_numpy() for name in ("shard", "row"))
    order = sort_rows(shard, row)
    shard = shard[order]
    row = row[order]
    starts = [*group_starts(shard).tolist(), len(shard)]
    text_bytes = emptied = 0
    locators: list[pa.Array] = []
    for begin, end in pairwise(starts):
        path = as_path(shards[shard[begin]])
        table = read_table(path)
        repeats = table.take(pa.array(row[begin:end]))
        locators.append(repeats["locator"].combine_chunks())
        text_bytes += pc.sum(pc.binary_length(repeats["text"])).as_py()
        kept = np.setdiff1d(np.arange(len(table)), row[begin:end])
        emptied += not len(kept)
        if not refuse and len(kept):
            write_table(path, table.take(pa.array(kept)))
        elif not refuse:
            path.unlink()
    target = dropped_file(as_path(folder), task.payload["partition"])
    table = pa.table({"locator": pa.chunked_array(locators)})
    with atomic_write(target) as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return Done(
        [target],
        {
            "documents": len(row),
            "text_bytes": text_bytes,
            "emptied_shards": emptied,
            "first": locators[0][0].as_py(),
        },
    )


def _row_groups(files: Sequence[Path]) -> Iterator[pa.ChunkedArray]:
    """Locators of files in groups of ROW_GROUP_ROWS."""
    locators = pa.chunked_array([], pa.string())
    for file in files:
        added = open_batches(file).read_all()["locator"]
        locators = pa.chunked_array([*locators.chunks, *added.chunks])
        while len(locators) >= ROW_GROUP_ROWS:
            yield locators[:ROW_GROUP_ROWS]
            locators = locators[ROW_GROUP_ROWS:]
    if len(locators):
        yield locators
