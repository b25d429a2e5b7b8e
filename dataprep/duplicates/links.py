"""Which documents are duplicates of each other: candidate pairs from equal keys, and those of them that hold.

Documents of equal text are joined to that with the smallest id, which alone stands for the text in its bucket. A
bucket of at most LARGEST_BUCKET different texts makes all pairs. In a larger one (a template, a licence) every text is
paired with the first and with the next one in the order of their digests: linear, and enough to connect them if they
are alike; what can be missed is a pair that is alike only with each other. Such buckets are counted and reported.

Of an older corpus, which is not to be deduplicated again, documents are paired with new ones only. They stand for
their texts and come first in their buckets, so that every new text is compared with one of them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.duplicates.components import pairs_array, pairs_table
from gristmill.dataprep.duplicates.dedup_index import DedupPlan, spread_to_copies
from gristmill.dataprep.duplicates.dedup_keys import BYTES_PER_KEY
from gristmill.dataprep.duplicates.shingles import similarities
from gristmill.dataprep.duplicates.sketches import (
    SKETCH_COLUMNS,
    SentSketches,
    ShardSketches,
    Source,
    count_shingles,
    load_columns,
    load_sketches,
    read_sketches,
)
from gristmill.dataprep.jobs.engine import Done, Task, run_name
from gristmill.dataprep.jobs.shuffled import Sent, Shuffled
from gristmill.dataprep.shuffle import PARTITION_BYTES, group_starts, task_file, write_partitions
from gristmill.mixtures.steps.dedup import Dedup

PAIRS, WANTED, MATCHES = "pairs", "wanted", "matches"
"""What the partitions of the keys send, where sketches are sent after them too, and what those of the pairs send."""
FETCHED = "fetched"
"""Sketches on their way from the shards to the partitions of the pairs."""
LARGEST_BUCKET = 64
"""Different texts of a bucket of which all pairs are compared: 2,016 pairs."""


class Bucket(NamedTuple):
    """A bucket with more than LARGEST_BUCKET texts.

    Attributes:
        key: the key that its documents share.
        size: how many different texts it has.
        example: the document with the smallest id of those whose text has the smallest digest.
    """

    key: int
    size: int
    example: int


@dataclass(frozen=True)
class Candidates:
    """What the keys of one partition give.

    Attributes:
        pairs: int64 of shape (m, 2), distinct, ascending: new document first, and that with the smaller id.
        oversized: the buckets of which not all pairs are there.
    """

    pairs: np.ndarray
    oversized: list[Bucket] = field(default_factory=list)


def candidate_pairs(
    keys: np.ndarray, documents: np.ndarray, texts: np.ndarray, ranks: np.ndarray, num_new: int
) -> Candidates:
    """Pair up documents with equal keys, but for pairs of two old ones.

    Which pairs there are depends on keys, texts and the order of the ids alone.

    Args:
        keys, texts, ranks: uint64 of shape (n,): the key, what tells texts apart, and what orders documents as ids do.
        documents: int64 of shape (n,).
        num_new: documents from this number on are old.
    """
    is_new = documents < num_new
    order = np.lexsort((ranks, is_new, texts, keys))
    keys, documents, texts, ranks = keys[order], documents[order], texts[order], ranks[order]
    is_new = is_new[order]
    first = np.ones(len(keys), bool)
    first[1:] = (keys[1:] != keys[:-1]) | (texts[1:] != texts[:-1])
    standing = np.flatnonzero(first)
    copies = np.stack([standing[np.cumsum(first) - 1], np.arange(len(keys))], axis=1)[~first]
    # Within a bucket: old texts first, then in the order of their digests.
    standing = standing[np.lexsort((texts[standing], is_new[standing], keys[standing]))]
    pairs, oversized = _pairs_in_buckets(keys[standing])
    pairs = np.concatenate([copies, standing[pairs]])
    pairs = pairs[is_new[pairs].any(axis=1)]
    turned = np.lexsort((documents[pairs], ranks[pairs], ~is_new[pairs]), axis=1)
    pairs = documents[np.take_along_axis(pairs, turned, axis=1)]
    return Candidates(
        distinct_pairs(pairs),
        [Bucket(int(keys[standing[at]]), size, int(documents[standing[at]])) for at, size in oversized],
    )


def distinct_pairs(pairs: np.ndarray) -> np.ndarray:
    """Pairs (int64 of shape (n, 2)) in ascending order, each once."""
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    new = np.ones(len(pairs), bool)
    new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    return pairs[new]


def shared_keys(keys: np.ndarray) -> np.ndarray:
    """Positions of the keys that occur more than once; most do not, and need no further sorting."""
    order = np.argsort(keys)
    same = keys[order[1:]] == keys[order[:-1]]
    shared = np.zeros(len(keys), bool)
    shared[1:] |= same
    shared[:-1] |= same
    return order[shared]


def _pairs_in_buckets(keys: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Pairs of positions with equal keys (sorted); and (begin, size) of the oversized buckets."""
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.empty(0, np.int64)
    sizes = np.diff(np.append(starts, len(keys)))
    parts = [np.empty((0, 2), np.int64)]
    for size in np.unique(sizes[(sizes > 1) & (sizes <= LARGEST_BUCKET)]):
        left, right = np.triu_indices(size, 1)
        members = starts[sizes == size, None] + np.arange(size)
        parts.append(np.stack([members[:, left], members[:, right]], axis=-1).reshape(-1, 2))
    oversized = sizes > LARGEST_BUCKET
    for start, size in zip(starts[oversized], sizes[oversized]):
        members = start + np.arange(size)
        parts.append(np.stack([np.full(size - 1, members[0]), members[1:]], axis=1))
        parts.append(np.stack([members[:-1], members[1:]], axis=1))
    return np.concatenate(parts), list(zip(starts[oversized].tolist(), sizes[oversized].tolist(), strict=True))


