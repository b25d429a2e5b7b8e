"""Clusters from links: connected components, by tasks of which none needs all links.

Three functions of arrays, from which `components.py` makes jobs over partitions: `forest` contracts what one task sees;
`large_star` and `small_star`, in turns, join what different tasks have found (Kiveris, Lattanzi, Mirrokni, Rastogi,
Vassilvitskii, Connected Components in MapReduce and Beyond, SoCC 2014, section 3). Neither makes more edges than it
gets, and what they end with does not depend on how the edges were partitioned.

A task holds the links of its partition and a few copies of them (some 100 bytes per link); the number of partitions
follows from the number of links. What cannot be cut is a star: the document with the smallest number in a cluster has
all others as neighbours in one partition, 16 bytes each. Links that fit into one partition need no rounds at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.dataprep.context import Context
from gristmill.dataprep.duplicates.dedup_index import DedupPlan
from gristmill.dataprep.jobs.engine import Done, Task, partition_tasks, run_tasks
from gristmill.dataprep.shuffle import open_batches, read_partition, task_file, write_partitions
from gristmill.dataprep.text.kernels import kernel


def forest(pairs: np.ndarray) -> np.ndarray:
    """Contract a graph: int64 of shape (n, 2), rows (node, smallest node that it can reach), without those smallest.

    Args:
        pairs: int64 of shape (m, 2), its edges, in any order and direction.
    """
    nodes, positions = np.unique(pairs, return_inverse=True)
    roots = _roots(positions.reshape(-1, 2), len(nodes))
    leaves = np.flatnonzero(roots != np.arange(len(nodes)))
    return np.stack([nodes[leaves], nodes[roots[leaves]]], axis=1)


def large_star(edges: np.ndarray) -> tuple[np.ndarray, int]:
    """Connect the larger neighbours of every node with its smallest neighbour, or with itself.

    Args:
        edges: int64 of shape (m, 2), rows (node, neighbour), with all neighbours of every node that occurs first.

    Returns:
        edges (larger, smaller), not all of them distinct; and how many nodes are neither the smallest of a star nor
        a leaf of just one: 0 where all edges are stars, which then are the components.
    """
    edges = _distinct(edges)
    starts, group = _groups(edges[:, 0])
    node, neighbour = edges[:, 0], edges[:, 1]
    smallest = np.minimum(node[starts], neighbour[starts])
    larger = neighbour > node
    num_larger = np.bincount(group[larger], minlength=len(starts))
    num_smaller = np.bincount(group[~larger], minlength=len(starts))
    unsettled = (num_smaller > 1) | ((num_smaller > 0) & (num_larger > 0))
    return np.stack([neighbour[larger], smallest[group[larger]]], axis=1), int(unsettled.sum())


def small_star(edges: np.ndarray) -> np.ndarray:
    """Connect every node and its smaller neighbours with the smallest of them.

    Args:
        edges: int64 of shape (m, 2), rows (larger, smaller), with all smaller neighbours of every node.

    Returns:
        edges (larger, smaller), not all of them distinct.
    """
    edges = _distinct(edges)
    starts, group = _groups(edges[:, 0])
    smallest = edges[starts, 1]
    own = np.stack([edges[starts, 0], smallest], axis=1)
    others = np.stack([edges[:, 1], smallest[group]], axis=1)
    return np.concatenate([own, others[others[:, 0] != others[:, 1]]])


def _distinct(edges: np.ndarray) -> np.ndarray:
    """Edges in ascending order, each once."""
    edges = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
    new = np.ones(len(edges), bool)
    new[1:] = (edges[1:] != edges[:-1]).any(axis=1)
    return edges[new]


def _groups(nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of equal numbers begin, and the run that each number is in."""
    new = np.ones(len(nodes), bool)
    new[1:] = nodes[1:] != nodes[:-1]
    return np.flatnonzero(new), np.cumsum(new) - 1


@kernel
def _roots(pairs: np.ndarray, nodes: int) -> np.ndarray:
    """Union-find that always hangs the larger root below the smaller one, with paths halved on the way."""
    parent = np.arange(nodes)
    for at in range(len(pairs)):
        left, right = _root(parent, pairs[at, 0]), _root(parent, pairs[at, 1])
        parent[max(left, right)] = min(left, right)
    for node in range(nodes):
        parent[node] = parent[parent[node]]
    return parent


@kernel
def _root(parent: np.ndarray, node: int) -> int:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


LINKS_PER_PARTITION = 4_000_000


