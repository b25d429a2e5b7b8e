"""Losses of a stage by source, domain and language, counted from its output.

The documents of each shard are counted by group and reason, and SQLite adds the counts
of all shards, on disk if they are many: there may be as many domains as documents. A
stage of a small corpus pays 4 ms for it; importing DuckDB and connecting takes 60.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counts
from gristmill.dataprep.documents import (
    QUARANTINE_REASON,
    Inputs,
    read_shard,
    read_table,
    shard_names,
    write_table,
)
from gristmill.dataprep.group_losses import (
    COLUMNS,
    GroupLoss,
    IntendedLosses,
)
from gristmill.dataprep.runners.tasks import Done, Task, planning_context, run_tasks
from gristmill.dataprep.sites import SITE
from gristmill.mixtures.schema.guard import LEAST_DOCUMENTS
from gristmill.mixtures.schema.sources import INGEST

JOB = "losses"
MOST_GROUPS = 100
"""Recorded groups per column: those that lost most beyond the share that the stage
drops of all documents.
"""
EXAMPLES = 3
TEXTS = pa.schema(
    [(name, pa.string()) for name in ("source", "locator", "language", "reason")]
)
BETWEEN = "\0"
"""Separator of the locators of examples."""
_OF_COLUMN = (
    "SELECT '{0}' AS kind, {0} AS name, reason, documents, examples FROM tallies"
)
_LARGEST = f"""
    WITH counted AS (
        SELECT * FROM ({" UNION ALL ".join(map(_OF_COLUMN.format, COLUMNS))})
        WHERE name IS NOT NULL
            AND json_array(kind, reason) NOT IN (SELECT value FROM json_each(?))
    ), by_group AS (
        SELECT kind, name, sum(documents) AS read,
            sum(documents) FILTER (WHERE reason IS NOT NULL) AS dropped
        FROM counted GROUP BY kind, name
    ), shares AS (
        SELECT kind, sum(dropped) * 1.0 / sum(read) AS share FROM by_group GROUP BY kind
    ), ranked AS (
        SELECT by_group.*, row_number() OVER (
            PARTITION BY kind ORDER BY dropped - read * share DESC, name
        ) AS place
        FROM by_group JOIN shares USING (kind)
        WHERE dropped > 0 AND read >= {LEAST_DOCUMENTS}
    )
    SELECT kind, name, read, dropped, reason, examples
    FROM (
        SELECT kind, place, name, read, dropped, reason,
            group_concat(examples, char(0)) AS examples, row_number() OVER (
                PARTITION BY kind, place ORDER BY sum(documents) DESC, reason
            ) AS place_of_reason
        FROM ranked JOIN counted USING (kind, name)
        WHERE place <= {MOST_GROUPS} AND reason IS NOT NULL
        GROUP BY kind, place, reason
    )
    WHERE place_of_reason = 1 ORDER BY kind <> 'source', kind, dropped DESC, name
"""


class OfTable(TypedDict):
    """Payload of a task for a table of an output."""

    table: str


def count_losses(
    inputs: Inputs,
    out: Path,
    intended: IntendedLosses,
    counts: Counts,
    context: Context,
) -> list[GroupLoss]:
    """Count the losses of `ingest`, or of a step that has written its annotations.

    Args:
        inputs: of a step: `ingest`, and the annotating stages that ran before.
        out: the stage's output.
        intended: its rules about columns.
        counts: its documents by outcome.
    """
    if counts["kept"] == counts["read"]:
        return []
    inputs = {**inputs, context.stage: out}
    tables = shard_names(inputs[INGEST])
    if context.stage == INGEST:
        tables += sorted(
            f"{path.parent.name}/{path.name}" for path in out.glob("*/*.parquet")
        )
    tasks = [Task(table.replace("/", "-"), OfTable(table=table)) for table in tables]
    folder = context.work / JOB / "tallies"
    tally = partial(tally_table, inputs=inputs, folder=folder)
    run_tasks(JOB, tasks, tally, planning_context(counts["read"], context))
    return add_tallies((read_table(folder / task.name) for task in tasks), intended)


def tally_table(task: Task[OfTable], inputs: Inputs, folder: Path) -> Done:
    """Count the documents of one table by group and reason, with examples."""
    name = task.payload["table"]
    documents = not_read(inputs[INGEST] / name) if "/" in name else judged(inputs, name)
    locators, is_dropped = documents["locator"], documents["reason"].is_valid()
    hosts = pc.struct_field(pc.extract_regex(locators, SITE), 0)
    tally = (
        documents.append_column("domain", pc.utf8_lower(hosts))
        .append_column("example", pc.if_else(is_dropped, locators, None))
        .group_by([*COLUMNS, "reason"], use_threads=False)
        .aggregate([([], "count_all"), ("example", "list")])
    )
    firsts = pc.list_slice(tally["example_list"], 0, EXAMPLES)
    tally = tally.set_column(5, "examples", pc.binary_join(firsts, BETWEEN))
    write_table(folder / task.name, tally, durable=False)
    return Done([folder / task.name])


def judged(inputs: Inputs, shard: str) -> pa.Table:
    """Documents of a shard that the last stage of the inputs kept or dropped, in the
    order of their ids, which are hashes.
    """
    annotated = read_shard(inputs, shard, ["id", *TEXTS.names])
    dropped = np.flatnonzero(annotated.documents["reason"].is_valid())
    documents = annotated.documents.take(np.union1d(annotated.rows, dropped))
    return documents.sort_by("id").select(TEXTS.names).cast(TEXTS)


def not_read(path: Path) -> pa.Table:
    """Records in a table of those that `ingest` dropped or could not read."""
    records = read_table(path)
    numbers = records["record"].cast(pa.string())
    columns = {
        "language": pa.nulls(len(records), pa.string()),
        "locator": pc.binary_join_element_wise(records["file"], numbers, "#"),
        "reason": pa.repeat(QUARANTINE_REASON, len(records)),
    }
    columns |= dict(zip(records.column_names, records.columns, strict=True))
    return pa.table(columns).select(TEXTS.names)


def add_tallies(
    tallies: Iterable[pa.Table], intended: IntendedLosses
) -> list[GroupLoss]:
    """Add the tallies of all tables, and select the groups to record."""
    with closing(sqlite3.connect("")) as database:
        database.execute(
            "CREATE TABLE tallies (source, domain, language, reason, documents, examples)"
        )
        for tally in tallies:
            rows = zip(*(column.to_pylist() for column in tally.columns), strict=True)
            database.executemany("INSERT INTO tallies VALUES (?, ?, ?, ?, ?, ?)", rows)
        groups = database.execute(_LARGEST, [json.dumps(intended)]).fetchall()
    return [
        GroupLoss(
            column,
            group,
            read,
            dropped,
            reason,
            sorted(examples.split(BETWEEN))[:EXAMPLES],
        )
        for column, group, read, dropped, reason, examples in groups
    ]
