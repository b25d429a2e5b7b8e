"""The stage `dedup`: of documents that are equal or nearly so, one survives; who, and why, is written down.

1. sketches: per shard, a digest and the shingles of every text, and its keys (text, MinHash bands) by partition.
2. candidates: per partition of the keys, pairs of documents with equal keys.
3. verify: per partition of the pairs, those that are equal, or alike enough.
4. Connected components, and the survivor of each, in one pass over the pairs that are left.
5. apply: per shard, the annotation table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.candidates import candidate_pairs, distinct_pairs
from gristmill.dataprep.clusters import KeepKey, choose_survivors, connect, parse_keep
from gristmill.dataprep.context import Context
from gristmill.dataprep.counts import add_counts, check_conservation, check_quarantine
from gristmill.dataprep.documents import annotate, judged_rows, kept_rows, read_documents, read_table, write_table
from gristmill.dataprep.engine import Done, Task, run_tasks
from gristmill.dataprep.keep_columns import check_columns, read_columns
from gristmill.dataprep.shingles import similarities
from gristmill.dataprep.shuffle import count_partitions, open_batches, read_partition, write_partitions
from gristmill.dataprep.sketches import (
    BYTES_PER_KEY,
    Numbering,
    keys_path,
    keys_per_document,
    load_sketches,
    number_documents,
    sketch_shard,
)
from gristmill.mixtures.manifest import Dedup

EXACT, NEAR = "exact_duplicate", "near_duplicate"
TWIN_COLUMNS = ["cluster", "survivor", "member", "jaccard", "decided_by", "survivor_value", "member_value"]
PAIRS_PER_BATCH = 10_000
LARGEST_CLUSTERS = 10


@dataclass(frozen=True)
class Plan:
    """What the tasks of the stage have in common."""

    inputs: Mapping[str, Path]
    section: Dedup
    numbering: Numbering
    num_partitions: int
    work: Path
    out: Path

    def path(self, job: str, name: str) -> Path:
        """The Arrow file that a task of a job leaves in the work folder."""
        return self.work / job / f"{name}.arrow"

    def partitions(self) -> list[Task]:
        """One task per partition."""
        return [Task(f"{number:05d}", {"partition": number}) for number in range(self.num_partitions)]


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Find clusters of duplicates among the documents kept so far, and keep one of each.

    Writes one annotation table per document shard, with `cluster` (16 bytes: the smallest id in the cluster, which
    for a document without duplicates is its own), `cluster_size`, `duplicate_of` (the survivor's id; null for
    survivors) and `jaccard` (true Jaccard similarity to the survivor; null for survivors, 1 for equal texts). And
    `clusters.parquet`, one row per duplicate: cluster, survivor, member, jaccard, and the key of `keep` that decided,
    with the values of both.

    Args:
        inputs: `ingest`, and the annotating stages that ran before.
        config: the manifest's `dedup` section (`manifest.Dedup`).

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
    oversized = [size for result in found for size in result["oversized"]]
    return {
        "counts": counts,
        **clusters,
        "candidate_pairs": sum(result["candidates"] for result in verified),
        "linked_pairs": sum(result["linked"] for result in verified),
        "oversized_buckets": {"number": len(oversized), "largest": max(oversized, default=0)},
    }


def sketch(task: Task, plan: Plan) -> Done:
    """Sketch the documents of one shard."""
    start = task.payload["start"]
    files, errors = sketch_shard(plan.inputs, task.name, start, plan.section, plan.num_partitions, plan.work)
    return Done(files, {"errors": errors})


def find_candidates(task: Task, plan: Plan) -> Done:
    """Pair up the documents that share a key of one partition; the pairs go to the partition of their first one."""
    pairs, oversized = np.empty((0, 2), np.int64), np.empty(0, np.int64)
    if plan.numbering.shards:
        files = [keys_path(plan.work, shard) for shard in plan.numbering.shards]
        keys = read_partition(files, task.payload["partition"])
        columns = [keys[name].to_numpy() for name in ("key", "document", "text")]
        pairs, oversized = candidate_pairs(*columns)
    path = plan.path("pairs", task.name)
    write_partitions(path, pairs_table(pairs), pairs[:, 0] % plan.num_partitions, plan.num_partitions)
    return Done([path], {"oversized": oversized.tolist()})


def verify(task: Task, plan: Plan) -> Done:
    """Keep the pairs of one partition whose texts are equal, or alike enough."""
    files = [plan.path("pairs", other.name) for other in plan.partitions()]
    pairs = distinct_pairs(pairs_array(read_partition(files, task.payload["partition"])))
    links = [pairs[:0]]
    for at in range(0, len(pairs), PAIRS_PER_BATCH):
        batch = pairs[at : at + PAIRS_PER_BATCH]
        equal, jaccard = compare(plan, batch[:, 0], batch[:, 1])
        links.append(batch[equal | alike(jaccard, plan.section)])
    linked = np.concatenate(links)
    path = plan.path("links", task.name)
    write_partitions(path, pairs_table(linked), np.zeros(len(linked), np.int64), 1)
    return Done([path], {"candidates": len(pairs), "linked": len(linked)})


def alike(jaccard: np.ndarray, section: Dedup) -> np.ndarray:
    """Which candidate pairs of different texts are near duplicates (bool)."""
    if section.minhash is None:
        return np.zeros(len(jaccard), bool)
    return jaccard >= section.minhash.threshold if section.minhash.verify else np.ones(len(jaccard), bool)


def compare(plan: Plan, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compare documents in pairs.

    Args:
        left, right: int64 of shape (n,), document numbers.

    Returns:
        equal: bool, whether the texts are; jaccard: float64, 1 where they are.
    """
    documents = np.unique(np.concatenate([left, right]))
    sketches = load_sketches(plan.work, plan.numbering, documents)
    left, right = np.searchsorted(documents, left), np.searchsorted(documents, right)
    equal = (sketches.digests[left] == sketches.digests[right]).all(axis=1)
    return equal, np.where(equal, 1.0, similarities(sketches.sets, left, right))


