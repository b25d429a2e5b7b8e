"""Stage `canaries`: inserts made-up secrets into documents chosen by hash.

The first job finds the documents with the smallest hashes, the second one inserts a
line at the end of a line of each of them. So numbers of copies are exact, and nothing
depends on shards or workers.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
from typing_extensions import TypedDict

from gristmill.core.arrays import hex_ids
from gristmill.core.seeds import seeded_bytes, seeded_key
from gristmill.core.stage_context import Context
from gristmill.dataprep.cleaning.canary_texts import draw_canaries
from gristmill.dataprep.conservation import Counted, Counts, balance
from gristmill.dataprep.documents import Inputs, read_shard
from gristmill.dataprep.edits import EDITS, Edit, edits_array
from gristmill.dataprep.runners.tasks import Done, ShardTask, run_tasks, shard_tasks
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.canaries import Canaries

COPIES = "canary_copies"
"""Column with the number of documents that have this document's secret; null without
one.
"""


class TooFewDocumentsError(ValueError):
    """There are fewer documents than copies to insert."""


class Candidates(TypedDict):
    """Ids of a shard's documents with the smallest hashes, behind these hashes
    (hexadecimal).
    """

    hashes: list[str]


@dataclass(frozen=True)
class CanarySummary:
    """Summary of the insertion.

    Attributes:
        counts: documents by outcome; all are kept.
    """

    counts: Counts


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> CanarySummary:
    """Insert secrets into kept documents.

    Writes one annotation table per document shard, with `edits`, and COPIES.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `canaries` section, with its seed.

    Raises:
        TooFewDocumentsError: there are fewer documents than copies.
        ConservationError: the counts do not balance.
    """
    section = Canaries.model_validate(config)
    lines: list[tuple[str, int]] = []
    for canary in draw_canaries(section):
        lines += [(canary.line, canary.copies)] * canary.copies
    tasks = shard_tasks(inputs["ingest"])
    chosen = run_tasks(
        "choose",
        tasks,
        partial(choose, inputs=inputs, section=section, most=len(lines)),
        context,
    )
    hashes = sorted(name for result in chosen for name in result["hashes"])
    if len(hashes) < len(lines):
        raise TooFewDocumentsError(
            f"{len(lines):,} copies of secrets need as many documents, but "
            f"{len(hashes):,} are left; lower canaries.copies or canaries.secrets"
        )
    line_of = {name[-32:]: line for name, line in zip(hashes, lines, strict=False)}
    results = run_tasks(
        "insert",
        tasks,
        partial(insert, inputs=inputs, section=section, line_of=line_of, out=out),
        context,
    )
    return CanarySummary(
        balance(results, section.max_quarantined, context.stage, errors=out)
    )


def choose(
    task: ShardTask, inputs: Inputs, section: Canaries, most: int
) -> Done[Candidates]:
    """Find at most `most` documents of a shard with the smallest hashes."""
    shard = read_shard(inputs, task.name, ["id", "source"], section.sources)
    hashes = (
        seeded_bytes(section.key_seed, "canary", name, size=8).hex() + name
        for name in hex_ids(shard.judged_documents["id"]).to_pylist()
    )
    return Done([], {"hashes": heapq.nsmallest(most, hashes)})


def insert(
    task: ShardTask,
    inputs: Inputs,
    section: Canaries,
    line_of: Mapping[str, tuple[str, int]],
    out: Path,
) -> Done[Counted]:
    """Insert the lines of a shard's documents.

    Args:
        line_of: id (hexadecimal) -> line, and its number of copies.
    """
    shard = read_shard(inputs, task.name, ["id", "source", "text"], section.sources)
    documents = shard.judged_documents
    names = hex_ids(documents["id"]).to_pylist()
    edits: list[list[Edit]] = [[] for _ in names]
    copies: list[int | None] = [None] * len(names)
    for row, name in enumerate(names):
        if name not in line_of:
            continue
        line, copies[row] = line_of[name]
        text = documents["text"][row].as_py().encode()
        ends = [end.start() for end in re.finditer(rb"\n|\Z", text)]
        at = ends[seeded_key(section.key_seed, "place", name) % len(ends)]
        edits[row] = [(at, at, f"\n{line}")]
    columns = {EDITS: edits_array(edits), COPIES: pa.array(copies, pa.int64())}
    counts = shard.write(out / task.name, [None] * len(names), columns)
    return Done([out / task.name], {"counts": counts})
