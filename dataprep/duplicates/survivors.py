"""The survivors of every cluster: by which columns, chosen partition by partition, and written down for people.

1. members: per shard, its documents that are in a cluster or match an older one, to the partitions of the clusters.
2. decide: per partition, the survivors of each of its clusters, and how each other member is like its own.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.dataprep.documents import (
    JUDGEMENT_COLUMNS,
    ROW_GROUP_ROWS,
    annotation_stages,
    read_annotations,
    read_documents,
)
from gristmill.dataprep.duplicates.clusters import (
    DOCUMENT_COLUMNS,
    KeepKey,
    best_first,
    check_names,
    explain_choices,
    qualified,
    survivors_alike,
    survivors_of_components,
)
from gristmill.dataprep.duplicates.components import labels_of
from gristmill.dataprep.duplicates.dedup_index import MATCH_SCHEMA, DedupPlan, best_matches
from gristmill.dataprep.duplicates.links import AGAINST_REASONS, CHAINED_KIND, REASONS, compare, source_of
from gristmill.dataprep.duplicates.sketches import SKETCH_COLUMNS, Source, binary_numbers, load_columns, read_sketches
from gristmill.dataprep.files import atomic_write
from gristmill.dataprep.jobs.engine import Done, Task
from gristmill.dataprep.jobs.shuffled import Sent, Shuffled
from gristmill.dataprep.shuffle import MOST_PARTITIONS


def measured_columns(inputs: Mapping[str, Path]) -> dict[str, tuple[str, str]]:
    """What the steps before have measured, as `qualified` says it."""
    columns: dict[str, list[str]] = {}
    for step in annotation_stages(inputs):
        for path in sorted(inputs[step].glob("part-*.parquet"))[:1]:
            with path.open("rb") as stream:
                columns[step] = [name for name in pq.read_schema(stream).names if name not in JUDGEMENT_COLUMNS]
    return qualified(columns)


def check_columns(inputs: Mapping[str, Path], keys: Sequence[KeepKey]) -> None:
    """Raise ValueError where a key names no column, unless there are no documents to choose from."""
    if not any(inputs["ingest"].glob("part-*.parquet")):
        return
    check_names(keys, measured_columns(inputs))


def read_columns(
    inputs: Mapping[str, Path], shard: str, rows: np.ndarray, keys: Sequence[KeepKey], sketches: pa.Table
) -> pa.Table:
    """Read `id` and the keys' columns of some documents of a shard.

    Args:
        rows: int64, their row numbers.
        sketches: row for row, their `id`, `locator` and `length`.
    """
    wanted = list(dict.fromkeys(["id", *(key.column for key in keys)]))
    stages = measured_columns(inputs)
    columns = {}
    for name in wanted:
        if name in sketches.column_names:
            columns[name] = sketches[name]
        elif name in DOCUMENT_COLUMNS:
            columns[name] = read_documents(inputs, shard, [name])[name].take(pa.array(rows))
        else:
            step, column = stages[name]
            columns[name] = read_annotations(inputs, shard, step, [column])[column].take(pa.array(rows))
    return pa.table({name: _sortable(values) for name, values in columns.items()})


def _sortable(values: pa.ChunkedArray) -> pa.Array:
    """The values in one array, dictionaries decoded."""
    whole = values.combine_chunks()
    return whole.cast(whole.type.value_type) if pa.types.is_dictionary(whole.type) else whole


MEMBERS, DECISIONS, TWINS = "members", "decisions", "twins"
"""What shards send to the partitions of clusters; what these answer; duplicates by the range of their cluster's id."""
LARGEST_CLUSTERS = 10
RULES = ("survivors", "connected")
"""Which documents of a cluster go: see `clusters.py`."""
KEEP_PREFIX = "keep_"
LINKED_BY = np.array(["exact", "url", "minhash", "chain"])
"""How a member is like its survivor, by the positions of `links.REASONS`."""
MATCHED = "against"
"""Column of the members: 1 where a document matches an older one and cannot survive, else 0."""
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
"""Members that a task decides about, some 2 kB for each with its survivor's values and the reasons in words: 200 MB. A
cluster is never cut, so one of a million takes 2 GB."""


