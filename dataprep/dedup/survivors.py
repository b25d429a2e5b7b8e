"""Survivors of every cluster: the columns that decide, the choice by partition, and the
table of duplicates.

1. members: per shard, its documents that are in a cluster or match an older one, to the
   partitions of the clusters.
2. decide: per partition, the survivors of its clusters, and the comparison of every
   other member with its survivor.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from typing_extensions import TypedDict

from gristmill.core.arrays import binary_numbers
from gristmill.core.files import atomic_write
from gristmill.dataprep.conservation import add_counts
from gristmill.dataprep.dedup.candidate_pairs import (
    AGAINST_REASONS,
    CHAINED_KIND,
    REASONS,
    compare,
    source_of,
)
from gristmill.dataprep.dedup.clusters import (
    DOCUMENT_COLUMNS,
    LENGTH,
    KeepKey,
    best_first,
    check_names,
    explain_choices,
    qualified,
    survivors_alike,
    survivors_of_components,
)
from gristmill.dataprep.dedup.components import labels_of
from gristmill.dataprep.dedup.dedup_index import (
    MATCH_SCHEMA,
    DedupPlan,
    best_matches,
)
from gristmill.dataprep.dedup.repeats import Cluster, Clusters
from gristmill.dataprep.dedup.sketches import (
    SKETCH_COLUMNS,
    Source,
    load_columns,
    read_sketches,
)
from gristmill.dataprep.document_numbers import Numbering
from gristmill.dataprep.documents import (
    JUDGEMENT_COLUMNS,
    ROW_GROUP_ROWS,
    Inputs,
    annotation_stages,
    column_names,
    positions,
    read_annotations,
    read_documents,
    shard_names,
)
from gristmill.dataprep.runners.shuffle import Sending, Sent, Shuffled
from gristmill.dataprep.runners.tasks import (
    Done,
    PartitionTask,
    ShardTask,
)
from gristmill.dataprep.shuffle_format import count_partitions
from gristmill.dataprep.where_sql import StepColumns


def measured_columns(inputs: Inputs) -> StepColumns:
    """Columns of the earlier steps by name, as from `qualified`."""
    columns: dict[str, list[str]] = {}
    for step in annotation_stages(inputs):
        for shard in shard_names(inputs[step])[:1]:
            columns[step] = [
                name
                for name in column_names(inputs[step] / shard)
                if name not in JUDGEMENT_COLUMNS
            ]
    return qualified(columns)


def check_columns(inputs: Inputs, keys: Sequence[KeepKey]) -> None:
    """Raise ValueError if a key is not a column, unless there are no documents."""
    measured_keys = [
        key for key in keys if key.column not in (LENGTH, *DOCUMENT_COLUMNS)
    ]
    if measured_keys and shard_names(inputs["ingest"]):
        check_names(measured_keys, measured_columns(inputs))


def read_columns(
    inputs: Inputs,
    shard: str,
    rows: np.ndarray,
    keys: Sequence[KeepKey],
    sketches: pa.Table,
) -> pa.Table:
    """Read `id` and the keys' columns of some documents of a shard.

    Args:
        rows: int64, row numbers of the documents.
        sketches: `id`, `locator` and `length` of the same documents.
    """
    names = list(dict.fromkeys(["id", *(key.column for key in keys)]))
    columns = {}
    for name in names:
        if name in sketches.column_names:
            values = sketches[name]
        elif name in DOCUMENT_COLUMNS:
            values = read_documents(inputs, shard, [name])[name].take(rows)
        else:
            step, column = measured_columns(inputs)[name]
            table = read_annotations(inputs, shard, step, [column])
            values = table[column].take(rows)
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        columns[name] = values.combine_chunks()
    return pa.table(columns)


MEMBERS, DECISIONS, TWINS = "members", "decisions", "twins"
"""Names of streams: members from the shards, decisions back to them, and duplicates by
range of the cluster's id.
"""
LARGEST_CLUSTERS = 10
CLUSTER_SIZES = {
    "2": 2,
    "3-4": 3,
    "5-8": 5,
    "9-16": 9,
    "17-32": 17,
    "33-64": 33,
    "65-128": 65,
    "129-1,024": 129,
    "more": 1025,
}
"""Name of a group of clusters -> the least documents of one."""
RULES = ("survivors", "connected")
"""Rules for the choice of survivors: see `clusters.py`."""
KEEP_PREFIX = "keep_"
LINKED_BY = np.array(["exact", "url", "minhash", "chain"])
"""Kind of link between a member and its survivor, by the positions of
`links.REASONS`.
"""
MATCHED = "against"
"""Column of the members: 1 if a document matches an older one and cannot survive, else
0.
"""
DUPLICATE_COLUMNS = [
    "cluster",
    "survivor",
    "survivor_locator",
    "member",
    "member_locator",
    "jaccard",
    "linked_by",
    "against_index",
    "decided_by",
    "survivor_value",
    "member_value",
]


MEMBERS_PER_PARTITION = 100_000
"""Members per task, some 2 kB each with the survivor's values and the reasons as text:
200 MB. A cluster is never split: one of a million members takes 2 GB.
"""


def count_member_partitions(num_members: int) -> int:
    """Number of partitions for this many members of clusters; a function of the data
    alone.
    """
    return count_partitions(num_members, MEMBERS_PER_PARTITION, fewest=1)


class Dropped(TypedDict):
    """Documents that the rules of clusters drop or cannot compare.

    Attributes:
        uncompared: documents of clusters too large to compare all.
        dropped_by_rule: documents that each rule would drop.
    """

    uncompared: int
    dropped_by_rule: dict[str, int]


class Decided(Dropped, Clusters):
    """Result of a task that decides."""


def gather_members(
    task: ShardTask,
    plan: DedupPlan,
    keys: Sequence[KeepKey],
    labels: Shuffled,
    matches: Shuffled,
    num_partitions: int,
) -> Sending:
    """Send the cluster members of one shard, with the columns of the keys, to the
    partitions of their clusters.

    Their sketches are included if the plan sends sketches.
    """
    shard = task.payload["shard"]
    labels_here = labels_of(labels, shard)
    matches_here = best_matches(plan, shard, matches)
    documents = np.union1d(labels_here[:, 0], matches_here["document"].to_numpy())
    # a document without links within this run is its own cluster
    components = documents.copy()
    components[np.searchsorted(documents, labels_here[:, 0])] = labels_here[:, 1]
    rows = documents - plan.numbering.starts[shard]
    sketched = read_sketches(plan.work, task.name)
    names = ["id", "locator", "length"]
    if plan.sends_sketches:
        names += SKETCH_COLUMNS
    sketches = sketched.select(
        [name for name in names if name in sketched.column_names]
    ).take(np.searchsorted(sketched["row"].to_numpy(), rows))
    key_columns = read_columns(plan.measured, task.name, rows, keys, sketches)
    match_rows = positions(documents, matches_here["document"].to_numpy())
    members = {
        **prefixed(key_columns),
        "component": components,
        "document": documents,
        "locator": sketches["locator"],
        MATCHED: match_rows.is_valid().cast(pa.int8()),
    }
    for name in MATCH_SCHEMA.names[1:]:
        members[name] = matches_here[name].take(match_rows)
    for name in sketches.column_names[3:]:
        members[name] = sketches[name]
    yield Sent(MEMBERS, pa.table(members), components % num_partitions)
    return Done()


def decide(
    task: PartitionTask,
    plan: DedupPlan,
    keys: Sequence[KeepKey],
    members: Shuffled,
    num_ranges: int,
) -> Sending[Decided]:
    """Choose the survivors of every cluster of one partition.

    Sends the decisions by shard, and the table of duplicates by the range of the
    cluster's id.
    """
    partition = task.payload["partition"]
    rows = members.read(
        partition,
        lambda piece: piece.select(
            [name for name in piece.column_names if name not in SKETCH_COLUMNS]
        ),
    )
    rows = rows.take(np.argsort(rows["document"].to_numpy()))
    decisions, dropped = _decide(plan, source_of(plan, members, partition), rows, keys)
    survivors = yield from send_decisions(
        decisions,
        plan.numbering,
        num_ranges,
        decisions.column_names,
        DUPLICATE_COLUMNS,
    )
    return Done([], {**describe_clusters(survivors), **dropped})


def send_decisions(
    decisions: pa.Table,
    numbering: Numbering,
    num_ranges: int,
    decided: Sequence[str],
    recorded: Sequence[str],
) -> Generator[Sent, None, pa.Table]:
    """Send decisions about members by shard, and the table of duplicates by the range
    of the cluster's id; return the survivors that represent other members.

    Args:
        decided: columns to send to the shards.
        recorded: columns of the table of duplicates.
    """
    yield Sent(
        DECISIONS,
        decisions.select(decided),
        numbering.shards_of(decisions["document"].to_numpy()),
    )
    dropped = decisions["reason"].is_valid()
    duplicates = decisions.filter(dropped).select(recorded)
    # `num_ranges` equal ranges of all ids
    leading = binary_numbers(duplicates["cluster"]).view(">u4")[:, 0]
    yield Sent(TWINS, duplicates, leading.astype(np.int64) * num_ranges >> 32)
    return decisions.filter(pc.and_not(pc.greater(decisions["size"], 1), dropped))


def prefixed(values: pa.Table) -> dict[str, pa.ChunkedArray]:
    """Columns of the keys under their names in a table of members."""
    return {f"{KEEP_PREFIX}{name}": values[name] for name in values.column_names}


def unprefixed(members: pa.Table) -> pa.Table:
    """Columns of the keys, the inverse of `prefixed`."""
    names = [name for name in members.column_names if name.startswith(KEEP_PREFIX)]
    return members.select(names).rename_columns(
        [name.removeprefix(KEEP_PREFIX) for name in names]
    )


def _decide(
    plan: DedupPlan, source: Source, members: pa.Table, keys: Sequence[KeepKey]
) -> tuple[pa.Table, Dropped]:
    """Table with one row per member, and counts."""
    component = np.unique(members["component"].to_numpy(), return_inverse=True)[1]
    values = unprefixed(members).append_column("component", pa.array(component))
    values = values.append_column(MATCHED, members[MATCHED])
    keys = [KeepKey(MATCHED), *keys]
    survivor, dropped = _survivors(plan, source, members, values, keys)
    chosen = explain_choices(values, keys, survivor)
    matched = members[MATCHED].to_numpy() == 1
    losers = np.flatnonzero((survivor != np.arange(len(members))) & ~matched)
    documents = members["document"].to_numpy()
    comparison = compare(
        plan.section,
        source,
        np.stack([documents[losers], documents[survivor[losers]]], axis=1),
    )
    kinds = np.full(len(members), -1)
    kinds[losers] = comparison.kind
    kinds[matched] = members["match_kind"].filter(matched).to_numpy()
    reasons = np.concatenate([REASONS, AGAINST_REASONS])[kinds + matched * len(REASONS)]
    jaccard = np.full(len(members), np.nan)
    jaccard[losers] = comparison.jaccard
    jaccard[matched] = members["match_jaccard"].filter(matched).to_numpy()
    kept = kinds < 0
    survivor_rows = pa.array(survivor, mask=kept)

    def of_survivor(
        survivor_values: pa.ChunkedArray, match_values: pa.ChunkedArray
    ) -> pa.ChunkedArray:
        return pc.if_else(matched, match_values, survivor_values.take(survivor_rows))

    decisions = {
        "document": members["document"],
        "cluster": chosen["cluster"],
        "size": chosen["size"],
        "reason": pa.array(reasons, pa.string(), mask=kept),
        "survivor": of_survivor(values["id"], members["match_id"]),
        "survivor_locator": of_survivor(members["locator"], members["match_locator"]),
        "member": values["id"],
        "member_locator": members["locator"],
        "jaccard": pa.array(jaccard, mask=kept | np.isnan(jaccard)),
        "linked_by": pa.array(LINKED_BY[kinds], pa.string(), mask=kept),
        "against_index": members["match_index"],
        "decided_by": pc.if_else(matched, MATCHED, chosen["decided_by"]),
        "survivor_value": pc.if_else(matched, None, chosen["survivor_value"]),
        "member_value": pc.if_else(matched, None, chosen["member_value"]),
    }
    return pa.table(decisions), dropped


def _survivors(
    plan: DedupPlan,
    source: Source,
    members: pa.Table,
    values: pa.Table,
    keys: Sequence[KeepKey],
) -> tuple[np.ndarray, Dropped]:
    """Row of each member's survivor by the section's rule, and counts."""
    by_component = survivors_of_components(values, keys)
    if not len(members):
        return by_component, {
            "uncompared": 0,
            "dropped_by_rule": dict.fromkeys(RULES, 0),
        }
    documents = members["document"].to_numpy()
    matched = members[MATCHED].to_numpy() == 1
    digests = load_columns(source, documents, ["digest"])["digest"].combine_chunks()
    texts = digests.dictionary_encode().indices.to_numpy().astype(np.int64)
    # A dropped document cannot be a survivor, so documents that match an older one form
    # separate components.
    component = 2 * values["component"].to_numpy() + matched

    def are_alike(rows: np.ndarray, survivors: np.ndarray) -> np.ndarray:
        is_duplicate = matched[rows]
        pairs = np.stack([documents[rows], documents[survivors]], axis=1)
        kinds = compare(plan.section, source, pairs[~is_duplicate]).kind
        is_duplicate[~is_duplicate] = kinds < CHAINED_KIND
        return is_duplicate

    by_similarity, uncompared = survivors_alike(
        component, texts, best_first(values, keys), are_alike
    )
    chosen = dict(zip(RULES, (by_similarity, by_component), strict=True))
    dropped = {
        rule: int((matched | (survivor != np.arange(len(members)))).sum())
        for rule, survivor in chosen.items()
    }
    rule = plan.section.clusters
    return chosen[rule], {
        "uncompared": uncompared if rule == "survivors" else 0,
        "dropped_by_rule": dropped,
    }


def describe_clusters(survivors: pa.Table) -> Clusters:
    """Describe the clusters of some survivors."""
    sizes = np.histogram(survivors["size"], [*CLUSTER_SIZES.values(), np.inf])[0]
    order = [("size", "descending"), ("cluster", "ascending")]
    largest = survivors.sort_by(order).slice(0, LARGEST_CLUSTERS)
    return Clusters(
        cluster_sizes=dict(zip(CLUSTER_SIZES, sizes.tolist(), strict=True)),
        largest_clusters=[
            Cluster(
                cluster=row["cluster"].hex(),
                survivor=row["member"].hex(),
                locator=row["member_locator"],
                size=row["size"],
            )
            for row in largest.to_pylist()
        ],
    )


def add_clusters(parts: Sequence[Clusters]) -> Clusters:
    """Add the clusters of several parts; the largest are sorted by size and id."""
    largest = [cluster for part in parts for cluster in part["largest_clusters"]]
    largest.sort(key=lambda cluster: (-cluster["size"], cluster["cluster"]))
    return Clusters(
        cluster_sizes=add_counts(part["cluster_sizes"] for part in parts),
        largest_clusters=largest[:LARGEST_CLUSTERS],
    )


def write_duplicates(path: Path, twins: Shuffled) -> None:
    """Write `clusters.parquet`: one row per duplicate, sorted by cluster and id, with
    one range of ids in memory.
    """
    order = [("cluster", "ascending"), ("member", "ascending")]
    buffered = twins.read(0).sort_by(order)
    with (
        atomic_write(path) as sink,
        pq.ParquetWriter(
            sink, buffered.schema, compression="zstd", write_page_checksum=True
        ) as writer,
    ):
        for partition in range(twins.num_partitions):
            if partition:
                rows = twins.read(partition).sort_by(order)
                buffered = pa.concat_tables([buffered, rows])
            is_last = partition == twins.num_partitions - 1
            # Row groups have a fixed size, so that the bytes do not depend on the ranges.
            while len(buffered) >= ROW_GROUP_ROWS or (is_last and len(buffered)):
                writer.write_table(buffered.slice(0, ROW_GROUP_ROWS).combine_chunks())
                buffered = buffered.slice(ROW_GROUP_ROWS)
