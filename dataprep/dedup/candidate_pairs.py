"""Links between duplicate documents: keys of a document's text, of its URL and of its
MinHash bands, candidate pairs from equal keys, and their verification.

Documents of equal text are linked to the document with the smallest id, which
represents the text in its bucket. A bucket of at most LARGEST_BUCKET different texts
makes all pairs. In a larger bucket (a template, a licence) every text is paired with
the first text and with the next text in the order of their digests: a linear number of
pairs that connects similar texts, but can miss two texts that are similar only to each
other. Such buckets are counted and reported.

Documents of an older corpus, which is not deduplicated again, are paired only with new
documents. They represent their texts and come first in their buckets, so that every new
text is compared with an older one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import binary_numbers
from gristmill.dataprep.dedup.components import (
    distinct_pairs,
    pairs_array,
    pairs_table,
)
from gristmill.dataprep.dedup.dedup_index import DedupPlan, spread_to_copies
from gristmill.dataprep.dedup.shingles import similarities
from gristmill.dataprep.dedup.sketches import (
    SentSketches,
    ShardSketches,
    Sketches,
    Source,
    count_shingles,
    load_columns,
    load_sketches,
    read_sketches,
)
from gristmill.dataprep.documents import ID_BYTES
from gristmill.dataprep.runners.shuffle import Sending, Sent, Shuffled
from gristmill.dataprep.runners.tasks import (
    Done,
    PartitionTask,
    ShardTask,
    run_name,
)
from gristmill.dataprep.shuffle_format import (
    PARTITION_BYTES,
    columns_of,
    group_starts,
    sort_rows,
    spread_groups,
    task_file,
    write_rows,
)
from gristmill.mixtures.steps.dedup import Dedup

BYTES_PER_KEY = 32
KEYS = "keys"
"""Name of the stream of keys that the shards send."""


def key_table(
    documents: np.ndarray, ids: pa.Array, sketches: Sketches, section: Dedup
) -> pa.Table:
    """Table with a row (key, document, text, rank) for every key that the section asks
    for.

    `text` is half of the digest that distinguishes documents of one bucket: of the text
    or, for keys of URLs, of the URL. `rank` is the leading half of the id and orders
    documents as ids do: one in 10^19 pairs of copies shares it. A text without shingles
    does not have band keys, and a document without a URL does not have a URL key.
    """
    ranks = binary_numbers(ids, ">u8")[:, 0].astype(np.uint64)
    digests = sketches.digests
    all_rows = np.arange(len(documents))
    columns = [(digests[:0, 1], all_rows[:0], digests[:0, 0])]
    if section.exact:
        columns.append((digests[:, 1], all_rows, digests[:, 0]))
    if section.url:
        rows = np.flatnonzero(sketches.urls.any(axis=1))
        columns.append((sketches.urls[rows, 1], rows, sketches.urls[rows, 0]))
    if section.minhash is not None:
        rows = np.flatnonzero(np.diff(sketches.sets.offsets))
        columns += [(keys, rows, digests[rows, 0]) for keys in sketches.bands[rows].T]
    keys, rows, texts = map(np.concatenate, zip(*columns, strict=True))
    return pa.table(
        {"key": keys, "document": documents[rows], "text": texts, "rank": ranks[rows]}
    )


PAIRS, WANTED, MATCHES = "pairs", "wanted", "matches"
"""Names of streams: pairs and requests for sketches by partition of the keys, matches
by partition of the pairs.
"""
FETCHED = "fetched"
"""Name of the stream of sketches from the shards to the partitions of the pairs."""
LARGEST_BUCKET = 64
"""Maximum number of different texts in a bucket whose pairs are all compared: 2,016
pairs.
"""


def candidate_pairs(
    keys: np.ndarray,
    documents: np.ndarray,
    texts: np.ndarray,
    ranks: np.ndarray,
    num_new: int,
) -> np.ndarray:
    """Pair documents with equal keys, except two old documents.

    The pairs depend only on keys, texts and the order of the ids.

    Args:
        keys, texts, ranks: uint64 of shape (n,): the key, a digest of the text, and the
            rank of the id.
        documents: int64 of shape (n,).
        num_new: documents from this number on are old.

    Returns:
        int64 of shape (m, 2), distinct and ascending; in a pair the new document is
        first, of two new documents the one with the smaller id.
    """
    is_new = documents < num_new
    order = sort_rows(keys, texts, is_new, ranks)
    keys, documents, texts, ranks, is_new = (
        column[order] for column in (keys, documents, texts, ranks, is_new)
    )
    representatives = group_starts(keys, texts)
    rows = np.arange(len(keys))
    copies = np.stack(
        [representatives[spread_groups(representatives, len(keys))], rows], axis=1
    )
    copies = copies[copies[:, 0] != rows]
    # Within a bucket, old texts come first; texts are then sorted by their digests.
    representatives = representatives[
        sort_rows(
            *(column[representatives] for column in (keys, is_new, texts)),
        )
    ]
    pairs = representatives[_pairs_in_buckets(keys[representatives])]
    pairs = np.concatenate([copies, pairs])
    pairs = pairs[is_new[pairs].any(axis=1)]
    new_first = np.lexsort((documents[pairs], ranks[pairs], ~is_new[pairs]), axis=1)
    return distinct_pairs(documents[np.take_along_axis(pairs, new_first, axis=1)])


def shared_keys(keys: np.ndarray) -> np.ndarray:
    """Positions of the keys that occur more than once; most do not, and are not sorted
    again.
    """
    order = np.argsort(keys)
    same = keys[order[1:]] == keys[order[:-1]]
    shared = np.zeros(len(keys), bool)
    shared[1:] |= same
    shared[:-1] |= same
    return order[shared]


def _pairs_in_buckets(keys: np.ndarray) -> np.ndarray:
    """Pairs of positions with equal keys (sorted); in a bucket of more than
    LARGEST_BUCKET positions only those of neighbours and with the first one.
    """
    starts = group_starts(keys)
    sizes = np.diff(np.append(starts, len(keys)))
    parts = [np.empty((0, 2), np.int64)]
    for size in np.unique(sizes[(sizes > 1) & (sizes <= LARGEST_BUCKET)]):
        first, second = np.triu_indices(size, 1)
        members = starts[sizes == size, None] + np.arange(size)
        parts.append(
            np.stack([members[:, first], members[:, second]], axis=-1).reshape(-1, 2)
        )
    first = starts[spread_groups(starts, len(keys))]
    rows = np.flatnonzero(np.repeat(sizes > LARGEST_BUCKET, sizes))
    rows = rows[rows != first[rows]]
    parts += [np.stack([other, rows], axis=1) for other in (first[rows], rows - 1)]
    return np.concatenate(parts)


BYTES_PER_BATCH = 64_000_000
"""Size of the sketches that are compared at a time; a document counts once for each of
its pairs.
"""
PAIRS_PER_RUN = 2_000_000
"""Pairs that a task holds at a time, 16 bytes each and some copies of them: 200 MB. All
pairs of one document stay together, even if it has more, such as the first text of a
bucket of millions.
"""
SLICES = 256
"""Number of ranges of documents whose pairs are counted before they are read."""
BYTES_PER_SKETCH = 256
"""Approximate size of a sketch without its shingles."""
NAMED = pa.schema([("id", pa.binary(ID_BYTES)), ("locator", pa.string())])
"""Columns that identify an older document."""
EXACT, URL, NEAR, CHAINED = (
    "exact_duplicate",
    "url_duplicate",
    "near_duplicate",
    "chained_duplicate",
)
"""Reasons in the order of precedence: the text of the survivor, its URL, nearly its
text, or only a chain of links through other members of the cluster (with `clusters:
connected`).
"""
REASONS = np.array([EXACT, URL, NEAR, CHAINED])
NEAR_KIND, CHAINED_KIND = 2, 3
AGAINST_REASONS = np.array([f"against_{reason}" for reason in (EXACT, URL, NEAR)])
"""Reasons of documents that are duplicates of an older one; chains do not extend to
older documents.
"""


class Comparison(NamedTuple):
    """Comparison of n pairs of documents.

    Attributes:
        kind: int64, position in REASONS.
        near: bool, near duplicates, independent of `kind`.
        jaccard: float64, of their shingles; 1 if the texts are equal, NaN if they
            differ and MinHash is off.
    """

    kind: np.ndarray
    near: np.ndarray
    jaccard: np.ndarray


def find_candidates(
    task: PartitionTask, plan: DedupPlan, keys: Shuffled
) -> Sending[dict[str, int]]:
    """Pair the documents that share a key of one partition, and send each pair to the
    partition of its first document.

    Sends one run of pairs at a time and, to the shards of the documents, the partitions
    that need their sketches.
    """
    for run in key_runs(keys, task.payload["partition"]):
        pairs = candidate_pairs(
            run["key"],
            run["document"],
            run["text"],
            run["rank"],
            plan.numbering.num_new,
        )
        partitions = pairs[:, 0] * plan.num_partitions // max(plan.numbering.num_new, 1)
        yield Sent(PAIRS, pairs_table(pairs), partitions)
        if plan.sends_sketches:
            requests = distinct_pairs(
                np.stack([pairs.ravel(), np.repeat(partitions, 2)], axis=1)
            )
            yield Sent(
                WANTED, pairs_table(requests), plan.numbering.shards_of(requests[:, 0])
            )
    return Done()


def fetch(task: ShardTask, plan: DedupPlan, wanted: Shuffled) -> Sending:
    """Send the sketches of one shard's documents to the partitions of their pairs."""
    shard = task.payload["shard"]
    rows = distinct_pairs(pairs_array(wanted.read(shard))[:, ::-1])
    partitions = rows[:, 0]
    documents = rows[:, 1]
    batch = read_sketches(plan.work, task.name)
    places = np.searchsorted(
        batch["row"].to_numpy(), documents - plan.numbering.starts[shard]
    )
    lengths = np.diff(batch["shingles"].chunk(0).offsets.to_numpy())[places]
    batch = batch.drop_columns(["row", "length"])
    for begin, end in cut_runs(BYTES_PER_SKETCH + 4 * lengths, BYTES_PER_BATCH):
        sent = batch.take(places[begin:end])
        yield Sent(
            FETCHED,
            sent.append_column("document", pa.array(documents[begin:end])),
            partitions[begin:end],
        )
    return Done()


