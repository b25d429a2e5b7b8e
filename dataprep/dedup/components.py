"""Clusters of duplicates: connected components of links, without any task that holds
all links.

Jobs over partitions call functions of arrays: `forest` contracts the links of one task;
`large_star` and `small_star`, alternating, join the results of different tasks
(Kiveris, Lattanzi, Mirrokni, Rastogi, Vassilvitskii, Connected Components in MapReduce
and Beyond, SoCC 2014, section 3). Neither returns more edges than it gets, and the
final result does not depend on the partitioning of the edges.

A task holds a few copies of LINKS_PER_RUN links (some 100 bytes for each: 200 MB) and
32 bytes for each node of its partition, of which there are at most twice as many as
links; the number of partitions follows from the number of links. Even a star, a
document with all other members of its cluster as neighbours, is read in runs. Links
that fit into one partition need no rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa

from gristmill.core.stage_context import Context
from gristmill.dataprep.dedup.dedup_index import DedupPlan
from gristmill.dataprep.runners.shuffle import (
    Sending,
    Sent,
    Shuffled,
    run_stream,
)
from gristmill.dataprep.runners.tasks import (
    Done,
    PartitionTask,
    partition_tasks,
)
from gristmill.dataprep.shuffle_format import (
    count_partitions,
    group_starts,
    open_batches,
    sort_rows,
    task_file,
)
from gristmill.dataprep.text.kernels import kernel


def forest(pairs: np.ndarray) -> np.ndarray:
    """Contract a graph: int64 of shape (n, 2), rows (node, smallest reachable node),
    without the smallest nodes.

    Args:
        pairs: int64 of shape (m, 2), the edges, in any order and direction.
    """
    nodes, positions = np.unique(pairs, return_inverse=True)
    roots = _roots(positions.reshape(-1, 2), len(nodes))
    leaves = np.flatnonzero(roots != np.arange(len(nodes)))
    return np.stack([nodes[leaves], nodes[roots[leaves]]], axis=1)


def summarise(edges: np.ndarray) -> np.ndarray:
    """Summary of each node for the star steps: int64 of shape (n, 4), sorted by node.

    Columns: the node, the smallest of it and its neighbours, its largest smaller
    neighbour (or -1), and its largest neighbour.

    Args:
        edges: int64 of shape (m, 2), rows (node, neighbour).
    """
    node = edges[:, 0]
    neighbour = edges[:, 1]
    smaller = np.where(neighbour < node, neighbour, -1)
    return join_summaries(
        np.stack([node, np.minimum(node, neighbour), smaller, neighbour], axis=1)
    )


def join_summaries(rows: np.ndarray) -> np.ndarray:
    """Merge rows of `summarise` into one row per node."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    starts = group_starts(rows[:, 0])
    if not len(starts):
        return rows
    columns = [
        np.minimum.reduceat(rows[:, 1], starts),
        *np.maximum.reduceat(rows[:, 2:], starts).T,
    ]
    return np.stack([rows[starts, 0], *columns], axis=1)


def count_unsettled(nodes: np.ndarray) -> int:
    """Number of nodes that are neither the centre of a star nor a leaf of exactly one
    star.

    It is 0 if all edges form stars; the stars are then the components.

    Args:
        nodes: as from `summarise`, of all edges of these nodes.
    """
    node, smallest, largest_smaller, largest = nodes.T
    return int(
        (
            (largest_smaller >= 0) & ((smallest != largest_smaller) | (largest > node))
        ).sum()
    )


