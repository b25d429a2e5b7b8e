"""Keeping the best share of all documents, or of each source's, by one score: exactly, over all shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gristmill.dataprep.judges.cuts import Cut, Ranked, find_cuts, number_kept, rank_keys, score_of_key

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
    return Cuts(score, higher_is_better, per_source, {
        name: GroupCut(cuts[number], score_of_key(cuts[number].key, higher_is_better), ranks[number], sizes[name])
        for name, number in numbers_of.items()
    })  # fmt: skip


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
    return {name: {"by": cuts.score, "score": found.score, "kept": found.kept, "of": found.of,
                   "tie": f"{found.cut.tie:016x}"} for name, found in cuts.found.items()}  # fmt: skip