BYTES_PER_BATCH = 64_000_000
"""Sketches that are compared at a time; a document counts once for each of its pairs."""
PAIRS_PER_RUN = 2_000_000
"""Pairs that a task holds at a time, 16 bytes each and some copies of them: 200 MB. A document that alone has more, the
first text of a bucket of millions, is held with all of them."""
SLICES = 256
"""Ranges of documents whose pairs are counted before they are read."""
BYTES_PER_SKETCH = 256
"""A sketch without its shingles, roughly."""
NAMED = pa.schema([("id", pa.binary(ID_BYTES)), ("locator", pa.string())])
"""What an older document is known by."""
LARGEST_BUCKETS = 10
EXACT, URL, NEAR, CHAINED = "exact_duplicate", "url_duplicate", "near_duplicate", "chained_duplicate"
"""Reasons, in the order in which they are looked for: the same text as the survivor, its URL, nearly its text; or
none of these, but joined to it through other members of the cluster (with `clusters: connected`)."""
REASONS = np.array([EXACT, URL, NEAR, CHAINED])
NEAR_KIND, CHAINED_KIND = 2, 3
AGAINST_REASONS = np.array([f"against_{reason}" for reason in (EXACT, URL, NEAR)])
"""The same of documents that are duplicates of an older one. Nothing is chained to those."""


class Comparison(NamedTuple):
    """How n pairs of documents are alike.

    Attributes:
        kind: int64, position in REASONS.
        near: bool, whether they are near duplicates, of whatever kind they are.
        jaccard: float64, of their shingles; 1 where the texts are equal, NaN where they differ and MinHash is off.
    """

    kind: np.ndarray
    near: np.ndarray
    jaccard: np.ndarray


