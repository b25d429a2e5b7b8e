"""Copies of a text share its matches with older documents."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.dedup.dedup_index import spread_to_copies

match_tables = st.dictionaries(
    st.tuples(st.integers(0, 5), st.integers(100, 105)),
    st.sampled_from([0.75, 0.8, 0.9]),
)
pairs = st.sets(st.tuples(st.integers(0, 5), st.integers(6, 12)))


@given(match_tables, pairs)
def test_copies_get_the_most_similar_matches_of_their_document(
    matches: dict[tuple[int, int], float], copies: set[tuple[int, int]]
) -> None:
    rows, similarity = (
        np.array(list(matches), np.int64).reshape(-1, 2),
        np.array(list(matches.values()), float),
    )
    spread, jaccard = spread_to_copies(
        rows, similarity, np.array(list(copies), np.int64).reshape(-1, 2)
    )
    best = {
        new: max(value for (document, _), value in matches.items() if document == new)
        for new, _ in matches
    }
    expected = sorted(
        (copy, old, value)
        for document, copy in copies
        for (new, old), value in matches.items()
        if new == document and value == best[new]
    )
    assert (
        sorted(
            (int(copy), int(old), value)
            for (copy, old), value in zip(spread, jaccard, strict=True)
        )
        == expected
    )
