"""Best-fit-decreasing bin packing: items, longest first, each into the fullest bin that still has room for it.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3: as documents are never longer than a row,
the smallest remaining space that is large enough is found in a tree over the possible spaces, in O(log L) for rows of L
tokens; bins of the same space wait in a list. The bin that was filled last is taken first, so the result is determined.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.kernels import kernel

MOST_DOCUMENTS = 2**31 - 1
"""Items and bins are counted in 32 bits: 16 bytes of working memory for each item."""


@kernel
def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Put items into as few bins as the rule finds.

    Args:
        lengths: int32 of shape (n,), 1 to `capacity`; items of one length are taken in their order.
        capacity: of every bin.

    Returns:
        the bin of each item (int32, shape (n,)), and the number of bins.
    """
    order = longest_first(lengths, capacity)
    bins = np.empty(len(lengths), dtype=np.int32)
    below = np.empty(len(lengths), dtype=np.int32)  # of each bin: the one that waits under it, or -1
    top = np.full(capacity + 1, -1, dtype=np.int32)  # of each space: the bin that was filled last, or -1
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    tree = np.zeros(2 * leaves, dtype=np.bool_)
    used = 0
    for item in order:
        length = lengths[item]
        space = smallest_space(tree, leaves, length)
        if space:
            chosen = top[space]
            top[space] = below[chosen]
            if top[space] < 0:
                mark(tree, leaves + space, False)
        else:
            chosen, space = used, capacity
            used += 1
        bins[item] = chosen
        left = space - length
        if left:
            if top[left] < 0:
                mark(tree, leaves + left, True)
            below[chosen] = top[left]
            top[left] = chosen
    return bins, used


@kernel
def count_bins(items: np.ndarray, capacity: int) -> int:
    """How many bins `best_fit_decreasing` fills, which the lengths alone decide.

    Items of one length fill the bin with the smallest space, one after the other, until it has no room for another: it
    stays the one with the smallest space. So all of them are dealt out at once.

    Args:
        items: int64 of shape (capacity + 1,), how many items there are of each length; those of length 0 need no bin.
        capacity: of every bin.
    """
    bins = np.zeros(capacity + 1, dtype=np.int64)  # by their space
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    tree = np.zeros(2 * leaves, dtype=np.bool_)
    used = 0
    for length in range(capacity, 0, -1):
        waiting = items[length]
        while waiting:
            space = smallest_space(tree, leaves, length)
            is_new = space == 0
            if is_new:
                space = capacity
            room = space // length
            # The last ones may leave room in their bin.
            moved = waiting // room if waiting >= room else 1
            if is_new:
                used += moved
            else:
                moved = min(moved, bins[space])
                bins[space] -= moved
                if not bins[space]:
                    mark(tree, leaves + space, False)
            each = min(room, waiting)
            waiting -= moved * each
            left = space - each * length
            if left:
                if not bins[left]:
                    mark(tree, leaves + left, True)
                bins[left] += moved
    return used


@kernel
def longest_first(lengths: np.ndarray, longest: int) -> np.ndarray:
    """The numbers of items by decreasing length, equal ones in their order (int32; counting sort)."""
    begins = np.zeros(longest + 2, dtype=np.int64)
    for length in lengths:
        begins[longest - length + 1] += 1
    for step in range(1, longest + 2):
        begins[step] += begins[step - 1]
    order = np.empty(len(lengths), dtype=np.int32)
    for item in range(len(lengths)):
        step = longest - lengths[item]
        order[begins[step]] = item
        begins[step] += 1
    return order


@kernel
def smallest_space(tree: np.ndarray, leaves: int, least: int) -> int:
    """The smallest space of at least `least` that some bin has, or 0: node i's children are 2i and 2i + 1."""
    node = leaves + least
    if tree[node]:
        return least
    while node > 1 and (node % 2 or not tree[node + 1]):
        node //= 2
    if node <= 1:
        return 0
    node += 1
    while node < leaves:
        node = 2 * node if tree[2 * node] else 2 * node + 1
    return node - leaves


@kernel
def mark(tree: np.ndarray, leaf: int, present: bool) -> None:
    """Say whether bins of a space exist; a node says whether any leaf below it does."""
    node = leaf
    tree[node] = present
    while node > 1:
        node //= 2
        value = tree[2 * node] or tree[2 * node + 1]
        if tree[node] == value:
            return
        tree[node] = value


@kernel
def by_bin(bins: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The numbers of items ordered by bin, those of one bin in their order.

    Args:
        bins: int32 of shape (n,).
        first: int64 of shape (number of bins + 1,), items in the bins before each.

    Returns:
        int32 of shape (n,).
    """
    order, free = np.empty(len(bins), dtype=np.int32), first.copy()
    for item in range(len(bins)):
        order[free[bins[item]]] = item
        free[bins[item]] += 1
    return order


def best_fit_rows(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Which items lie in each bin of `best_fit_decreasing`, in their order: their numbers (int32), bin after bin."""
    bins, used = best_fit_decreasing(np.asarray(lengths, dtype=np.int32), capacity)
    first = np.concatenate([[0], np.cumsum(np.bincount(bins, minlength=used))]).astype(np.int64)
    return np.split(by_bin(bins, first), first[1:-1])