def decide(plan: Plan, keys: Sequence[KeepKey]) -> dict[str, Any]:
    """Choose the survivor of every cluster, and write down one row per document that is in one.

    Returns:
        `clusters` (how many of two documents or more) and `largest_clusters`.
    """
    links = [pairs_array(open_batches(plan.path("links", task.name)).read_all()) for task in plan.partitions()]
    documents, component = connect(np.concatenate(links))
    members = read_columns(plan.inputs, plan.work, plan.numbering, documents, keys)
    chosen = choose_survivors(members.append_column("component", pa.array(component)), keys)
    survivor = chosen["survivor"].to_numpy()
    decisions = chosen.set_column(2, "survivor", pa.array(documents[survivor]))
    decisions = decisions.append_column("document", pa.array(documents))
    decisions = decisions.append_column("member_id", members["id"])
    decisions = decisions.append_column("survivor_id", members["id"].take(pa.array(survivor)))
    write_partitions(plan.path("decisions", "all"), decisions, np.zeros(len(documents), np.int64), 1)
    survivors = decisions.filter(pa.array(documents[survivor] == documents))
    largest = survivors.sort_by([("size", "descending"), ("cluster", "ascending")]).slice(0, LARGEST_CLUSTERS)
    return {
        "clusters": len(survivors),
        "largest_clusters": [
            {"cluster": row["cluster"].hex(), "survivor": row["survivor_id"].hex(), "size": row["size"]}
            for row in largest.to_pylist()
        ],
    }


def decisions_of(plan: Plan, shard: str) -> tuple[pa.Table, np.ndarray]:
    """The decisions about a shard's documents, and their row numbers in it (int64, ascending)."""
    begin, end = plan.numbering.starts[plan.numbering.shards.index(shard) :][:2]
    decisions = open_batches(plan.path("decisions", "all")).read_all()
    documents = decisions["document"].to_numpy()
    first, last = np.searchsorted(documents, [begin, end])
    return decisions.slice(first, last - first), documents[first:last] - begin


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
    own = documents["id"].take(pa.array(judged)).combine_chunks()
    measures = {
        "cluster": overlay(own, place, decisions["cluster"]),
        "cluster_size": overlay(pa.array(np.ones(len(judged), np.int32)), place, decisions["size"]),
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


def write_clusters(plan: Plan) -> None:
    """Write `clusters.parquet`: one row per duplicate, by cluster and id."""
    parts = []
    for shard in plan.numbering.shards:
        decisions, rows = decisions_of(plan, shard)
        jaccard = read_table(plan.out / shard, ["jaccard"])["jaccard"].take(pa.array(rows))
        parts.append(decisions.append_column("jaccard", jaccard.cast(pa.float64())))
    if not parts:
        return
    twins = pa.concat_tables(parts)
    twins = twins.filter(pa.array(twins["survivor"].to_numpy() != twins["document"].to_numpy()))
    twins = twins.drop_columns(["survivor", "document", "size"])
    twins = twins.rename_columns({"survivor_id": "survivor", "member_id": "member"})
    twins = twins.select(TWIN_COLUMNS)
    write_table(plan.out / "clusters.parquet", twins.sort_by([("cluster", "ascending"), ("member", "ascending")]))


def pairs_table(pairs: np.ndarray) -> pa.Table:
    """Pairs (int64 of shape (n, 2)) as a table."""
    return pa.table({"left": pa.array(pairs[:, 0]), "right": pa.array(pairs[:, 1])})


def pairs_array(table: pa.Table) -> np.ndarray:
    """The inverse of `pairs_table`."""
    return np.stack([table["left"].to_numpy(), table["right"].to_numpy()], axis=1)
