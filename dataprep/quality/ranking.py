"""Selection of the best share of all documents, or of each source's, by one score:
exact, in bounded memory.

Documents are ordered by (score, tie). The tie is a hash of the id, so that the order of
equal scores depends only on the documents. Radix selection finds the k-th document:
each pass over the shards counts the next 16 bits of the remaining candidates, and keeps
the bin of the k-th. Few remaining candidates are sorted. Two passes suffice for almost
all data; eight are the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DIGIT_BITS = 16
DIGITS = 1 << DIGIT_BITS
WORD_DIGITS = 64 // DIGIT_BITS
FEW = 1 << 20
"""Number of candidates that are sorted in memory."""


@dataclass(frozen=True)
class Ranked:
    """Keys of some documents.

    Attributes:
        groups: int64 of shape (n,), the selection that each document belongs to.
        keys: uint64 of shape (n,): smaller is better, see `rank_keys`.
        ties: uint64 of shape (n,): order of equal keys.
    """

    groups: np.ndarray
    keys: np.ndarray
    ties: np.ndarray


Read = Callable[[], Iterator[Ranked]]
"""Function that reads all documents, shard by shard; called once per pass."""


@dataclass(frozen=True)
class Cut:
    """Key and tie of the worst document that is kept."""

    key: int
    tie: int

    def keeps(self, keys: np.ndarray, ties: np.ndarray) -> np.ndarray:
        """Return True for documents at least as good as the cut: bool of shape (n,)."""
        return (keys < np.uint64(self.key)) | (
            (keys == np.uint64(self.key)) & (ties <= np.uint64(self.tie))
        )


def rank_keys(scores: np.ndarray, higher_is_better: bool) -> np.ndarray:
    """Convert scores (float64, not NaN) to uint64 keys: smaller is better, equal for
    equal scores.
    """
    bits = (scores + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    sign = np.uint64(1) << np.uint64(63)
    ascending = np.where(bits & sign, ~bits, bits | sign)
    return ~ascending if higher_is_better else ascending


def score_of_key(key: int, higher_is_better: bool) -> float:
    """Score of a key."""
    ascending = ~np.uint64(key) if higher_is_better else np.uint64(key)
    sign = np.uint64(1) << np.uint64(63)
    bits = ascending & ~sign if ascending & sign else ~ascending
    return float(np.array([bits], np.uint64).view(np.float64)[0])


def number_kept(share: float, documents: int) -> int:
    """ceil(share * documents) without binary rounding errors: a tenth of 20 is 2."""
    return math.ceil(round(share * documents, 9))


def find_cuts(read: Read, ranks: Mapping[int, int]) -> dict[int, Cut]:
    """Find the document with the given rank in each group.

    Args:
        read: all documents; groups without a rank are ignored.
        ranks: group -> rank, from 1 (the best) to its number of documents. Groups are
            small integers from 0.
    """
    if not ranks:
        return {}
    size = max(ranks) + 1
    ranks_left = np.zeros(size, np.int64)  # 0 for groups without a rank
    ranks_left[list(ranks)] = list(ranks.values())
    prefixes = np.zeros((size, 2), np.uint64)
    for depth in range(2 * WORD_DIGITS):
        # the digit's word (0: key, 1: tie) and its place in it
        word, place = divmod(depth, WORD_DIGITS)
        shift = np.uint64(64 - DIGIT_BITS * (place + 1))
        counts = np.zeros((size, DIGITS), np.int64)
        for part in read():
            positions = _matches(part, prefixes, ranks_left, depth)
            values = (part.ties if word else part.keys)[positions] >> shift
            slots = part.groups[positions] * DIGITS + values.astype(np.int64) % DIGITS
            counts += np.bincount(slots, minlength=counts.size).reshape(counts.shape)
        candidates = 0
        for group in ranks:
            ends = np.cumsum(counts[group])
            digit = int(np.searchsorted(ends, ranks_left[group]))
            ranks_left[group] -= int(ends[digit] - counts[group, digit])
            prefixes[group, word] |= np.uint64(digit) << shift
            candidates += int(counts[group, digit])
        if candidates <= FEW:
            break
    else:
        return {
            group: Cut(int(prefixes[group, 0]), int(prefixes[group, 1]))
            for group in ranks
        }
    few = []
    for part in read():
        positions = _matches(part, prefixes, ranks_left, depth + 1)
        few.append((part.groups[positions], part.keys[positions], part.ties[positions]))
    groups, keys, ties = map(np.concatenate, zip(*few, strict=True))
    cuts = {}
    for group in np.flatnonzero(ranks_left).tolist():
        members = np.flatnonzero(groups == group)
        order = members[np.lexsort((ties[members], keys[members]))]
        last_kept = order[ranks_left[group] - 1]
        cuts[group] = Cut(int(keys[last_kept]), int(ties[last_kept]))
    return cuts


def _matches(
    part: Ranked, prefixes: np.ndarray, ranks_left: np.ndarray, depth: int
) -> np.ndarray:
    """Positions of documents in ranked groups whose first `depth` digits are their
    group's prefix.
    """
    positions = np.flatnonzero(part.groups < len(ranks_left))
    positions = positions[ranks_left[part.groups[positions]] > 0]
    for word, values in ((0, part.keys), (1, part.ties)):
        digits = min(max(depth - word * WORD_DIGITS, 0), WORD_DIGITS)
        if digits == 0:
            break
        shift = np.uint64(64 - DIGIT_BITS * digits)
        positions = positions[
            (values[positions] >> shift)
            == (prefixes[part.groups[positions], word] >> shift)
        ]
    return positions


ALL = "all"
"""Group of all documents, if sources are not ranked separately."""

ReadScores = Callable[[], Iterator[tuple[Sequence[str], np.ndarray, np.ndarray]]]
"""Function that reads, per shard, the source, score (float64, not NaN) and tie (uint64)
of every ranked document.
"""


@dataclass(frozen=True)
class DescribedCut:
    """Cut of a group of documents, for the summary.

    Attributes:
        by: name of the score.
        score: the worst one that is kept.
        kept: number of kept documents.
        of: number of ranked documents.
        tie: largest tie of a kept document with this score, in 16 hexadecimal digits.
    """

    by: str
    score: float
    kept: int
    of: int
    tie: str


@dataclass(frozen=True)
class Cuts:
    """Cuts of all groups by one score; the groups are the sources, or ALL."""

    score: str
    higher_is_better: bool
    per_source: bool
    by_group: dict[str, DescribedCut]


def rank_documents(
    read: ReadScores, score: str, higher_is_better: bool, share: float, per_source: bool
) -> Cuts:
    """Find the cut at the best `share` of each group: its ceil(share * documents)-th
    document.
    """
    sizes: dict[str, int] = {}
    for sources, _, _ in read():
        names, numbers = np.unique(
            group_names(sources, per_source).astype(str), return_counts=True
        )
        for name, number in zip(names.tolist(), numbers.tolist(), strict=True):
            sizes[name] = sizes.get(name, 0) + number
    number_of_group = {name: number for number, name in enumerate(sorted(sizes))}
    ranks = {
        number_of_group[name]: number_kept(share, size) for name, size in sizes.items()
    }

    def keyed() -> Iterator[Ranked]:
        for sources, scores, ties in read():
            groups = group_names(sources, per_source).tolist()
            numbers = np.fromiter(
                map(number_of_group.__getitem__, groups), np.int64, len(groups)
            )
            yield Ranked(numbers, rank_keys(scores, higher_is_better), ties)

    cuts = find_cuts(keyed, ranks)
    return Cuts(
        score,
        higher_is_better,
        per_source,
        {
            name: DescribedCut(
                score,
                score_of_key(cuts[number].key, higher_is_better),
                ranks[number],
                sizes[name],
                f"{cuts[number].tie:016x}",
            )
            for name, number in number_of_group.items()
        },
    )


def kept_by_rank(
    cuts: Cuts, sources: Sequence[str], scores: np.ndarray, ties: np.ndarray
) -> np.ndarray:
    """Return True for documents among the best of their group: bool of shape (n,);
    False for NaN scores.
    """
    kept = np.zeros(len(scores), bool)
    has_score = ~np.isnan(scores)
    keys = rank_keys(scores, cuts.higher_is_better)
    groups = group_names(sources, cuts.per_source)
    for name, group in cuts.by_group.items():
        members = has_score & (groups == name)
        (key,) = rank_keys(np.array([group.score]), cuts.higher_is_better)
        cut = Cut(int(key), int(group.tie, 16))
        kept[members] = cut.keeps(keys[members], ties[members])
    return kept


def group_names(sources: Sequence[str], per_source: bool) -> np.ndarray:
    """Group of each of n documents: strings as objects of shape (n,)."""
    return np.array(list(sources) if per_source else [ALL] * len(sources), object)
