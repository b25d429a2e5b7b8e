"""Best-fit-decreasing bin packing: items, longest first, each into the fullest bin with
enough room.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3: since no
document is longer than a row, a tree over the possible spaces finds the smallest
sufficient one in O(log L) for rows of L tokens; bins of equal space are on a stack. The
most recently filled bin is used first, so the result is deterministic.

A mixture packs more items than fit into memory: `deal_out` computes the bins from the
number of items of each length, in memory that depends on L alone, and `bin_of` looks up
the bin of an item.
"""

from __future__ import annotations

import numpy as np

from gristmill.core.arrays import offsets_of
from gristmill.dataprep.text.kernels import kernel


@kernel
def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack items, fewer than 2**31, into bins.

    Args:
        lengths: int32 of shape (n,), 1 to `capacity`; items of equal length keep their
            order.
        capacity: of every bin.

    Returns:
        the bin of each item (int32, shape (n,)), and the number of bins.
    """
    items = np.zeros(capacity + 1, np.int64)
    for length in lengths:
        items[length] += 1
    begins, dealt, used = deal_out(items, capacity)
    ranks = np.zeros(capacity + 1, np.int64)
    bins = np.empty(len(lengths), np.int32)
    for item in range(len(lengths)):
        length = lengths[item]
        bins[item] = bin_of(begins, dealt, capacity, length, ranks[length])
        ranks[length] += 1
    return bins, used


@kernel
def deal_out(items: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Compute the bins of items from the number of items of each length.

    Items of one length fill the bin with the smallest space until it has no room for
    another: it remains the bin with the smallest space. All of them are therefore dealt
    at once, to bins with equal contents. Such a run is a first bin, a number of bins
    and a direction: the bin taken last from one stack lies on top of the next. A length
    splits at most one run and begins two, so there are at most three runs per length,
    for any number of items.

    Args:
        items: int64 of shape (capacity + 1,), number of items of each length; items of
            length 0 need no bin.
        capacity: of every bin.

    Returns:
        int64 of shape (capacity + 2,): first dealing of each length, longest first;
        int64 of shape (dealings, 4): rank of the first item among those of its length,
        its bin, the step to the next bin (1 or -1), and the items per bin; and the
        number of bins.
    """
    # first bin, number of bins, step, next run on the stack or -1
    runs = np.empty((64, 4), np.int64)
    dealt = np.empty((64, 4), np.int64)
    # by falling length, turned round at the end
    begins = np.zeros(capacity + 2, np.int64)
    # for each space: the run filled last, or -1
    top = np.full(capacity + 1, -1, np.int64)
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    tree = np.zeros(2 * leaves, np.bool_)
    free, run_count, used, dealings = -1, 0, 0, 0  # released runs are reused
    for length in range(capacity, 0, -1):
        begins[capacity - length] = dealings
        rank, waiting = 0, items[length]
        while waiting:
            space = smallest_space(tree, leaves, length)
            is_new = space == 0
            if is_new:
                space = capacity
            room = space // length
            # The last items may leave room in their bin.
            bin_count = waiting // room if waiting >= room else 1
            items_per_bin = min(room, waiting)
            if is_new:
                first, step = used, 1
                used += bin_count
            else:
                run = top[space]
                first, step = runs[run, 0], runs[run, 2]
                bin_count = min(bin_count, runs[run, 1])
                runs[run, 0] += step * bin_count
                runs[run, 1] -= bin_count
                if not runs[run, 1]:
                    top[space] = runs[run, 3]
                    runs[run, 3] = free
                    free = run
                    if top[space] < 0:
                        mark(tree, leaves + space, False)
            if dealings == len(dealt):
                dealt = np.concatenate((dealt, np.empty_like(dealt)))
            dealt[dealings] = (rank, first, step, items_per_bin)
            dealings += 1
            rank += bin_count * items_per_bin
            waiting -= bin_count * items_per_bin
            remaining_space = space - items_per_bin * length
            if remaining_space:
                if free < 0:
                    if run_count == len(runs):
                        runs = np.concatenate((runs, np.empty_like(runs)))
                    run = run_count
                    run_count += 1
                else:
                    run = free
                    free = runs[run, 3]
                if top[remaining_space] < 0:
                    mark(tree, leaves + remaining_space, True)
                last = first + step * (bin_count - 1)
                runs[run] = (last, bin_count, -step, top[remaining_space])
                top[remaining_space] = run
    begins[capacity:] = dealings
    return begins, dealt[:dealings].copy(), used


@kernel
def bin_of(
    begins: np.ndarray, dealt: np.ndarray, capacity: int, length: int, rank: int
) -> int:
    """Bin of the item with a rank (from 0) among those of its length, from the dealings
    of `deal_out`.
    """
    low, high = begins[capacity - length], begins[capacity - length + 1]
    while high - low > 1:
        middle = (low + high) // 2
        if dealt[middle, 0] <= rank:
            low = middle
        else:
            high = middle
    return dealt[low, 1] + dealt[low, 2] * ((rank - dealt[low, 0]) // dealt[low, 3])


@kernel
def smallest_space(tree: np.ndarray, leaves: int, least: int) -> int:
    """Smallest space of at least `least` with a bin, or 0: node i's children are 2i and
    2i + 1.
    """
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
    """Set whether bins of a space exist; a node is set if any leaf below it is."""
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
    """Item numbers ordered by bin, stable.

    Args:
        bins: int32 of shape (n,).
        first: int64 of shape (number of bins + 1,), items in the bins before each.

    Returns:
        int32 of shape (n,).
    """
    order, free = np.empty(len(bins), np.int32), first.copy()
    for item in range(len(bins)):
        order[free[bins[item]]] = item
        free[bins[item]] += 1
    return order


def bin_begins(bins: np.ndarray, number: int) -> np.ndarray:
    """Items in the bins before each of `number` bins, and all items: int64 of shape
    (number + 1,).
    """
    return offsets_of(np.bincount(bins, minlength=number))


def best_fit_rows(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Item numbers (int32) in each bin of `best_fit_decreasing`, in item order."""
    bins, used = best_fit_decreasing(np.asarray(lengths, np.int32), capacity)
    first = bin_begins(bins, used)
    return np.split(by_bin(bins, first), first[1:-1])
