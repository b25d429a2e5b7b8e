"""Stage `dedup`: keep one of several equal or nearly equal documents, and record the
choice and its reason.

1. sketch: per shard, digests and shingles of every text, and its keys (text, URL,
   MinHash bands) by partition.
2. candidates: per partition of the keys, pairs of documents with equal keys. On a
   cluster and in a store, fetch follows: per shard, the sketches of its documents that
   are in a pair, to the partitions of the pairs.
3. verify: per partition of the pairs, the pairs that are equal or similar enough.
4. forest, stars, labels: connected components of the verified pairs.
5. members, decide: the survivors of each component.
6. apply: per shard, the annotation table and the index for later runs.

Every step is a job of tasks over files. A task holds at most a shard or a partition: of
the keys (128 MB), of the pairs with 64 MB of sketches at a time, of four million links,
or of the members of clusters. The number of partitions follows from the data alone and
does not change the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.files import as_path
from gristmill.core.stage_context import Context
from gristmill.dataprep.annotate_batches import merge_annotations
from gristmill.dataprep.conservation import Counted, Counts, add_counts, balance
from gristmill.dataprep.dedup.candidate_pairs import (
    BYTES_PER_KEY,
    FETCHED,
    KEYS,
    MATCHES,
    PAIRS,
    WANTED,
    fetch,
    find_candidates,
    key_table,
    verify,
)
from gristmill.dataprep.dedup.clusters import parse_keep
from gristmill.dataprep.dedup.components import (
    count_star_partitions,
    find_components,
)
from gristmill.dataprep.dedup.dedup_index import (
    DedupPlan,
    import_shard,
    open_index,
    write_header,
    write_index_shard,
)
from gristmill.dataprep.dedup.duplicate_kinds import sample_duplicates
from gristmill.dataprep.dedup.repeats import Cluster, DuplicateSample
from gristmill.dataprep.dedup.sketches import (
    seen_path,
    sketch_path,
    sketch_shard,
    unpack_sketches,
)
from gristmill.dataprep.dedup.survivors import (
    DECISIONS,
    MEMBERS,
    TWINS,
    add_clusters,
    check_columns,
    count_member_partitions,
    decide,
    gather_members,
    write_duplicates,
)
from gristmill.dataprep.document_numbers import number_rows
from gristmill.dataprep.documents import (
    Inputs,
    positions,
    read_shard,
    shard_names,
)
from gristmill.dataprep.runners.shuffle import (
    Sending,
    Sent,
    Shuffled,
    must_send,
    run_shuffle,
    run_stream,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    OfShard,
    ShardTask,
    Task,
    partition_tasks,
    planning_context,
    run_names,
    run_tasks,
    shard_tasks,
)
from gristmill.dataprep.shuffle_format import (
    FEWEST_PARTITIONS,
    count_partitions,
    hash_partitions,
    open_batches,
    write_rows,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.steps.dedup import Dedup

LEAST_KEY_BYTES = 1_000_000
"""Keys that are not divided further: tasks would take longer than sorting them."""


@dataclass(frozen=True)
class AgainstIndex:
    """Index that the documents were compared with.

    Attributes:
        index: its name.
        documents: number of documents in it.
    """

    index: str
    documents: int


@dataclass(frozen=True)
class DedupSummary:
    """Summary of a deduplication.

    Attributes:
        counts: documents by outcome.
        clusters: survivors that represent two documents or more.
        uncompared: kept documents of clusters too large to compare all.
        dropped_by_rule: documents that each rule of `clusters` would drop.
        cluster_sizes, largest_clusters: of `clusters`.
        duplicate_sample: duplicates by kind.
        candidate_pairs: compared pairs of documents.
        linked_pairs: pairs of duplicates.
        against: the indexes of older documents.
        index: name of the written index.
    """

    counts: Counts
    clusters: int
    uncompared: int
    dropped_by_rule: Mapping[str, int]
    cluster_sizes: Mapping[str, int]
    largest_clusters: Sequence[Cluster]
    duplicate_sample: DuplicateSample
    candidate_pairs: int
    linked_pairs: int
    against: Sequence[AgainstIndex]
    index: str | None


class SketchPayload(TypedDict):
    """Payload of a task that sketches a shard or reads the sketches of an index."""

    start: int
    """Number of the first document."""
    index_file: str | None


class Applied(Counted, total=False):
    """Result of writing a shard's annotations, and its part of the index.

    Attributes:
        indexed: documents in the index.
        ids: sum of their ids, in 32 hexadecimal digits.
    """

    indexed: int
    ids: str


def run(inputs: Inputs, config: Recipe, out: Path, context: Context) -> DedupSummary:
    """Find clusters of duplicates among the documents kept so far, and keep the
    survivors of each (`clusters.py`).

    Writes one annotation table per document shard, with `cluster` (16 bytes: the
    smallest id of the documents connected by links; a document without links has its
    own id), `cluster_size` (number of documents that its survivor represents, including
    itself), `duplicate_of` (id of the survivor or of the matching older document),
    `jaccard` (true Jaccard similarity to it; 1 for equal texts), `against_index` and
    `against_locator` (of the older document). The last four are null for survivors, and
    all are null if a document was not judged (another source) or raised an error. Also
    writes

    - `clusters.parquet`, one row per duplicate: `survivors.DUPLICATE_COLUMNS`;
    - `index/`, if the section asks for it: see `dedup_index`.

    A document that matches an older one (`against`) never survives. Only documents that
    match an older one themselves are dropped for that reason: the other members of the
    cluster have a survivor among them.

    Args:
        inputs: `ingest`, and the earlier annotating stages.
        config: the manifest's `dedup` section (`mixtures.steps.dedup.Dedup`).

    Raises:
        ValueError: a key of `keep` is malformed or not a column.
        IndexMismatchError: an index of `against` is missing or was made with other
            parameters.
        ConservationError: the counts do not balance.
        QuarantineError: more documents than allowed raised an error.
    """
    section = Dedup.model_validate(config)
    keys = parse_keep(section.keep)
    check_columns(inputs, keys)
    plan = make_plan(inputs, section, out, context)
    shards = shard_tasks(inputs["ingest"])
    partitions = plan.partitions()
    _, sketched = run_stream(
        "sketch",
        sketch_tasks(plan),
        partial(sketch, plan=plan),
        context,
        plan.num_partitions,
        KEYS,
    )
    pairs, sketches = _find_pairs(plan, sketched, context)
    verified, checked = run_stream(
        "verify",
        partitions,
        partial(verify, plan=plan, pairs=pairs, sketches=sketches),
        context,
        len(shards),
        MATCHES,
    )
    links = run_names(partitions, (result["runs"] for result in verified))
    totals = add_counts(verified)
    num_partitions = count_star_partitions(totals["linked"])
    planning = planning_context(int(plan.numbering.starts[-1]), context)
    labels, labelled = find_components(plan, links, num_partitions, planning)
    tasks = partition_tasks(count_member_partitions(labelled + totals["matched"]))
    gather_labelled = partial(
        gather_members,
        plan=plan,
        keys=keys,
        labels=labels,
        matches=checked,
        num_partitions=len(tasks),
    )
    _, members = run_stream(MEMBERS, shards, gather_labelled, planning, len(tasks))
    choose_survivors = partial(
        decide, plan=plan, keys=keys, members=members, num_ranges=len(tasks)
    )
    decided, decisions = run_shuffle(
        "decide",
        tasks,
        choose_survivors,
        planning,
        {DECISIONS: len(shards), TWINS: len(tasks)},
    )
    applied = run_tasks(
        "apply",
        shards,
        partial(apply, plan=plan, decisions=decisions[DECISIONS]),
        context,
    )
    counts = balance(applied, section.max_quarantined, context.stage, errors=out)
    uncompared = sum(result["uncompared"] for result in decided)
    if uncompared:
        context.warn(
            f"{context.stage}: {uncompared:,} documents are in clusters too large to "
            "compare each with every survivor; they are kept but for equal texts. "
            "`clusters: connected` keeps one document of each cluster; clean or filter "
            "what makes such pages alike first (largest_clusters)"
        )
    write_duplicates(out / "clusters.parquet", decisions[TWINS])
    clusters = add_clusters(decided)
    sample, largest = sample_duplicates(
        inputs,
        out / "clusters.parquet",
        clusters["largest_clusters"],
        section.meaning,
    )
    index = None
    if section.index:
        documents = sum(result["indexed"] for result in applied)
        sums = (int(result["ids"], 16) for result in applied)
        index = write_header(out, section, documents, sums)
    return DedupSummary(
        counts=counts,
        clusters=sum(clusters["cluster_sizes"].values()),
        cluster_sizes=clusters["cluster_sizes"],
        uncompared=uncompared,
        dropped_by_rule=add_counts(result["dropped_by_rule"] for result in decided),
        largest_clusters=largest,
        duplicate_sample=sample,
        candidate_pairs=totals["candidates"],
        linked_pairs=totals["linked"],
        against=[AgainstIndex(index.name, index.documents) for index in plan.indexes],
        index=index,
    )


def _find_pairs(
    plan: DedupPlan, keys: Shuffled, context: Context
) -> tuple[Shuffled, Shuffled | None]:
    """Candidate pairs, and the sketches of the pairs if sketches are sent."""
    tasks = [
        Task(shard, OfShard(shard=number))
        for number, shard in enumerate(plan.numbering.shards)
    ]
    streams = {PAIRS: plan.num_partitions, WANTED: len(tasks)}
    find = partial(find_candidates, plan=plan, keys=keys)
    _, sent = run_shuffle("candidates", plan.partitions(), find, context, streams)
    if sent[WANTED].is_nothing:
        return sent[PAIRS], None
    _, fetched = run_stream(
        "fetch",
        tasks,
        partial(fetch, plan=plan, wanted=sent[WANTED]),
        context,
        plan.num_partitions,
        FETCHED,
    )
    return sent[PAIRS], fetched


def make_plan(inputs: Inputs, section: Dedup, out: Path, context: Context) -> DedupPlan:
    """Number the documents and choose the number of partitions for their keys."""
    indexes = [open_index(location, section) for location in section.against]
    new_files = [inputs["ingest"] / shard for shard in shard_names(inputs["ingest"])]
    index_files = [
        (f"against-{place}-{path.name}", path)
        for place, index in enumerate(indexes)
        for path in index.files
    ]
    numbering = number_rows(new_files, index_files)
    keys_per_document = section.exact + section.url
    if section.minhash is not None:
        keys_per_document += section.minhash.bands
    key_bytes = int(numbering.starts[-1]) * keys_per_document * BYTES_PER_KEY
    fewest = min(FEWEST_PARTITIONS, 1 + key_bytes // LEAST_KEY_BYTES)
    num_partitions = count_partitions(key_bytes, fewest=fewest)
    merged = merge_annotations(inputs, context)
    return DedupPlan(
        merged,
        inputs,
        section,
        indexes,
        numbering,
        num_partitions,
        context.work,
        out,
        sends_sketches=must_send(context, len(numbering.shards) * num_partitions),
    )


def sketch_tasks(plan: DedupPlan) -> list[Task[SketchPayload]]:
    """Tasks for the shards of this run, followed by tasks for the files of the
    indexes.
    """
    files: list[tuple[str | None, int]] = [
        (None, task.size_bytes) for task in shard_tasks(plan.inputs["ingest"])
    ]
    for index in plan.indexes:
        files += [(str(path), path.stat().st_size) for path in index.files]
    numbers = zip(plan.numbering.shards, plan.numbering.starts.tolist(), strict=False)
    return [
        Task(shard, SketchPayload(start=start, index_file=file), size)
        for (shard, start), (file, size) in zip(numbers, files, strict=True)
    ]


def sketch(task: Task[SketchPayload], plan: DedupPlan) -> Sending:
    """Sketch the documents of one shard, or read their sketches from an index."""
    index_file = task.payload["index_file"]
    paths = [sketch_path(plan.work, task.name)]
    if index_file is None:
        batch, sizes_and_errors = sketch_shard(plan.inputs, task.name, plan.section)
        paths.append(seen_path(plan.work, task.name))
        write_rows(paths[-1], sizes_and_errors)
    else:
        batch = import_shard(as_path(index_file), plan.section)
    write_rows(paths[0], batch)
    documents = task.payload["start"] + batch["row"].to_numpy()
    keys = key_table(documents, batch["id"], unpack_sketches(batch), plan.section)
    partitions = hash_partitions(keys["key"].to_numpy(), plan.num_partitions)
    yield Sent(KEYS, keys, partitions)
    return Done(paths)


def apply(task: ShardTask, plan: DedupPlan, decisions: Shuffled) -> Done[Applied]:
    """Write the annotations of one shard, and its part of the index."""
    sources = plan.section.sources
    shard = read_shard(plan.inputs, task.name, ["id", "source"], sources)
    judged = shard.judged
    sizes_and_errors = open_batches(seen_path(plan.work, task.name)).get_batch(0)
    errors = sizes_and_errors["error"].take(judged)
    number = task.payload["shard"]
    decided = decisions.read(number).sort_by("document")
    members = decided["document"].to_numpy() - plan.numbering.starts[number]
    decided = decided.take(positions(judged, members))
    raised = errors.is_valid().to_numpy(zero_copy_only=False)
    own_ids = shard.documents["id"].take(pa.array(judged, mask=raised))
    measures = {
        "cluster": pc.coalesce(decided["cluster"], own_ids),
        "cluster_size": pc.coalesce(
            decided["size"], pa.array(np.ones(len(judged), np.int32), mask=raised)
        ),
        "duplicate_of": decided["survivor"],
        "jaccard": decided["jaccard"],
        "against_index": decided["against_index"],
        "against_locator": pc.if_else(
            decided["against_index"].is_valid(), decided["survivor_locator"], None
        ),
    }
    measures = {name: values.combine_chunks() for name, values in measures.items()}
    reasons = decided["reason"].combine_chunks()
    counts = shard.write(
        plan.out / task.name, reasons, measures, errors, sizes_and_errors["bytes"]
    )
    if not plan.section.index:
        return Done([plan.out / task.name], {"counts": counts})
    kept = judged[~raised & reasons.is_null().to_numpy(zero_copy_only=False)]
    files, ids = write_index_shard(plan.work, task.name, kept, plan.out)
    return Done(
        [plan.out / task.name, *files],
        {"counts": counts, "indexed": len(kept), "ids": f"{ids:032x}"},
    )
