"""Exact order statistics over scores that lie in many shards, in bounded memory: where the best tenth ends.

Documents are ordered by (score, tie): the tie is a hash of the id, so that equal scores have an order that depends on
nothing but the documents. The k-th of them is found by radix selection: each pass over the shards counts the values
of the next 16 bits among the candidates that are left, and keeps the bin that holds the k-th. When few are left they
are sorted. Two passes do for almost all data; eight are the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

DIGIT_BITS = 16
DIGITS = 1 << DIGIT_BITS
WORD_DIGITS = 64 // DIGIT_BITS
FEW = 1 << 20
"""So many candidates are sorted in memory."""


@dataclass(frozen=True)
class Ranked:
    """Some documents.

    Attributes:
        groups: int64 of shape (n,), which selection each belongs to.
        keys: uint64 of shape (n,): the smaller the better, see `rank_keys`.
        ties: uint64 of shape (n,): decides between equal keys.
    """

    groups: np.ndarray
    keys: np.ndarray
    ties: np.ndarray


Read = Callable[[], Iterator[Ranked]]
"""Reads all documents, shard by shard; called once per pass."""


@dataclass(frozen=True)
class Cut:
    """The worst document that is kept: its key and its tie."""

    key: int
    tie: int

    def keeps(self, keys: np.ndarray, ties: np.ndarray) -> np.ndarray:
        """Which of n documents are at least as good: bool of shape (n,)."""
        return (keys < np.uint64(self.key)) | ((keys == np.uint64(self.key)) & (ties <= np.uint64(self.tie)))


def rank_keys(scores: np.ndarray, higher_is_better: bool) -> np.ndarray:
    """Scores (float64, not NaN) as uint64 that are the smaller the better; equal where the scores are equal."""
    bits = (scores + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    sign = np.uint64(1) << np.uint64(63)
    ascending = np.where(bits & sign, ~bits, bits | sign)
    return ~ascending if higher_is_better else ascending


def score_of_key(key: int, higher_is_better: bool) -> float:
    """The score that a key stands for."""
    ascending = ~np.uint64(key) if higher_is_better else np.uint64(key)
    sign = np.uint64(1) << np.uint64(63)
    bits = ascending & ~sign if ascending & sign else ~ascending
    return float(np.array([bits], np.uint64).view(np.float64)[0])


def number_kept(share: float, documents: int) -> int:
    """ceil(share * documents), free of what binary fractions add: a tenth of 20 is 2."""
    return math.ceil(round(share * documents, 9))


def find_cuts(read: Read, ranks: Mapping[int, int]) -> dict[int, Cut]:
    """The document of each group that has the given rank.

    Args:
        read: all documents; those of groups that are not asked for do not matter.
        ranks: group -> rank, from 1 (the best) to the number of its documents. Groups are small numbers from 0.
    """
    if not ranks:
        return {}
    size = max(ranks) + 1
    wanted = np.zeros(size, bool)
    wanted[list(ranks)] = True
    left = np.zeros(size, np.int64)
    for group, rank in ranks.items():
        left[group] = rank
    prefixes = np.zeros((size, 2), np.uint64)
    for depth in range(2 * WORD_DIGITS):
        counts = _count_digits(read, prefixes, wanted, depth)
        candidates = 0
        for group in ranks:
            ends = np.cumsum(counts[group])
            digit = int(np.searchsorted(ends, left[group]))
            left[group] -= int(ends[digit] - counts[group, digit])
            word, shift = _place(depth)
            prefixes[group, word] |= np.uint64(digit) << shift
            candidates += int(counts[group, digit])
        if candidates <= FEW:
            return _pick(read, prefixes, wanted, depth, left)
    return {group: Cut(int(prefixes[group, 0]), int(prefixes[group, 1])) for group in ranks}


def _place(depth: int) -> tuple[int, np.uint64]:
    """Which word (0: key, 1: tie) the digit at a depth is in, and by how many bits it is shifted."""
    return depth // WORD_DIGITS, np.uint64(64 - DIGIT_BITS * (depth % WORD_DIGITS + 1))


def _matches(part: Ranked, prefixes: np.ndarray, wanted: np.ndarray, depth: int) -> np.ndarray:
    """Documents of wanted groups whose first `depth` digits are their group's prefix: positions."""
    inside = np.flatnonzero(part.groups < len(wanted))
    inside = inside[wanted[part.groups[inside]]]
    for word, values in ((0, part.keys), (1, part.ties)):
        digits = min(max(depth - word * WORD_DIGITS, 0), WORD_DIGITS)
        if digits == 0:
            break
        shift = np.uint64(64 - DIGIT_BITS * digits)
        inside = inside[(values[inside] >> shift) == (prefixes[part.groups[inside], word] >> shift)]
    return inside


def _count_digits(read: Read, prefixes: np.ndarray, wanted: np.ndarray, depth: int) -> np.ndarray:
    counts = np.zeros(len(wanted) * DIGITS, np.int64)
    word, shift = _place(depth)
    for part in read():
        at = _matches(part, prefixes, wanted, depth)
        digits = ((part.ties if word else part.keys)[at] >> shift).astype(np.int64) % DIGITS
        counts += np.bincount(part.groups[at] * DIGITS + digits, minlength=len(counts))
    return counts.reshape(len(wanted), DIGITS)


def _pick(read: Read, prefixes: np.ndarray, wanted: np.ndarray, depth: int, left: np.ndarray) -> dict[int, Cut]:
    found = []
    for part in read():
        at = _matches(part, prefixes, wanted, depth + 1)
        found.append((part.groups[at], part.keys[at], part.ties[at]))
    groups, keys, ties = (np.concatenate([one[column] for one in found]) for column in range(3))
    cuts = {}
    for group in np.flatnonzero(wanted):
        own = np.flatnonzero(groups == group)
        order = own[np.lexsort((ties[own], keys[own]))]
        chosen = order[left[group] - 1]
        cuts[int(group)] = Cut(int(keys[chosen]), int(ties[chosen]))
    return cuts