def find_candidates(task: Task, plan: DedupPlan, keys: Shuffled) -> Generator[Sent, None, Done]:
    """Pair up the documents that share a key of one partition; the pairs go to partitions of their first one.

    Sends one run of pairs at a time, and to the shards of the documents which partitions want their sketches.

    Returns:
        of the buckets that are `oversized` how many, and the `largest` (size, key, example).
    """
    buckets: list[Bucket] = []
    oversized = 0
    for run in key_runs(keys, task.payload["partition"]):
        found = candidate_pairs(*run, plan.numbering.num_new)
        partitions = found.pairs[:, 0] * plan.num_partitions // max(plan.numbering.num_new, 1)
        yield Sent(PAIRS, pairs_table(found.pairs), partitions)
        if plan.sends_sketches:
            wanted = distinct_pairs(np.stack([found.pairs.ravel(), np.repeat(partitions, 2)], axis=1))
            yield Sent(WANTED, pairs_table(wanted), plan.numbering.shards_of(wanted[:, 0]))
        oversized += len(found.oversized)
        buckets = largest_buckets([*buckets, *found.oversized])
    return Done([], {"oversized": oversized, "largest": buckets})


def fetch(task: Task, plan: DedupPlan, wanted: Shuffled) -> Generator[Sent, None, Done]:
    """Send sketches of one shard's documents to the partitions of the pairs that they are in: payload `shard`."""
    shard = task.payload["shard"]
    rows = distinct_pairs(pairs_array(wanted.read(shard))[:, ::-1])
    partitions, documents = rows[:, 0], rows[:, 1]
    batch = pa.Table.from_batches([read_sketches(plan.work, task.name)])
    places = np.searchsorted(batch["row"].to_numpy(), documents - plan.numbering.starts[shard])
    own = ["id", "locator", *(name for name in SKETCH_COLUMNS if name in batch.column_names)]
    lengths = np.diff(batch["shingles"].chunk(0).offsets.to_numpy())[places]
    for begin, end in cut_runs(BYTES_PER_SKETCH + 4 * lengths, BYTES_PER_BATCH) if len(rows) else ():
        sent = batch.select(own).take(pa.array(places[begin:end]))
        yield Sent(FETCHED, sent.append_column("document", pa.array(documents[begin:end])), partitions[begin:end])
    return Done()


def source_of(plan: DedupPlan, sent: Shuffled | None, partition: int) -> Source:
    """Where a partition's task finds sketches: among what was sent to it or, without, in the files of the shards."""
    if sent is None or not plan.sends_sketches:
        return ShardSketches(plan.work, plan.numbering)
    return SentSketches(sent.pieces(partition))