def count_star_partitions(num_links: int) -> int:
    """How many partitions to cut so many links into; a function of the data alone."""
    return max(1, -(-num_links // LINKS_PER_PARTITION))


def find_components(plan: DedupPlan, links: Sequence[Task], num_partitions: int, context: Context) -> int:
    """Label every linked document with the smallest document number of its cluster.

    Leaves the job `labels`, readable by `labels_of`.

    Args:
        links: the tasks that left files of links.

    Returns:
        the rounds that it took.
    """
    tasks = partition_tasks(num_partitions)
    names = [task.name for task in links]
    run_tasks("forest", tasks, partial(contract, plan=plan, links=names, num_partitions=num_partitions), context)
    source, rounds = "forest", 0
    while num_partitions > 1:
        job = f"large-star-{rounds}"
        step = partial(make_large_stars, plan=plan, job=job, source=source, tasks=tasks)
        found = run_tasks(job, tasks, step, context)
        source = job
        if not sum(result["unsettled"] for result in found):
            break
        job = f"small-star-{rounds}"
        step = partial(make_small_stars, plan=plan, job=job, source=source, tasks=tasks)
        run_tasks(job, tasks, step, context)
        source, rounds = job, rounds + 1
    run_tasks("labels", tasks, partial(label, plan=plan, source=source, tasks=tasks), context)
    return rounds


def contract(task: Task, plan: DedupPlan, links: Sequence[str], num_partitions: int) -> Done:
    """Contract the links of some files to a forest; each edge goes to the partitions of both its ends."""
    own = links[task.payload["partition"] :: num_partitions]
    parts = [pairs_array(open_batches(task_file(plan.work, "links", name)).read_all()) for name in own]
    edges = forest(np.concatenate([np.empty((0, 2), np.int64), *parts]))
    return Done([_write(plan, "forest", task, _both_ways(edges), num_partitions)])


def make_large_stars(task: Task, plan: DedupPlan, job: str, source: str, tasks: Sequence[Task]) -> Done:
    """One large-star step over the nodes of one partition."""
    edges, unsettled = large_star(_read(plan, source, task, tasks))
    return Done([_write(plan, job, task, edges, len(tasks))], {"unsettled": unsettled})


def make_small_stars(task: Task, plan: DedupPlan, job: str, source: str, tasks: Sequence[Task]) -> Done:
    """One small-star step over the nodes of one partition."""
    edges = small_star(_read(plan, source, task, tasks))
    return Done([_write(plan, job, task, _both_ways(edges), len(tasks))])


def label(task: Task, plan: DedupPlan, source: str, tasks: Sequence[Task]) -> Done:
    """Write (document, smallest of its cluster) of one partition's stars to the shards of the documents."""
    edges = _read(plan, source, task, tasks)
    edges = edges[edges[:, 0] > edges[:, 1]]
    roots = np.unique(edges[:, 1])
    labels = np.concatenate([edges, np.stack([roots, roots], axis=1)])
    path = task_file(plan.work, "labels", task.name)
    write_partitions(path, pairs_table(labels), plan.numbering.shards_of(labels[:, 0]), plan.numbering.num_new_shards)
    return Done([path])


def labels_of(plan: DedupPlan, shard: int, tasks: Sequence[Task]) -> np.ndarray:
    """The labels of one shard's documents: int64 of shape (n, 2), ascending."""
    table = read_partition([task_file(plan.work, "labels", task.name) for task in tasks], shard)
    return np.unique(pairs_array(table), axis=0)


def pairs_table(pairs: np.ndarray) -> pa.Table:
    """Pairs (int64 of shape (n, 2)) as a table."""
    return pa.table({"left": pa.array(pairs[:, 0]), "right": pa.array(pairs[:, 1])})


def pairs_array(table: pa.Table) -> np.ndarray:
    """The inverse of `pairs_table`."""
    return np.stack([table["left"].to_numpy(), table["right"].to_numpy()], axis=1)


def _both_ways(edges: np.ndarray) -> np.ndarray:
    return np.concatenate([edges, edges[:, ::-1]])


def _write(plan: DedupPlan, job: str, task: Task, edges: np.ndarray, num_partitions: int) -> Path:
    path = task_file(plan.work, job, task.name)
    write_partitions(path, pairs_table(edges), edges[:, 0] % num_partitions, num_partitions)
    return path


def _read(plan: DedupPlan, source: str, task: Task, tasks: Sequence[Task]) -> np.ndarray:
    files = [task_file(plan.work, source, other.name) for other in tasks]
    return pairs_array(read_partition(files, task.payload["partition"]))