def count_member_partitions(num_members: int) -> int:
    """How many partitions to cut so many members of clusters into; a function of the data alone."""
    return min(max(-(-num_members // MEMBERS_PER_PARTITION), 1), MOST_PARTITIONS)


def gather_members(
    task: Task, plan: DedupPlan, keys: Sequence[KeepKey], labels: Shuffled, matches: Shuffled, num_partitions: int
) -> Generator[Sent, None, Done]:
    """Send the documents of one shard that need a decision, with what it is made by, to their clusters' partitions.

    Where sketches travel, theirs are with them.
    """
    shard = task.payload["shard"]
    labels_here, found = labels_of(labels, shard), best_matches(plan, shard, matches)
    documents = np.union1d(labels_here[:, 0], found["document"].to_numpy())
    components = documents.copy()  # a document without links within this run is a cluster of its own
    components[np.searchsorted(documents, labels_here[:, 0])] = labels_here[:, 1]
    rows = documents - plan.numbering.starts[shard]
    sketched = pa.Table.from_batches([read_sketches(plan.work, task.name)])
    names = ["id", "locator", "length", *(SKETCH_COLUMNS if plan.sends_sketches else ())]
    sketches = sketched.select([name for name in names if name in sketched.column_names]).take(
        pa.array(np.searchsorted(sketched["row"].to_numpy(), rows))
    )
    members = read_columns(plan.measured, task.name, rows, keys, sketches)
    position = np.full(len(documents), -1)
    position[np.searchsorted(documents, found["document"].to_numpy())] = np.arange(len(found))
    take = pa.array(position, mask=position < 0)
    members = pa.table(
        {
            **{f"{KEEP_PREFIX}{name}": members[name] for name in members.column_names},
            "component": components,
            "document": documents,
            "locator": sketches["locator"],
            MATCHED: (position >= 0).astype(np.int8),
            **{name: found[name].take(take) for name in MATCH_SCHEMA.names if name != "document"},
            **{name: sketches[name] for name in sketches.column_names if name in SKETCH_COLUMNS},
        }
    )
    yield Sent(MEMBERS, members, components % num_partitions)
    return Done()


def decide(
    task: Task, plan: DedupPlan, keys: Sequence[KeepKey], members: Shuffled, num_ranges: int
) -> Generator[Sent, None, Done]:
    """Choose the survivors of every cluster of one partition.

    Sends the decisions by shard, and the table of duplicates by the range of the cluster's id.

    Returns:
        `clusters` (how many survivors stand for two documents or more), `largest_clusters` of these, `uncompared`
        documents of clusters that are too large, and how many documents go by each rule (`dropped_by_rule`).
    """
    partition = task.payload["partition"]
    rows = members.read(partition, _without_sketches)
    rows = rows.take(pa.array(np.argsort(rows["document"].to_numpy())))
    decisions, survivors, counted = _decide(plan, source_of(plan, members, partition), rows, keys)
    yield Sent(DECISIONS, decisions, plan.numbering.shards_of(decisions["document"].to_numpy()))
    duplicates = decisions.filter(decisions["reason"].is_valid()).select(DUPLICATE_COLUMNS)
    yield Sent(TWINS, duplicates, ranges_of(duplicates["cluster"], num_ranges))
    own = decisions.filter(pa.array(survivors & (decisions["size"].to_numpy() > 1)))
    return Done([], {"clusters": len(own), "largest_clusters": largest_clusters(as_clusters(own)), **counted})


def _without_sketches(members: pa.Table) -> pa.Table:
    return members.select([name for name in members.column_names if name not in SKETCH_COLUMNS])


def _decide(
    plan: DedupPlan, source: Source, members: pa.Table, keys: Sequence[KeepKey]
) -> tuple[pa.Table, np.ndarray, dict[str, Any]]:
    """One row per member, which of them stand for themselves and others (bool), and what `_survivors` counts."""
    names = [name for name in members.column_names if name.startswith(KEEP_PREFIX)]
    values = members.select(names).rename_columns([name.removeprefix(KEEP_PREFIX) for name in names])
    component = np.unique(members["component"].to_numpy(), return_inverse=True)[1]
    values = values.append_column("component", pa.array(component)).append_column(MATCHED, members[MATCHED])
    matched = members[MATCHED].to_numpy() == 1
    survivor, counted = _survivors(plan, source, members, values, [KeepKey(MATCHED), *keys])
    chosen = explain_choices(values, [KeepKey(MATCHED), *keys], survivor)
    losers = np.flatnonzero((survivor != np.arange(len(members))) & ~matched)
    documents = members["document"].to_numpy()
    found = compare(plan.section, source, np.stack([documents[losers], documents[survivor[losers]]], axis=1))

    kinds = np.full(len(members), -1)
    kinds[losers] = found.kind
    kinds[matched] = members["match_kind"].filter(pa.array(matched)).to_numpy()
    reasons = np.concatenate([REASONS, AGAINST_REASONS])[kinds + matched * len(REASONS)]
    jaccard = np.full(len(members), np.nan)
    jaccard[losers] = found.jaccard
    jaccard[matched] = members["match_jaccard"].filter(pa.array(matched)).to_numpy()
    kept = kinds < 0
    places = pa.array(survivor, mask=kept)
    mask = pa.array(matched)

    def of_survivor(own: pa.ChunkedArray, older: pa.ChunkedArray) -> pa.ChunkedArray:
        return pc.if_else(mask, older, own.take(places))

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
        "decided_by": pc.if_else(mask, MATCHED, chosen["decided_by"]),
        "survivor_value": pc.if_else(mask, None, chosen["survivor_value"]),
        "member_value": pc.if_else(mask, None, chosen["member_value"]),
    }
    return pa.table(decisions), (survivor == np.arange(len(members))) & ~matched, counted


def _survivors(
    plan: DedupPlan, source: Source, members: pa.Table, values: pa.Table, keys: Sequence[KeepKey]
) -> tuple[np.ndarray, dict[str, Any]]:
    """The row of each member's survivor by the rule of the section; what matches an older document comes last.

    Returns:
        besides how many documents are `uncompared`, and how many go by each rule (`dropped_by_rule`).
    """
    by_component = survivors_of_components(values, keys)
    if not len(members):
        return by_component, {"uncompared": 0, "dropped_by_rule": dict.fromkeys(RULES, 0)}
    documents, matched = members["document"].to_numpy(), members[MATCHED].to_numpy() == 1
    digests = load_columns(source, documents, ["digest"])["digest"].combine_chunks()
    texts = digests.dictionary_encode().indices.to_numpy().astype(np.int64)
    # Nothing is a duplicate of what goes itself: what matches an older document is set apart.
    component = 2 * values["component"].to_numpy() + matched

    def are_alike(rows: np.ndarray, survivors: np.ndarray) -> np.ndarray:
        pairs = np.stack([documents[rows], documents[survivors]], axis=1)
        alike: np.ndarray = compare(plan.section, source, pairs[~matched[rows]]).kind < CHAINED_KIND
        found = np.zeros(len(rows), bool)
        found[~matched[rows]] = alike
        return found | matched[rows]

    alike, uncompared = survivors_alike(component, texts, best_first(values, keys), are_alike)
    chosen = dict(zip(RULES, (alike, by_component), strict=True))
    own = np.arange(len(members))
    dropped = {rule: int((matched | (survivor != own)).sum()) for rule, survivor in chosen.items()}
    rule = plan.section.clusters
    return chosen[rule], {"uncompared": uncompared if rule == "survivors" else 0, "dropped_by_rule": dropped}


def largest_clusters(clusters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of some clusters the largest, those of equal size by id."""
    return sorted(clusters, key=lambda cluster: (-cluster["size"], cluster["cluster"]))[:LARGEST_CLUSTERS]


def as_clusters(survivors: pa.Table) -> list[dict[str, Any]]:
    """The largest of survivors that stand for others: `cluster`, `survivor` and `size`."""
    ordered = survivors.sort_by([("size", "descending"), ("cluster", "ascending")]).slice(0, LARGEST_CLUSTERS)
    return [
        {"cluster": row["cluster"].hex(), "survivor": row["member"].hex(), "size": row["size"]}
        for row in ordered.to_pylist()
    ]


def decisions_of(plan: DedupPlan, shard: int, decisions: Shuffled) -> tuple[pa.Table, np.ndarray]:
    """The decisions about a shard's documents, and their row numbers in it (int64, ascending)."""
    found = decisions.read(shard).sort_by("document")
    return found, found["document"].to_numpy() - plan.numbering.starts[shard]


def write_duplicates(path: Path, twins: Shuffled) -> None:
    """Write `clusters.parquet`: one row per duplicate, by cluster and id; one range of ids is in memory at a time."""
    parts = _duplicates_in_order(twins)
    first = next(parts)
    with (
        atomic_write(path) as sink,
        pq.ParquetWriter(sink, first.schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        held = first
        for part in parts:
            held = pa.concat_tables([held, part])
            whole = len(held) // ROW_GROUP_ROWS * ROW_GROUP_ROWS
            _write_groups(writer, held.slice(0, whole))
            held = held.slice(whole)
        _write_groups(writer, held)


def _write_groups(writer: pq.ParquetWriter, rows: pa.Table) -> None:
    """Row groups of the same sizes and bytes however the rows arrive."""
    for begin in range(0, len(rows), ROW_GROUP_ROWS):
        writer.write_table(rows.slice(begin, ROW_GROUP_ROWS).combine_chunks())


def _duplicates_in_order(twins: Shuffled) -> Iterator[pa.Table]:
    for partition in range(twins.num_partitions):
        yield twins.read(partition).sort_by([("cluster", "ascending"), ("member", "ascending")])


def ranges_of(ids: pa.ChunkedArray, num_ranges: int) -> np.ndarray:
    """Which of equal ranges of all ids each is in: int64."""
    leading = binary_numbers(ids).view(">u4")[:, 0]
    ranges: np.ndarray = leading.astype(np.int64) * num_ranges >> 32
    return ranges