def large_star(edges: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Connect the larger neighbours of every node with the smallest of it and its
    neighbours.

    Args:
        edges: int64 of shape (m, 2), rows (node, neighbour), a run of a partition's
            edges.
        nodes: as from `summarise`, of all edges of the partition.

    Returns:
        distinct edges (larger, smaller).
    """
    edges = edges[edges[:, 1] > edges[:, 0]]
    smallest = nodes[np.searchsorted(nodes[:, 0], edges[:, 0]), 1]
    return distinct_pairs(np.stack([edges[:, 1], smallest], axis=1))


def small_star(edges: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Connect every node and its smaller neighbours with the smallest of them.

    Args:
        edges: int64 of shape (m, 2), rows (larger, smaller), a run of a partition's
            edges.
        nodes: as from `summarise`, of all edges of the partition.

    Returns:
        distinct edges (larger, smaller).
    """
    smallest = nodes[np.searchsorted(nodes[:, 0], edges[:, 0]), 1]
    pairs = np.stack([edges.T.ravel(), np.tile(smallest, 2)], axis=1)
    return distinct_pairs(pairs[pairs[:, 0] != pairs[:, 1]])


def distinct_pairs(pairs: np.ndarray) -> np.ndarray:
    """Distinct pairs (int64 of shape (n, 2)) in ascending order."""
    pairs = pairs[sort_rows(*pairs.T)]
    return pairs[group_starts(*pairs.T)]


@kernel
def _roots(pairs: np.ndarray, nodes: int) -> np.ndarray:
    """Union-find with path halving that attaches the larger root to the smaller one."""
    parent = np.arange(nodes)
    for pair in range(len(pairs)):
        first_root = _root(parent, pairs[pair, 0])
        second_root = _root(parent, pairs[pair, 1])
        parent[max(first_root, second_root)] = min(first_root, second_root)
    for node in range(nodes):
        parent[node] = parent[parent[node]]
    return parent


@kernel
def _root(parent: np.ndarray, node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


LINKS_PER_PARTITION = LINKS_PER_RUN = 2_000_000
FOREST, LABELS = "forest", "labels"
"""Names of the streams that the first and the last job send."""


def count_star_partitions(num_links: int) -> int:
    """Number of partitions for this many links; a function of the data alone."""
    return count_partitions(num_links, LINKS_PER_PARTITION, fewest=1)


def find_components(
    plan: DedupPlan, links: Sequence[str], num_partitions: int, context: Context
) -> tuple[Shuffled, int]:
    """Label every linked document with the smallest document number of its cluster.

    Args:
        links: names of the files of links.

    Returns:
        the labels by shard (see `labels_of`), and the number of labels.
    """
    tasks = partition_tasks(num_partitions)
    rounds = 0
    _, edges = run_stream(
        FOREST,
        tasks,
        partial(contract, plan=plan, links=links, num_partitions=num_partitions),
        context,
        num_partitions,
    )
    is_small = False
    while num_partitions > 1:
        name = f"{'small' if is_small else 'large'}-star-{rounds}"
        results, edges = run_stream(
            name,
            tasks,
            partial(make_stars, name=name, edges=edges, is_small=is_small),
            context,
            num_partitions,
        )
        unsettled = sum(result["unsettled"] for result in results)
        if not is_small and not unsettled:
            break
        rounds += is_small
        is_small = not is_small
    labelled, labels = run_stream(
        LABELS,
        tasks,
        partial(label, plan=plan, edges=edges),
        context,
        plan.numbering.num_new_shards,
    )
    return labels, sum(result["labels"] for result in labelled)


def contract(
    task: PartitionTask, plan: DedupPlan, links: Sequence[str], num_partitions: int
) -> Sending:
    """Contract the links of one partition's files to forests, LINKS_PER_RUN links at a
    time.

    Each edge goes to the partitions of both of its nodes. A single partition makes one
    forest.
    """
    files = [
        task_file(plan.work, "links", name)
        for name in links[task.payload["partition"] :: num_partitions]
    ]
    arrays = (pairs_array(open_batches(file).read_all()) for file in files)
    runs = (
        _in_runs(arrays) if num_partitions > 1 else [np.concatenate([_NONE, *arrays])]
    )
    yield from (
        _sent_edges(FOREST, _both_ways(forest(run)), num_partitions) for run in runs
    )
    return Done()


def make_stars(
    task: PartitionTask, name: str, edges: Shuffled, is_small: bool
) -> Sending[dict[str, int]]:
    """Run a small-star or large-star step over the nodes of one partition."""
    nodes = summarise(_NONE)
    for run in _read_runs(edges, task):
        nodes = join_summaries(np.concatenate([nodes, summarise(run)]))
    for run in _read_runs(edges, task):
        stars = (
            _both_ways(small_star(run, nodes)) if is_small else large_star(run, nodes)
        )
        yield _sent_edges(name, stars, edges.num_partitions)
    return Done([], {"unsettled": count_unsettled(nodes)})


def label(
    task: PartitionTask, plan: DedupPlan, edges: Shuffled
) -> Sending[dict[str, int]]:
    """Send (document, smallest document of its cluster) of one partition's stars to the
    shards of the documents.
    """
    number = 0
    for run in _read_runs(edges, task):
        leaves = run[run[:, 0] > run[:, 1]]
        roots = np.unique(leaves[:, 1])
        labels = np.concatenate([leaves, np.stack([roots, roots], axis=1)])
        yield Sent(LABELS, pairs_table(labels), plan.numbering.shards_of(labels[:, 0]))
        number += len(labels)
    return Done([], {"labels": number})


def labels_of(labels: Shuffled, shard: int) -> np.ndarray:
    """Labels of one shard's documents: int64 of shape (n, 2), ascending."""
    return np.unique(pairs_array(labels.read(shard)), axis=0)


def pairs_table(pairs: np.ndarray) -> pa.Table:
    """Table of pairs (int64 of shape (n, 2))."""
    return pa.table({"left": pairs[:, 0], "right": pairs[:, 1]})


def pairs_array(table: pa.Table) -> np.ndarray:
    """Array of pairs, the inverse of `pairs_table`."""
    return np.stack([table["left"].to_numpy(), table["right"].to_numpy()], axis=1)


_NONE = np.empty((0, 2), np.int64)


def _both_ways(edges: np.ndarray) -> np.ndarray:
    return np.concatenate([edges, edges[:, ::-1]])


def _sent_edges(name: str, edges: np.ndarray, num_partitions: int) -> Sent:
    """Edges for the partitions of their first nodes."""
    return Sent(name, pairs_table(edges), edges[:, 0] % num_partitions)


def _read_runs(edges: Shuffled, task: PartitionTask) -> Iterator[np.ndarray]:
    """Edges of one partition in runs of about LINKS_PER_RUN; at least one run."""
    return _in_runs(map(pairs_array, edges.pieces(task.payload["partition"])))


def _in_runs(parts: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    run = [_NONE]
    number = 0
    for part in parts:
        if number + len(part) > LINKS_PER_RUN:
            yield np.concatenate(run)
            run = [_NONE]
            number = 0
        run.append(part)
        number += len(part)
    yield np.concatenate(run)
