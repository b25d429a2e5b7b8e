"""Which documents are duplicates of each other: candidate pairs, and those of them that hold."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.candidates import candidate_pairs, distinct_pairs
from gristmill.dataprep.dedup_plan import Plan
from gristmill.dataprep.engine import Done, Task
from gristmill.dataprep.shingles import similarities
from gristmill.dataprep.shuffle import open_batches, read_partition, write_partitions
from gristmill.dataprep.sketches import keys_path, load_sketches
from gristmill.mixtures.dedup import Dedup

PAIRS_PER_BATCH = 10_000


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
    return Done([path], {"oversized": len(oversized), "largest": int(oversized.max(initial=0))})


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


def linked_pairs(plan: Plan) -> np.ndarray:
    """All pairs that `verify` kept: int64 of shape (n, 2)."""
    files = [plan.path("links", task.name) for task in plan.partitions()]
    return np.concatenate([pairs_array(open_batches(path).read_all()) for path in files])


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


def alike(jaccard: np.ndarray, section: Dedup) -> np.ndarray:
    """Which candidate pairs of different texts are near duplicates (bool)."""
    if section.minhash is None:
        return np.zeros(len(jaccard), bool)
    return jaccard >= section.minhash.threshold if section.minhash.verify else np.ones(len(jaccard), bool)


def pairs_table(pairs: np.ndarray) -> pa.Table:
    """Pairs (int64 of shape (n, 2)) as a table."""
    return pa.table({"left": pa.array(pairs[:, 0]), "right": pa.array(pairs[:, 1])})


def pairs_array(table: pa.Table) -> np.ndarray:
    """The inverse of `pairs_table`."""
    return np.stack([table["left"].to_numpy(), table["right"].to_numpy()], axis=1)
