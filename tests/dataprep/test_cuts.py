"""Exact cut over many shards equals a full sort."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.quality.ranking import (
    DescribedCut,
    kept_by_rank,
    number_kept,
    rank_documents,
)

SCORES = st.one_of(st.sampled_from([-1.0, -0.0, 0.0, 0.5]), st.floats(allow_nan=False))
TIES = st.one_of(
    st.integers(0, 3), st.integers(0, 2**64 - 1), st.integers(2**64 - 3, 2**64 - 1)
)


@pytest.mark.parametrize(
    ("share", "documents", "kept"),
    [(0.1, 20, 2), (0.1, 21, 3), (0.3, 10, 3), (1.0, 7, 7), (1e-6, 5, 1), (0.7, 10, 7)],
)
def test_kept_share_is_rounded_up_despite_binary_fractions(
    share: float, documents: int, kept: int
) -> None:
    assert number_kept(share, documents) == kept


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), SCORES, TIES), min_size=1, max_size=40),
    st.integers(0, 39),
    st.floats(0.01, 1.0),
    st.booleans(),
    st.booleans(),
)
def test_kept_documents_are_the_first_of_a_full_sort(
    documents: list[tuple[str, float, int]],
    border: int,
    share: float,
    higher_is_better: bool,
    per_source: bool,
) -> None:
    sources = [source for source, _, _ in documents]
    scores = np.array([score for _, score, _ in documents], np.float64)
    ties = np.array([tie for _, _, tie in documents], np.uint64)
    shards = [
        (sources[part], scores[part], ties[part])
        for part in (slice(0, border), slice(border, None))
    ]
    ranking = rank_documents(shards, "quality", higher_is_better, share, per_source)
    assert set(ranking.by_group) == (set(sources) if per_source else {"all"})
    kept = kept_by_rank(ranking, sources, scores, ties)
    sign = -1 if higher_is_better else 1
    for name, described in ranking.by_group.items():
        members = [
            (sign * score, tie)
            for source, score, tie in documents
            if not per_source or source == name
        ]
        worst = sorted(members)[number_kept(share, len(members)) - 1]
        assert (sign * described.score, int(described.tie, 16)) == worst
    assert kept.tolist() == [
        (sign * score, tie)
        <= (
            sign * ranking.by_group[source if per_source else "all"].score,
            int(ranking.by_group[source if per_source else "all"].tie, 16),
        )
        for source, score, tie in documents
    ]


def test_nan_scores_are_never_kept_and_sources_are_ranked_alone() -> None:
    scores = np.array([3.0, 1.0, 2.0, 5.0, 4.0])
    sources = ["a", "a", "a", "b", "b"]
    ties = np.arange(5, dtype=np.uint64)

    def read() -> Iterator[tuple[list[str], np.ndarray, np.ndarray]]:
        yield sources[:2], scores[:2], ties[:2]
        yield sources[2:], scores[2:], ties[2:]

    ranking = rank_documents(read(), "perplexity", False, 0.5, per_source=True)
    assert {
        name: (cut.score, cut.kept, cut.of) for name, cut in ranking.by_group.items()
    } == {
        "a": (2.0, 2, 3),
        "b": (4.0, 1, 2),
    }
    assert kept_by_rank(ranking, sources, scores, ties).tolist() == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert kept_by_rank(ranking, ["a"], np.array([math.nan]), ties[:1]).tolist() == [
        False
    ]
    together = rank_documents(read(), "quality", True, 0.4, per_source=False)
    assert together.by_group == {
        "all": DescribedCut(
            by="quality", score=4.0, kept=2, of=5, tie="0000000000000004"
        )
    }
