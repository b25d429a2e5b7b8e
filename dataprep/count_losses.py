"""Losses of a step by source, domain and language, counted from its annotations.

Per shard, documents by group and reason; then the sums of all shards, in a database
that spills to a temporary file: there may be as many domains as documents.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counts
from gristmill.dataprep.corpus import hex_ids
from gristmill.dataprep.documents import (
    Inputs,
    column_names,
    read_annotations,
    read_shard,
    read_table,
    write_table,
)
from gristmill.dataprep.group_losses import (
    COLUMNS,
    GroupLoss,
    IntendedLosses,
    LostDocument,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    ShardTask,
    planning_context,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.sites import SITE
from gristmill.mixtures.schema.guard import LEAST_DOCUMENTS
from gristmill.mixtures.schema.sources import INGEST

JOB = "losses"
MOST_GROUPS = 100
"""Recorded groups per column: those that lost most beyond the share that the step drops
of all documents.
"""
EXAMPLES = 3
BETWEEN = "\0"
"""Separator of examples, each an id and a locator."""
_SUMS = """
    CREATE TEMP TABLE sums AS
    SELECT kind, name, reason, sum(documents) AS documents,
        group_concat(examples, char(0)) AS examples
    FROM tallies
    WHERE NOT EXISTS (
        SELECT 1 FROM intended
        WHERE intended.kind = tallies.kind AND intended.reason = tallies.reason
    )
    GROUP BY kind, name, reason
"""
_LARGEST = f"""
    WITH by_group AS (
        SELECT kind, name, sum(documents) AS read,
            sum(CASE WHEN reason IS NULL THEN 0 ELSE documents END) AS dropped
        FROM sums GROUP BY kind, name
    ), with_totals AS (
        SELECT *, sum(read) OVER all_groups AS all_read,
            sum(dropped) OVER all_groups AS all_dropped
        FROM by_group WINDOW all_groups AS (PARTITION BY kind)
    ), ranked AS (
        SELECT *, row_number() OVER (
            PARTITION BY kind
            ORDER BY dropped - read * 1.0 * all_dropped / all_read DESC, name
        ) AS place
        FROM with_totals WHERE dropped > 0 AND read >= {LEAST_DOCUMENTS}
    )
    SELECT kind, name, read, dropped FROM ranked
    WHERE place <= {MOST_GROUPS} ORDER BY kind, place
"""
_REASONS = """
    SELECT reason, examples FROM sums
    WHERE kind = ? AND name = ? AND reason IS NOT NULL
    ORDER BY documents DESC, reason
"""


def count_losses(
    inputs: Inputs,
    out: Path,
    intended: IntendedLosses,
    counts: Counts,
    context: Context,
) -> list[GroupLoss]:
    """Count the losses of a step that has written its annotations.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        out: the step's output.
        intended: its rules about a column.
        counts: its documents by outcome.
    """
    if counts["kept"] == counts["read"]:
        return []
    tasks = shard_tasks(inputs[INGEST])
    folder = context.work / JOB / "tallies"
    tally = partial(
        tally_shard, inputs=inputs, out=out, folder=folder, step=context.stage
    )
    run_tasks(JOB, tasks, tally, planning_context(counts["read"], context))
    tallies = (read_table(folder / task.name) for task in tasks)
    return sum_tallies(tallies, intended)


def tally_shard(
    task: ShardTask, inputs: Inputs, out: Path, folder: Path, step: str
) -> Done:
    """Write the documents of one shard by group and reason, with examples."""
    shard = read_shard(inputs, task.name, ["id", "source", "locator", "language"])
    ids = shard.documents["id"]
    names = ["reason"]
    if "language" in column_names(out / task.name):
        names.append("language")
    inputs = {**inputs, step: out}
    annotations = read_annotations(inputs, task.name, step, names, ids)
    languages = annotations if "language" in names else shard.documents
    reasons = annotations["reason"].cast(pa.string())
    locators = shard.documents["locator"]
    examples = pc.binary_join_element_wise(hex_ids(ids), locators, " ")
    columns = {
        "source": shard.documents["source"].cast(pa.string()),
        "domain": pc.utf8_lower(pc.struct_field(pc.extract_regex(locators, SITE), 0)),
        "language": languages["language"].cast(pa.string()),
        "reason": reasons,
        "example": pc.if_else(reasons.is_valid(), examples, None),
    }
    documents = pa.table({"id": ids, **columns}).take(shard.rows).sort_by("id")
    parts = []
    for kind in COLUMNS:
        groups = (
            documents.filter(documents[kind].is_valid())
            .group_by([kind, "reason"], use_threads=False)
            .aggregate([([], "count_all"), ("example", "list")])
        )
        firsts = pc.list_slice(groups["example_list"], 0, EXAMPLES)
        tally = {
            "kind": pa.array([kind] * len(groups), pa.string()),
            "name": groups[kind],
            "reason": groups["reason"],
            "documents": groups["count_all"],
            "examples": pc.binary_join(firsts, BETWEEN),
        }
        parts.append(pa.table(tally))
    path = folder / task.name
    write_table(path, pa.concat_tables(parts))
    return Done([path])


def sum_tallies(
    tallies: Iterator[pa.Table], intended: IntendedLosses
) -> list[GroupLoss]:
    """Add the tallies of all shards, and select the groups to record."""
    rules = [(column, rule) for column in intended for rule in intended[column]]
    with closing(sqlite3.connect("")) as database:
        database.execute("CREATE TABLE intended (kind, reason)")
        database.executemany("INSERT INTO intended VALUES (?, ?)", rules)
        database.execute(
            "CREATE TABLE tallies (kind, name, reason, documents, examples)"
        )
        for tally in tallies:
            rows = zip(*(column.to_pylist() for column in tally.columns), strict=True)
            database.executemany("INSERT INTO tallies VALUES (?, ?, ?, ?, ?)", rows)
        database.execute(_SUMS)
        database.execute("CREATE INDEX by_name ON sums (kind, name)")
        losses = []
        for kind, name, read, dropped in database.execute(_LARGEST).fetchall():
            reasons = database.execute(_REASONS, (kind, name)).fetchall()
            examples = BETWEEN.join(examples for _, examples in reasons).split(BETWEEN)
            lost = [
                LostDocument(*example.split(" ", 1))
                for example in sorted(examples)[:EXAMPLES]
            ]
            losses.append(GroupLoss(kind, name, read, dropped, reasons[0][0], lost))
    return losses
