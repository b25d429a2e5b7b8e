"""Best-fit-decreasing bin packing: items, longest first, each into the fullest bin that still has room for it.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling", section 3: as documents are never longer than a row,
the smallest remaining space that is large enough is found in a tree over the possible spaces, in O(log L) for rows of L
tokens; bins of the same space wait in a list. The bin that was filled last is taken first, so the result is determined.

A mixture packs more items than a process should hold: `deal_out` finds the same bins from how many items there are of
each length, in memory that depends on L alone, and `bin_of` says of any item where it goes.
"""

from __future__ import annotations

import numpy as np

from gristmill.dataprep.text.kernels import kernel


@kernel
def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Put items, fewer than 2**31, into as few bins as the rule finds; it takes 16 bytes for each.

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
def deal_out(items: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Where `best_fit_decreasing` puts items, of which nothing is known but how many there are of each length.

    Items of one length fill the bin with the smallest space, one after the other, until it has no room for another: it
    stays the one with the smallest space. So all of them are dealt out at once, to bins that were filled alike. Such a
    run of bins is first, number and direction: who leaves a pile of bins last lies on top of the next one. A length
    splits one run at most and begins two, so there are at most three for each length, however many items there are.

    Args:
        items: int64 of shape (capacity + 1,), how many items there are of each length; those of length 0 need no bin.
        capacity: of every bin.

    Returns:
        int64 of shape (capacity + 2,): where the dealings of each length begin among the others; int64 of shape
        (dealings, 4): rank of the first item among those of its length, its bin, the step to the next bin (1 or -1),
        and how many items each bin gets; and the number of bins.
    """
    runs = np.empty((64, 4), dtype=np.int64)  # first bin, bins, step, the run that lies under it or -1
    dealt = np.empty((64, 4), dtype=np.int64)
    begins = np.zeros(capacity + 2, dtype=np.int64)  # by falling length, turned round at the end
    top = np.full(capacity + 1, -1, dtype=np.int64)  # of each space: the run that was filled last, or -1
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    tree = np.zeros(2 * leaves, dtype=np.bool_)
    free, made, used, dealings = -1, 0, 0, 0  # runs that are of no use any more are taken again
    for length in range(capacity, 0, -1):
        begins[capacity - length] = dealings
        rank, waiting = 0, items[length]
        while waiting:
            space = smallest_space(tree, leaves, length)
            is_new = space == 0
            if is_new:
                space = capacity
            room = space // length
            # The last ones may leave room in their bin.
            moved = waiting // room if waiting >= room else 1
            each = min(room, waiting)
            if is_new:
                first, step = used, 1
                used += moved
            else:
                run = top[space]
                first, step = runs[run, 0], runs[run, 2]
                moved = min(moved, runs[run, 1])
                runs[run, 0] += step * moved
                runs[run, 1] -= moved
                if not runs[run, 1]:
                    top[space] = runs[run, 3]
                    runs[run, 3] = free
                    free = run
                    if top[space] < 0:
                        mark(tree, leaves + space, False)
            if dealings == len(dealt):
                dealt = np.concatenate((dealt, np.empty_like(dealt)))
            dealt[dealings, 0], dealt[dealings, 1], dealt[dealings, 2], dealt[dealings, 3] = rank, first, step, each
            dealings += 1
            rank += moved * each
            waiting -= moved * each
            left = space - each * length
            if left:
                if free < 0:
                    if made == len(runs):
                        runs = np.concatenate((runs, np.empty_like(runs)))
                    run = made
                    made += 1
                else:
                    run = free
                    free = runs[run, 3]
                if top[left] < 0:
                    mark(tree, leaves + left, True)
                runs[run, 0], runs[run, 1], runs[run, 2] = first + step * (moved - 1), moved, -step
                runs[run, 3] = top[left]
                top[left] = run
    begins[capacity:] = dealings
    return begins, dealt[:dealings].copy(), used


@kernel
def bin_of(begins: np.ndarray, dealt: np.ndarray, capacity: int, length: int, rank: int) -> int:
    """The bin of the item with a rank (from 0) among those of its length, as `deal_out` has dealt them."""
    low, high = begins[capacity - length], begins[capacity - length + 1]
    while high - low > 1:
        middle = (low + high) // 2
        if dealt[middle, 0] <= rank:
            low = middle
        else:
            high = middle
    return dealt[low, 1] + dealt[low, 2] * ((rank - dealt[low, 0]) // dealt[low, 3])


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
