"""Keeping the best share of all documents, or of each source's, by one score: exactly, in bounded memory.

Documents are ordered by (score, tie): the tie is a hash of the id, so that equal scores have an order that depends on
nothing but the documents. The k-th of them is found by radix selection: each pass over the shards counts the values
of the next 16 bits among the candidates that are left, and keeps the bin that holds the k-th. When few are left they
are sorted. Two passes do for almost all data; eight are the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


ALL = "all"
"""The group of documents that are ranked together, whatever their source."""

ReadScores = Callable[[], Iterator[tuple[Sequence[str], np.ndarray, np.ndarray]]]
"""Reads, shard by shard, of every ranked document its source, score (float64, not NaN) and tie (uint64)."""


@dataclass(frozen=True)
class GroupCut:
    """Where one group ends.

    Attributes:
        cut: the worst document that is kept.
        score: its score.
        kept: documents that are kept.
        of: documents that were ranked.
    """

    cut: Cut
    score: float
    kept: int
    of: int


@dataclass(frozen=True)
class Cuts:
    """Where every group ends, by which score; the groups are the sources, or ALL where they are not asked for."""

    score: str
    higher_is_better: bool
    per_source: bool
    found: dict[str, GroupCut]


def rank_documents(read: ReadScores, score: str, higher_is_better: bool, share: float, per_source: bool) -> Cuts:
    """Find where the best `share` of each group ends: its ceil(share * documents)-th document."""
    sizes: dict[str, int] = {}
    for sources, _, _ in read():
        names, numbers = np.unique(group_names(sources, per_source).astype(str), return_counts=True)
        for name, number in zip(names.tolist(), numbers.tolist(), strict=True):
            sizes[name] = sizes.get(name, 0) + number
    numbers_of = {name: number for number, name in enumerate(sorted(sizes))}
    ranks = {numbers_of[name]: number_kept(share, size) for name, size in sizes.items()}

    def keyed() -> Iterator[Ranked]:
        for sources, scores, ties in read():
            groups = group_names(sources, per_source).tolist()
            numbers = np.fromiter(map(numbers_of.__getitem__, groups), np.int64, len(groups))
            yield Ranked(numbers, rank_keys(scores, higher_is_better), ties)

    cuts = find_cuts(keyed, ranks)
    return Cuts(
        score,
        higher_is_better,
        per_source,
        {
            name: GroupCut(cuts[number], score_of_key(cuts[number].key, higher_is_better), ranks[number], sizes[name])
            for name, number in numbers_of.items()
        },
    )


def kept_by_rank(cuts: Cuts, sources: Sequence[str], scores: np.ndarray, ties: np.ndarray) -> np.ndarray:
    """Which of n documents are among the best of their group: bool of shape (n,); false where a score is NaN."""
    kept = np.zeros(len(scores), bool)
    known = ~np.isnan(scores)
    keys = rank_keys(scores, cuts.higher_is_better)
    groups = group_names(sources, cuts.per_source)
    for name, group in cuts.found.items():
        own = known & (groups == name)
        kept[own] = group.cut.keeps(keys[own], ties[own])
    return kept


def group_names(sources: Sequence[str], per_source: bool) -> np.ndarray:
    """The group of each of n documents: strings as objects of shape (n,)."""
    return np.array(list(sources) if per_source else [ALL] * len(sources), object)


def describe_cuts(cuts: Cuts) -> dict[str, Any]:
    """The cuts as JSON; a document at the cut's score is kept where its tie is at most `tie`."""
    return {
        name: {
            "by": cuts.score,
            "score": found.score,
            "kept": found.kept,
            "of": found.of,
            "tie": f"{found.cut.tie:016x}",
        }
        for name, found in cuts.found.items()
    }
