"""The stage `dedup`: of documents that are equal or nearly so, one survives; who, and why, is written down.

1. sketches: per shard, a digest and the shingles of every text, and its keys (text, MinHash bands) by partition.
2. candidates: per partition of the keys, pairs of documents with equal keys.
3. verify: per partition of the pairs, those that are equal, or alike enough.
4. Connected components, and the survivor of each, in one pass over the pairs that are left.
5. apply: per shard, the annotation table.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.clusters import parse_keep
from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import add_counts, check_conservation, check_quarantine
from gristmill.dataprep.dedup_plan import Plan
from gristmill.dataprep.documents import annotate, judged_rows, kept_rows, read_documents, write_table
from gristmill.dataprep.engine import Done, Task, run_tasks
from gristmill.dataprep.keep_columns import check_columns
from gristmill.dataprep.links import compare, find_candidates, verify
from gristmill.dataprep.shuffle import count_partitions
from gristmill.dataprep.sketches import BYTES_PER_KEY, keys_per_document, number_documents, sketch_shard
from gristmill.dataprep.survivors import decide, decisions_of, write_clusters
from gristmill.mixtures.dedup import Dedup

EXACT, NEAR = "exact_duplicate", "near_duplicate"


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Find clusters of duplicates among the documents kept so far, and keep one of each.

    Writes one annotation table per document shard, with `cluster` (16 bytes: the smallest id in the cluster, which
    for a document without duplicates is its own), `cluster_size`, `duplicate_of` (the survivor's id; null for
    survivors) and `jaccard` (true Jaccard similarity to the survivor; null for survivors, 1 for equal texts). All
    four are null where a document was not judged (another source) or raised an error. And `clusters.parquet`, one
    row per duplicate: cluster, survivor, member, jaccard, and the key of `keep` that decided, with the values of both.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `dedup` section (`mixtures.dedup.Dedup`).

    Returns:
        `counts`, `clusters`, `largest_clusters`, `candidate_pairs`, `linked_pairs`, `oversized_buckets`.

    Raises:
        ValueError: a key of `keep` is malformed or names no column.
        ConservationError: the counts do not balance.
        QuarantineError: more documents than allowed raised an error.
    """
    section = Dedup.model_validate(config)
    keys = parse_keep(section.keep)
    check_columns(inputs, keys)
    numbering = number_documents(inputs["ingest"])
    num_partitions = count_partitions(int(numbering.starts[-1]) * keys_per_document(section) * BYTES_PER_KEY)
    plan = Plan(dict(inputs), section, numbering, num_partitions, context.work, out)
    shards = [
        Task(shard, {"start": int(start)}) for shard, start in zip(numbering.shards, numbering.starts, strict=False)
    ]
    sketched = run_tasks("sketch", shards, partial(sketch, plan=plan), context)
    found = run_tasks("candidates", plan.partitions(), partial(find_candidates, plan=plan), context)
    verified = run_tasks("verify", plan.partitions(), partial(verify, plan=plan), context)
    clusters = decide(plan, keys)
    applying = [Task(shard, result) for shard, result in zip(numbering.shards, sketched, strict=True)]
    counts = add_counts(result["counts"] for result in run_tasks("apply", applying, partial(apply, plan=plan), context))
    check_conservation(counts, context.stage)
    check_quarantine(counts, section.max_quarantined, context.stage)
    write_clusters(plan)
    return {
        "counts": counts,
        **clusters,
        "candidate_pairs": sum(result["candidates"] for result in verified),
        "linked_pairs": sum(result["linked"] for result in verified),
        "oversized_buckets": {
            "number": sum(result["oversized"] for result in found),
            "largest": max(result["largest"] for result in found),
        },
    }


def sketch(task: Task, plan: Plan) -> Done:
    """Sketch the documents of one shard."""
    start = task.payload["start"]
    files, errors = sketch_shard(plan.inputs, task.name, start, plan.section, plan.num_partitions, plan.work)
    return Done(files, {"errors": errors})


def apply(task: Task, plan: Plan) -> Done:
    """Write the annotations of one shard."""
    documents = read_documents(plan.inputs, task.name, ["id", "source", "text"])
    rows = kept_rows(plan.inputs, task.name)
    judged = judged_rows(documents, rows, plan.section.sources)
    errors = [task.payload["errors"].get(str(row)) for row in judged]
    decisions, members = decisions_of(plan, task.name)
    place = np.searchsorted(judged, members)
    duplicate = (decisions["survivor"].to_numpy() != decisions["document"].to_numpy()).nonzero()[0]
    duplicates = decisions.take(pa.array(duplicate))
    equal, jaccard = compare(plan, duplicates["document"].to_numpy(), duplicates["survivor"].to_numpy())
    reasons: list[str | None] = [None] * len(judged)
    for row, is_equal in zip(place[duplicate], equal, strict=True):
        reasons[row] = EXACT if is_equal else NEAR
    raised = np.array([error is not None for error in errors], bool)
    own = documents["id"].take(pa.array(judged, mask=raised)).combine_chunks()
    alone = pa.array(np.ones(len(judged), np.int32), mask=raised)
    measures = {
        "cluster": overlay(own, place, decisions["cluster"]),
        "cluster_size": overlay(alone, place, decisions["size"]),
        "duplicate_of": overlay(pa.nulls(len(judged), own.type), place[duplicate], duplicates["survivor_id"]),
        "jaccard": overlay(pa.nulls(len(judged), pa.float64()), place[duplicate], pa.chunked_array([jaccard])),
    }
    table, counts = annotate(documents, rows, judged, reasons, measures, errors)
    write_table(plan.out / task.name, table)
    return Done([plan.out / task.name], {"counts": counts})


def overlay(base: pa.Array, places: np.ndarray, values: pa.ChunkedArray) -> pa.Array:
    """The base with other values at some places."""
    take = np.arange(len(base))
    take[places] = len(base) + np.arange(len(places))
    return pa.concat_arrays([base, *values.chunks]).take(pa.array(take))