def key_runs(keys: Shuffled, partition: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """The keys of one partition that occur more than once: key, document, text and rank, as many as a task can hold.

    A bucket is never cut: 32 bytes for each document of the largest, and five copies of them.
    """
    parts = max(1, -(-keys.count(partition) * BYTES_PER_KEY // (2 * PARTITION_BYTES)))
    for part in range(0 if keys.is_nothing else parts):
        rows = keys.read(partition, partial(_choose_keys, part=part, parts=parts))
        rows = rows.take(pa.array(shared_keys(rows["key"].to_numpy())))
        key, document, text, rank = (rows[name].to_numpy() for name in ("key", "document", "text", "rank"))
        starts = group_starts(key)
        ends = np.append(starts[1:], len(key))
        for begin, end in cut_runs(_most_pairs(ends - starts), PAIRS_PER_RUN):
            own = slice(starts[begin], ends[end - 1])
            yield key[own], document[own], text[own], rank[own]


def _choose_keys(keys: pa.Table, part: int, parts: int) -> pa.Table:
    """Of some keys those of one part, which the lower half of a key names."""
    if parts == 1:
        return keys
    halves = keys["key"].to_numpy() & np.uint64(0xFFFFFFFF)
    return keys.filter(pa.array(halves * np.uint64(parts) >> np.uint64(32) == part))


def _most_pairs(sizes: np.ndarray) -> np.ndarray:
    """How many pairs buckets of so many documents make at the most, whatever their texts."""
    of_few, of_many = sizes * (sizes - 1) // 2, 2 * sizes + LARGEST_BUCKET * (LARGEST_BUCKET - 1) // 2
    most: np.ndarray = np.where(sizes > LARGEST_BUCKET, of_many, of_few)
    return most


def cut_runs(costs: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Cut a row of n costs into runs (begin, end) of less than twice `most`; what costs more than that is alone."""
    number, alone = (np.cumsum(costs) - 1) // most, np.flatnonzero(costs > most)
    begins = np.concatenate([[0], np.flatnonzero(np.diff(number)) + 1, alone, alone + 1, [len(costs)]])
    yield from pairwise(np.unique(begins).tolist())


def largest_buckets(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Of some buckets the LARGEST_BUCKETS, those of equal size by key."""
    return sorted(buckets, key=lambda bucket: (-bucket.size, bucket.key))[:LARGEST_BUCKETS]


def describe_buckets(plan: DedupPlan, buckets: Iterable[Bucket]) -> list[dict[str, Any]]:
    """Some buckets: `size` (different texts), `key`, `band` and, as an example, `id` and `locator`."""
    described, source = [], ShardSketches(plan.work, plan.numbering)
    for bucket in buckets:
        example = np.array([bucket.example])
        (named,) = load_columns(source, example, ["id", "locator"]).to_pylist()
        bands = load_sketches(source, example).bands[0]
        described.append(
            {
                "size": bucket.size,
                "key": f"{bucket.key:016x}",
                "band": int(np.argmax(bands == bucket.key)),
                "id": named["id"].hex(),
                "locator": named["locator"],
            }
        )
    return described


def verify(task: Task, plan: DedupPlan, pairs: Shuffled, sketches: Shuffled | None) -> Generator[Sent, None, Done]:
    """Keep the pairs of one partition that hold: links within this run, and matches with older documents.

    Matches go to the shards of the new documents, with the kind of likeness, the similarity, and the id and locator of
    the older one. Links, of which nobody knows yet how many partitions they need, are left in a file for each run of
    pairs.

    Args:
        sketches: what was sent of those that the pairs need (`fetch`), if any was.

    Returns:
        `runs`, and how many pairs were `candidates`, are `linked`, and `matched` older documents.
    """
    number, partition = plan.numbering.num_new, task.payload["partition"]
    first, last = (-(-place * number // plan.num_partitions) for place in (partition, partition + 1))
    paths: list[Path] = []
    counts = {"runs": 0, "candidates": 0, "linked": 0, "matched": 0}
    source = source_of(plan, sketches, partition)
    for run in pair_runs(pairs, partition, first, last, PAIRS_PER_RUN):
        found = compare(plan.section, source, run)
        holds = found.kind < CHAINED_KIND
        within = run[:, 1] < number
        links = run[holds & within]
        matches = _matches(source, run, found, within)
        paths.append(task_file(plan.work, "links", run_name(task, counts["runs"])))
        write_partitions(paths[-1], pairs_table(links), links[:, 0], 1)
        yield Sent(MATCHES, matches, plan.numbering.shards_of(matches["left"].to_numpy()))
        done = {"runs": 1, "candidates": len(run), "linked": int(holds.sum()), "matched": len(matches)}
        counts = {name: counts[name] + done[name] for name in counts}
    return Done(paths, counts)


def pair_runs(pairs: Shuffled, partition: int, first: int, last: int, most: int) -> Iterator[np.ndarray]:
    """The distinct pairs of one partition in ascending order, about `most` at a time.

    Args:
        pairs: those of a partition are ascending in each piece.
        first, last: the range of their first documents; all pairs of one of these are in one run.
    """
    edges = np.unique(np.linspace(first, last, SLICES + 1).astype(np.int64))
    counts = np.zeros(len(edges) - 1, np.int64)
    for piece in pairs.pieces(partition):
        counts += np.diff(np.searchsorted(piece["left"].to_numpy(), edges))
    for begin, end in cut_runs(counts, most):
        inside = edges[begin], edges[end]
        if counts[begin:end].sum() > 2 * most and inside[1] - inside[0] > 1:
            yield from pair_runs(pairs, partition, *inside, most)
        elif counts[begin:end].any():
            yield distinct_pairs(pairs_array(pairs.read(partition, partial(_choose_pairs, inside=inside))))


def _choose_pairs(pairs: pa.Table, inside: tuple[int, int]) -> pa.Table:
    """Of ascending pairs those whose first document is inside of a range."""
    begin, end = np.searchsorted(pairs["left"].to_numpy(), inside)
    return pairs.slice(begin, end - begin)


def _matches(source: Source, pairs: np.ndarray, found: Comparison, within: np.ndarray) -> pa.Table:
    """What holds of the pairs with older documents, and what follows from it for documents of equal text."""
    holds = ~within & (found.kind < CHAINED_KIND)
    near, copies = ~within & found.near & (found.kind > 0), within & (found.kind == 0)
    spread, jaccard = spread_to_copies(pairs[near], found.jaccard[near], pairs[copies])
    right = np.concatenate([pairs[holds, 1], spread[:, 1]])
    older, place = np.unique(right, return_inverse=True)
    named = load_columns(source, older, ["id", "locator"]).take(pa.array(place)) if len(older) else NAMED.empty_table()
    return pa.table(
        {
            "left": np.concatenate([pairs[holds, 0], spread[:, 0]]),
            "right": right,
            "id": named["id"],
            "locator": named["locator"],
            "kind": np.concatenate([found.kind[holds], np.full(len(spread), NEAR_KIND)]),
            "jaccard": np.concatenate([found.jaccard[holds], jaccard]),
        }
    )


def batches(source: Source, pairs: np.ndarray) -> Iterator[np.ndarray]:
    """Cut pairs into runs whose sketches take about BYTES_PER_BATCH; a larger pair is a run of its own."""
    documents, positions = np.unique(pairs, return_inverse=True)
    sizes = BYTES_PER_SKETCH + 4 * count_shingles(source, documents)[positions.reshape(-1, 2)].sum(axis=1)
    if not len(pairs):
        yield pairs
    for begin, end in cut_runs(sizes, BYTES_PER_BATCH):
        yield pairs[begin:end]


def compare(section: Dedup, source: Source, pairs: np.ndarray) -> Comparison:
    """Compare documents in pairs (int64 of shape (n, 2)), with the sketches of some of them in memory at a time."""
    parts = [_compare(section, source, batch[:, 0], batch[:, 1]) for batch in batches(source, pairs)]
    return Comparison(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _compare(section: Dedup, source: Source, left: np.ndarray, right: np.ndarray) -> Comparison:
    documents = np.unique(np.concatenate([left, right]))
    sketches = load_sketches(source, documents)
    left, right = np.searchsorted(documents, left), np.searchsorted(documents, right)
    equal = (sketches.digests[left] == sketches.digests[right]).all(axis=1)
    same_url = (sketches.urls[left] == sketches.urls[right]).all(axis=1) & sketches.urls[left].any(axis=1)
    jaccard = np.full(len(left), np.nan)
    alike = np.zeros(len(left), bool)
    if section.minhash is not None:
        jaccard = similarities(sketches.sets, left, right)
        shares = (sketches.bands[left] == sketches.bands[right]).any(axis=1)
        alike = is_alike(jaccard, shares, section)
    kind = np.select([equal, same_url & section.url, alike], [0, 1, NEAR_KIND], CHAINED_KIND)
    return Comparison(kind, alike, np.where(equal, 1.0, jaccard))


def is_alike(jaccard: np.ndarray, shares_band: np.ndarray, section: Dedup) -> np.ndarray:
    """Which pairs of different texts are near duplicates (bool); texts without shingles are of none."""
    if section.minhash is None:
        return np.zeros(len(jaccard), bool)
    return (jaccard > 0) & (jaccard >= section.minhash.threshold if section.minhash.verify else shares_band)
