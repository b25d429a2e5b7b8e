"""Stage `dedup_semantic`: keep one of several documents with the same meaning, and
record the choice and its reason.

1. embed: per shard, the vectors of its documents, and sampled vectors.
2. fit: the centroids, from the sample.
3. members: per shard, its documents to the partitions of their clusters.
4. decide: per partition, the survivors of each of its clusters.
5. apply: per shard, the annotation table and the vectors of kept documents.

A task holds a shard, the sample (two copies of 256 MB) or a cluster: two copies of 2
bytes per element of its vectors, some 500 bytes per document for the other columns, and
200 MB for the comparison. A cluster is never split: one of a million documents with 384
elements takes 2 GB. The summary has the size of the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.stage_context import Context
from gristmill.dataprep.conservation import Counted, Counts, balance
from gristmill.dataprep.dedup.clusters import (
    REASON_COLUMNS,
    KeepKey,
    best_first,
    explain_choices,
    parse_keep,
)
from gristmill.dataprep.dedup.repeats import Cluster, Clusters
from gristmill.dataprep.dedup.semantic_pairs import survivors_in_order
from gristmill.dataprep.dedup.survivors import (
    DECISIONS,
    MEMBERS,
    TWINS,
    add_clusters,
    check_columns,
    count_member_partitions,
    describe_clusters,
    prefixed,
    read_columns,
    send_decisions,
    unprefixed,
    write_duplicates,
)
from gristmill.dataprep.documents import Inputs
from gristmill.dataprep.encoders.document_scores import Reader, describe_reader
from gristmill.dataprep.runners.shuffle import (
    Sending,
    Sent,
    Shuffled,
    run_shuffle,
    run_stream,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    PartitionTask,
    ShardTask,
    Task,
    partition_tasks,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.semantic.centroids import nearest_centroids
from gristmill.dataprep.semantic.embedding_store import unpack_vectors
from gristmill.dataprep.semantic.vector_jobs import (
    SAMPLE,
    VectorPlan,
    embed,
    fit,
    make_plan,
    read_centroids,
    read_vectors,
    write_shard,
)
from gristmill.dataprep.shuffle_format import MOST_PARTITIONS
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.dedup_semantic import DedupSemantic

REASON, LINKED_BY = "semantic_duplicate", "meaning"
DECIDED = ("document", "centroid", "cluster", "size", "reason", "survivor", "cosine")
TWIN_COLUMNS = [
    "cluster",
    "survivor",
    "survivor_locator",
    "member",
    "member_locator",
    "cosine",
    "linked_by",
    "decided_by",
    "survivor_value",
    "member_value",
]


@dataclass(frozen=True)
class SemanticSummary:
    """Summary of the deduplication by meaning.

    Attributes:
        counts: documents by outcome.
        clusters: survivors that represent two documents or more.
        cluster_sizes, largest_clusters: of `clusters`.
        reader: the model, and the amount of text that it read.
    """

    counts: Counts
    clusters: int
    cluster_sizes: Mapping[str, int]
    largest_clusters: Sequence[Cluster]
    reader: Reader


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> SemanticSummary:
    """Drop documents with the same meaning as a kept one, cluster by cluster
    (`semantic_pairs.survivors_in_order`).

    Writes one annotation table per document shard, with `cluster`, `cluster_size` and
    `duplicate_of` as in `dedup`, `cosine` (with the survivor, null for survivors) and
    `centroid` (number of the k-means cluster). Also writes

    - `clusters.parquet`, one row per duplicate: TWIN_COLUMNS;
    - `centroids.npy`: float32 of shape (clusters, dim);
    - `vectors/`: per shard, `id`, `centroid` and `vector` (float16) of kept documents.

    Args:
        inputs: `ingest`, and the earlier annotating stages.
        config: the manifest's `dedup_semantic` section
            (`mixtures.steps.dedup_semantic.DedupSemantic`).

    Raises:
        ModelFolderError: the model does not exist, or a package is missing.
        ValueError: a key of `keep` is malformed or not a column.
        ConservationError, QuarantineError: see `counts`.
    """
    section = DedupSemantic.model_validate(config)
    keys = parse_keep(section.keep)
    check_columns(inputs, keys)
    plan = make_plan(inputs, section, out, context)
    shards = shard_tasks(inputs["ingest"])
    num_partitions = min(plan.clusters, MOST_PARTITIONS)
    embedded, sample = run_stream(
        "embed", shards, partial(embed, plan=plan), context, 1, SAMPLE
    )
    run_tasks(
        "fit",
        [Task("centroids")],
        partial(fit, plan=plan, sample=sample),
        context,
    )
    gather_clusters = partial(
        gather_members, plan=plan, keys=keys, num_partitions=num_partitions
    )
    _, members = run_stream(MEMBERS, shards, gather_clusters, context, num_partitions)
    num_ranges = count_member_partitions(plan.numbering.num_new)
    choose_survivors = partial(
        decide,
        plan=plan,
        keys=keys,
        threshold=section.threshold,
        members=members,
        num_ranges=num_ranges,
    )
    decided, decisions = run_shuffle(
        "decide",
        partition_tasks(num_partitions),
        choose_survivors,
        context,
        {DECISIONS: len(shards), TWINS: num_ranges},
    )
    applied = run_tasks(
        "apply",
        shards,
        partial(apply, plan=plan, decisions=decisions[DECISIONS]),
        context,
    )
    counts = balance(applied, section.max_quarantined, context.stage, errors=out)
    write_duplicates(out / "clusters.parquet", decisions[TWINS])
    clusters = add_clusters(decided)
    return SemanticSummary(
        counts,
        sum(clusters["cluster_sizes"].values()),
        clusters["cluster_sizes"],
        clusters["largest_clusters"],
        describe_reader(section.model, plan.sha256, embedded),
    )


def gather_members(
    task: ShardTask, plan: VectorPlan, keys: Sequence[KeepKey], num_partitions: int
) -> Sending:
    """Send the documents of one shard, with the columns of the keys, to the partitions
    of their clusters.
    """
    batch = read_vectors(plan, task.name)
    rows = batch["row"].to_numpy()
    key_columns = read_columns(
        plan.measured, task.name, rows, keys, batch.select(["id", "locator", "length"])
    )
    centroid = nearest_centroids(
        unpack_vectors(batch["vector"]), read_centroids(plan.out)
    )
    members = {
        **prefixed(key_columns),
        "document": plan.numbering.starts[task.payload["shard"]] + rows,
        "centroid": centroid,
        "locator": batch["locator"],
        "vector": batch["vector"],
    }
    yield Sent(MEMBERS, pa.table(members), centroid.astype(np.int64) % num_partitions)
    return Done()


def decide(
    task: PartitionTask,
    plan: VectorPlan,
    keys: Sequence[KeepKey],
    threshold: float,
    members: Shuffled,
    num_ranges: int,
) -> Sending[Clusters]:
    """Choose the survivors of every cluster of one partition, one cluster at a time."""
    parts = []
    for centroid in range(
        task.payload["partition"],
        0 if members.is_nothing else plan.clusters,
        members.num_partitions,
    ):
        cluster_members = members.read(
            task.payload["partition"], partial(of_cluster, centroid=centroid)
        )
        decisions = decide_cluster(cluster_members, keys, threshold)
        survivors = yield from send_decisions(
            decisions, plan.numbering, num_ranges, DECIDED, TWIN_COLUMNS
        )
        parts.append(describe_clusters(survivors))
    return Done([], add_clusters(parts))


def of_cluster(members: pa.Table, centroid: int) -> pa.Table:
    """Members of one k-means cluster."""
    return members.filter(pc.equal(members["centroid"], centroid))


def decide_cluster(
    members: pa.Table, keys: Sequence[KeepKey], threshold: float
) -> pa.Table:
    """Choose the survivors of one k-means cluster: a row per member with DECIDED and
    TWIN_COLUMNS.
    """
    values = unprefixed(members)
    one_component = values.append_column(
        "component", pa.array(np.zeros(len(members), np.int64))
    )
    order = best_first(one_component, keys)
    chosen, ordered_cosine = survivors_in_order(
        unpack_vectors(members["vector"].take(order)), threshold
    )
    survivor = np.empty_like(order)
    cosine = np.empty(len(order))
    survivor[order], cosine[order] = order[chosen], ordered_cosine
    component = np.unique(survivor, return_inverse=True)[1]
    choices = explain_choices(
        values.append_column("component", pa.array(component)), keys, survivor
    )
    dropped = survivor != np.arange(len(members))
    places = pa.array(survivor, mask=~dropped)
    return pa.table(
        {
            "document": members["document"],
            "centroid": members["centroid"],
            "cluster": choices["cluster"],
            "size": choices["size"],
            "reason": pc.if_else(dropped, REASON, None),
            "survivor": values["id"].take(places),
            "survivor_locator": members["locator"].take(places),
            "member": values["id"],
            "member_locator": members["locator"],
            "cosine": pa.array(cosine, mask=~dropped),
            "linked_by": pc.if_else(dropped, LINKED_BY, None),
            **{name: choices[name] for name in REASON_COLUMNS},
        }
    )


def apply(task: ShardTask, plan: VectorPlan, decisions: Shuffled) -> Done[Counted]:
    """Write the annotations of one shard, and the vectors of kept documents."""
    decided = decisions.read(task.payload["shard"]).sort_by("document")
    columns = {name: decided[name].combine_chunks() for name in decided.column_names}
    files, counts = write_shard(
        plan,
        task.name,
        read_vectors(plan, task.name),
        {
            "cluster": columns["cluster"],
            "cluster_size": columns["size"],
            "duplicate_of": columns["survivor"],
            "cosine": columns["cosine"],
            "centroid": columns["centroid"],
        },
        columns["centroid"],
        columns["reason"],
    )
    return Done(files, {"counts": counts})
