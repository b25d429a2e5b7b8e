"""Connected components as stars: every document points at the smallest of its cluster.

Three functions of arrays, from which `stars.py` makes jobs over partitions: `forest` contracts what one task sees;
`large_star` and `small_star`, in turns, join what different tasks have found (Kiveris, Lattanzi, Mirrokni, Rastogi,
Vassilvitskii, Connected Components in MapReduce and Beyond, SoCC 2014, section 3). Neither makes more edges than it
gets, and what they end with does not depend on how the edges were partitioned.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.kernels import kernel


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
