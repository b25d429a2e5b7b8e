"""Exact cut over many shards equals a full sort."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.quality import ranking as cuts
from gristmill.dataprep.quality.ranking import (
    Cut,
    DescribedCut,
    Ranked,
    find_cuts,
    kept_by_rank,
    number_kept,
    rank_documents,
    rank_keys,
    score_of_key,
)

SCORES = st.floats(allow_nan=False)
WORDS = st.one_of(
    st.integers(0, 3), st.integers(0, 2**64 - 1), st.integers(2**64 - 3, 2**64 - 1)
)


@given(SCORES, SCORES)
def test_rank_keys_have_the_order_of_scores(first: float, second: float) -> None:
    low, high = rank_keys(np.array([first, second]), higher_is_better=False).tolist()
    assert (low < high, low == high) == (first < second, first == second)
    best, worst = rank_keys(np.array([first, second]), higher_is_better=True).tolist()
    assert (best < worst, best == worst) == (first > second, first == second)
    assert score_of_key(low, higher_is_better=False) == first
    assert score_of_key(best, higher_is_better=True) == first


@pytest.mark.parametrize(
    ("share", "documents", "kept"),
    [(0.1, 20, 2), (0.1, 21, 3), (0.3, 10, 3), (1.0, 7, 7), (1e-6, 5, 1), (0.7, 10, 7)],
)
def test_kept_share_is_rounded_up_despite_binary_fractions(
    share: float, documents: int, kept: int
) -> None:
    assert number_kept(share, documents) == kept


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 2), WORDS, WORDS), min_size=1, max_size=40),
    st.integers(0, 39),
    st.sampled_from([0, 1, 1 << 20]),
    st.data(),
)
def test_cut_is_the_document_of_the_rank(
    documents: list[tuple[int, int, int]], border: int, few: int, data: st.DataObject
) -> None:
    groups, keys, ties = (
        np.array(column, kind)
        for column, kind in zip(
            zip(*documents, strict=True), (np.int64, np.uint64, np.uint64), strict=True
        )
    )

    def read() -> Iterator[Ranked]:
        for part in (slice(0, border), slice(border, None)):
            yield Ranked(groups[part], keys[part], ties[part])

    present = sorted(set(groups.tolist()))
    groups_with_ranks = data.draw(st.sets(st.sampled_from(present), min_size=1))
    ranks = {
        group: data.draw(st.integers(1, int((groups == group).sum())))
        for group in sorted(groups_with_ranks)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "FEW", few)  # 0: down to the last bit, by counting alone
        cut_of_group = find_cuts(read, ranks)
    for group, rank in ranks.items():
        key, tie = sorted(
            (key, tie)
            for document_group, key, tie in documents
            if document_group == group
        )[rank - 1]
        assert cut_of_group[group] == Cut(key, tie)


def test_nan_scores_are_never_kept_and_sources_are_ranked_alone() -> None:
    scores = np.array([3.0, 1.0, 2.0, 5.0, 4.0])
    sources = ["a", "a", "a", "b", "b"]
    ties = np.arange(5, dtype=np.uint64)

    def read() -> Iterator[tuple[list[str], np.ndarray, np.ndarray]]:
        yield sources[:2], scores[:2], ties[:2]
        yield sources[2:], scores[2:], ties[2:]

    ranking = rank_documents(read, "perplexity", False, 0.5, per_source=True)
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
    together = rank_documents(read, "quality", True, 0.4, per_source=False)
    assert together.by_group == {
        "all": DescribedCut(
            by="quality", score=4.0, kept=2, of=5, tie="0000000000000004"
        )
    }
