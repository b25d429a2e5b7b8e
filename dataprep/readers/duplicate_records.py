"""Repeated records of one source: same locator (id) and same text, so the same document
id.

Only an `id_field` and the record ids of WARC files can repeat; all other locators are a
path and a record number. The first in the order of the sorted listing is kept,
whichever worker read it; the others are removed from the written shards. A rewritten
shard differs in size from its task's record, so an interrupted attempt repeats that
task and ends with the same bytes.

DuckDB compares the ids in the parent process, on disk if they are many; then each shard
with repeated documents is a task, which holds it in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
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
from gristmill.dataprep.runners.tasks import PROCESS_BYTES, Done, Task, run_tasks

REPEATED = "ingest/repeated"
"""Reason for dropping a repeated record."""
LIMITS = {"memory_limit": "1GB", "threads": 2}
"""Settings of DuckDB, which sorts on disk beyond this memory."""


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


class Repetitive(TypedDict):
    """Payload of a task that removes the repeated documents of a shard."""

    shard: str
    documents: int
    """Number of its documents, repeated ones included."""
    rows: str
    """File with the rows of the repeated ones."""
    dropped: str
    """File for what is listed of them."""


def settle_repeats(
    source: str,
    shards: Sequence[Path],
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
        job: name of the job that removes them.
        refuse: raise instead of changing shards.
        ledger: file for the list of dropped documents.
        context: of the stage.

    Raises:
        DuplicateIdError: there are repeated documents, and `refuse` is set.
    """
    import duckdb

    with (
        tempfile.TemporaryDirectory() as folder,
        duckdb.connect(config={**LIMITS, "temp_directory": folder}) as connection,
    ):
        connection.execute(
            "CREATE TABLE ids (high UBIGINT, low UBIGINT, shard INTEGER, place INTEGER)"
        )
        sizes = []
        for number, path in enumerate(shards):
            ids = read_table(path, ["id"])["id"].combine_chunks()
            halves = np.frombuffer(
                ids.buffers()[1], np.uint64, len(ids) * 2, ids.offset * ID_BYTES
            ).reshape(-1, 2)
            columns = {
                "high": halves[:, 0].copy(),
                "low": halves[:, 1].copy(),
                "shard": np.full(len(ids), number, np.int32),
                "place": np.arange(len(ids), dtype=np.int32),
            }
            connection.register("shard_ids", pa.table(columns))
            connection.execute("INSERT INTO ids FROM shard_ids")
            sizes.append(len(ids))
        connection.execute(
            "CREATE TABLE repeats AS SELECT shard, place FROM ids QUALIFY row_number() "
            "OVER (PARTITION BY high, low ORDER BY shard, place) > 1 "
            "ORDER BY shard, place"
        )
        numbers = connection.execute(
            "SELECT shard, count(*), min(place) FROM repeats GROUP BY shard ORDER BY shard"
        ).fetchall()
        if not numbers:
            return None

        documents = sum(number for _, number, _ in numbers)
        first_shard, _, first_row = numbers[0]
        locators = read_table(shards[first_shard], ["locator"])["locator"]
        first: str = locators[first_row].as_py()
        if refuse:
            raise DuplicateIdError(
                f"source {source!r}: {documents} records repeat the id and the "
                f"text of another, one of them {first!r}; name a field that is "
                "unique as `id_field`, leave it out, list every WARC file once, or "
                "keep the first of each with `on_repeat: keep_first`"
            )
        tasks = []
        for shard, _, _ in numbers:
            path = shards[shard]
            rows = context.work / f"{job}-rows" / path.name
            dropped = context.work / f"{job}-dropped" / path.name
            repeated_rows = connection.execute(
                "SELECT place AS row FROM repeats WHERE shard = ? ORDER BY place",
                [shard],
            )
            write_table(rows, pa.table(repeated_rows.fetchnumpy()))
            # may be from an earlier attempt, with a shard that was written again since
            dropped.unlink(missing_ok=True)
            payload = Repetitive(
                shard=str(path),
                documents=sizes[shard],
                rows=str(rows),
                dropped=str(dropped),
            )
            tasks.append(Task(path.stem, payload, path.stat().st_size))
    if sum(task.size_bytes for task in tasks) < PROCESS_BYTES:
        context = context.with_one_worker()
    run_tasks(job, tasks, drop_repeats, context)
    text_bytes = 0
    with (
        atomic_write(ledger) as sink,
        pq.ParquetWriter(
            sink, DROPPED_SCHEMA, compression="zstd", write_page_checksum=True
        ) as writer,
    ):
        for task, (_, number, _) in zip(tasks, numbers, strict=True):
            repeats = read_table(as_path(task.payload["dropped"]))
            text_bytes += pc.sum(repeats["text_bytes"]).as_py()
            rows_of_shard = {
                "source": [source] * number,
                "file": [""] * number,
                "record": [0] * number,
                "locator": repeats["locator"],
                "reason": [REPEATED] * number,
            }
            writer.write_table(pa.table(rows_of_shard, DROPPED_SCHEMA), ROW_GROUP_ROWS)
    emptied = sum(number == sizes[shard] for shard, number, _ in numbers)
    return Repeats(source, documents, text_bytes, first, emptied)


def drop_repeats(task: Task[Repetitive]) -> Done:
    """Remove the repeated documents of a shard, unless an attempt that failed later has
    removed them.
    """
    shard, dropped = as_path(task.payload["shard"]), as_path(task.payload["dropped"])
    rows = read_table(as_path(task.payload["rows"]))["row"]
    if not shard.exists():
        return Done([dropped])
    table = read_table(shard)
    if len(table) < task.payload["documents"]:
        return Done([dropped])
    repeats = table.take(rows)
    columns = {
        "locator": repeats["locator"],
        "text_bytes": pc.binary_length(repeats["text"]),
    }
    write_table(dropped, pa.table(columns))
    kept = np.setdiff1d(np.arange(len(table)), rows.to_numpy())
    if len(kept):
        write_table(shard, table.take(kept))
    else:
        shard.unlink()
    return Done([dropped])