def source_of(plan: DedupPlan, sent: Shuffled | None, partition: int) -> Source:
    """Source of a partition's sketches: the sketches sent to it, or the files of the
    shards.
    """
    if sent is None or not plan.sends_sketches:
        return ShardSketches(plan.work, plan.numbering)
    return SentSketches(sent.pieces(partition))


def key_runs(keys: Shuffled, partition: int) -> Iterator[dict[str, np.ndarray]]:
    """Keys of one partition that occur more than once, in runs that fit in memory:
    columns as from `key_table`.

    A bucket is never split: a task holds 32 bytes for each document of the largest
    bucket, and five copies of them.
    """
    parts = max(1, -(-keys.count(partition) * BYTES_PER_KEY // (2 * PARTITION_BYTES)))
    for part in range(0 if keys.is_nothing else parts):
        rows = keys.read(partition, partial(choose_keys, part=part, parts=parts))
        rows = rows.take(shared_keys(rows["key"].to_numpy()))
        starts = group_starts(rows["key"].to_numpy())
        bounds = np.append(starts, len(rows))
        sizes = np.diff(bounds)
        # the largest numbers of pairs
        small_bucket = sizes * (sizes - 1) // 2
        large_bucket = 2 * sizes + LARGEST_BUCKET * (LARGEST_BUCKET - 1) // 2
        most = np.where(sizes > LARGEST_BUCKET, large_bucket, small_bucket)
        for begin, end in cut_runs(most, PAIRS_PER_RUN):
            yield columns_of(rows.slice(bounds[begin], bounds[end] - bounds[begin]))


def choose_keys(keys: pa.Table, part: int, parts: int) -> pa.Table:
    """Keys of one part, selected by the lower half of a key."""
    if parts == 1:
        return keys
    halves = keys["key"].to_numpy() & np.uint64(0xFFFFFFFF)
    return keys.filter(halves * np.uint64(parts) >> np.uint64(32) == part)


def cut_runs(costs: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Cut n costs into runs (begin, end) of less than twice `most`; an item that costs
    more than `most` is alone.
    """
    number = (np.cumsum(costs) - 1) // most
    alone = np.flatnonzero(costs > most)
    begins = np.concatenate(
        [[0], np.flatnonzero(np.diff(number)) + 1, alone, alone + 1, [len(costs)]]
    )
    yield from pairwise(np.unique(begins).tolist())


def verify(
    task: PartitionTask,
    plan: DedupPlan,
    pairs: Shuffled,
    sketches: Shuffled | None,
) -> Sending[dict[str, int]]:
    """Keep the duplicate pairs of one partition: links within this run, and matches
    with older documents.

    Matches go to the shards of the new documents, with kind, similarity, and id and
    locator of the older document. Links are written to one file per run of pairs,
    because their number of partitions is not known yet.

    Args:
        sketches: sketches of the paired documents from `fetch`, or None.

    Returns:
        numbers of `runs` of pairs, each with a file of links, of compared pairs
        (`candidates`), of duplicate pairs (`linked`), and of matches with older
        documents (`matched`).
    """
    number = plan.numbering.num_new
    partition = task.payload["partition"]
    first_document, last_document = (
        -(-position * number // plan.num_partitions)
        for position in (partition, partition + 1)
    )
    paths: list[Path] = []
    counts = {"runs": 0, "candidates": 0, "linked": 0, "matched": 0}
    source = source_of(plan, sketches, partition)
    for run in pair_runs(
        pairs, partition, first_document, last_document, PAIRS_PER_RUN
    ):
        comparison = compare(plan.section, source, run)
        is_duplicate = comparison.kind < CHAINED_KIND
        within = run[:, 1] < number
        links = run[is_duplicate & within]
        matches = find_matches(source, run, comparison, within)
        paths.append(task_file(plan.work, "links", run_name(task, counts["runs"])))
        write_rows(paths[-1], pairs_table(links))
        yield Sent(
            MATCHES, matches, plan.numbering.shards_of(matches["left"].to_numpy())
        )
        counts["runs"] += 1
        counts["candidates"] += len(run)
        counts["linked"] += int(is_duplicate.sum())
        counts["matched"] += len(matches)
    return Done(paths, counts)


def pair_runs(
    pairs: Shuffled, partition: int, first: int, last: int, most: int
) -> Iterator[np.ndarray]:
    """Distinct pairs of one partition in ascending order, in runs of about `most`.

    Args:
        pairs: by partition, ascending in each piece.
        first, last: range of their first documents; all pairs of one first document are
            in one run.
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
            pieces = []
            for piece in pairs.pieces(partition):
                start, stop = np.searchsorted(piece["left"].to_numpy(), inside)
                pieces.append(pairs_array(piece.slice(start, stop - start)))
            yield distinct_pairs(np.concatenate(pieces))


def find_matches(
    source: Source, pairs: np.ndarray, comparison: Comparison, within: np.ndarray
) -> pa.Table:
    """Matches with older documents: the verified pairs, and near matches copied to
    documents of equal text.
    """
    is_duplicate = ~within & (comparison.kind < CHAINED_KIND)
    near = ~within & comparison.near & (comparison.kind > 0)
    copies = within & (comparison.kind == 0)
    spread, jaccard = spread_to_copies(
        pairs[near], comparison.jaccard[near], pairs[copies]
    )
    right = np.concatenate([pairs[is_duplicate, 1], spread[:, 1]])
    older, older_position = np.unique(right, return_inverse=True)
    older_columns = (
        load_columns(source, older, NAMED.names) if len(older) else NAMED.empty_table()
    )
    older_columns = older_columns.take(older_position)
    return pa.table(
        {
            "left": np.concatenate([pairs[is_duplicate, 0], spread[:, 0]]),
            "right": right,
            "id": older_columns["id"],
            "locator": older_columns["locator"],
            "kind": np.concatenate(
                [comparison.kind[is_duplicate], np.full(len(spread), NEAR_KIND)]
            ),
            "jaccard": np.concatenate([comparison.jaccard[is_duplicate], jaccard]),
        }
    )


def compare(section: Dedup, source: Source, pairs: np.ndarray) -> Comparison:
    """Compare pairs of documents (int64 of shape (n, 2)) in batches, with one batch of
    sketches in memory.
    """
    documents, positions = np.unique(pairs, return_inverse=True)
    sizes = BYTES_PER_SKETCH + 4 * count_shingles(source, documents)[
        positions.reshape(-1, 2)
    ].sum(axis=1)
    runs = [pairs[begin:end] for begin, end in cut_runs(sizes, BYTES_PER_BATCH)]
    parts = []
    for run in runs or [pairs]:
        documents = np.unique(run)
        first, second = (np.searchsorted(documents, column) for column in run.T)
        sketches = load_sketches(source, documents)
        equal = (sketches.digests[first] == sketches.digests[second]).all(axis=1)
        same_url = (sketches.urls[first] == sketches.urls[second]).all(
            axis=1
        ) & sketches.urls[first].any(axis=1)
        jaccard = np.full(len(run), np.nan)
        is_near = np.zeros(len(run), bool)
        if section.minhash is not None:
            jaccard = similarities(sketches.sets, first, second)
            # A text without shingles is never a near duplicate.
            is_near = (jaccard > 0) & (
                jaccard >= section.minhash.threshold
                if section.minhash.verify
                else (sketches.bands[first] == sketches.bands[second]).any(axis=1)
            )
        del sketches  # before the next batch is loaded
        kind = np.select(
            [equal, same_url & section.url, is_near], [0, 1, NEAR_KIND], CHAINED_KIND
        )
        parts.append(Comparison(kind, is_near, np.where(equal, 1.0, jaccard)))
    return Comparison(*map(np.concatenate, zip(*parts, strict=True)))
