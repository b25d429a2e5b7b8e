"""Deviation of the prefixes of the training order from the mixture."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.tokenize.mixing.mix_summary import (
    Drift,
    describe_prefixes,
    largest_drifts,
)
from gristmill.tokenize.order import Order
from tests.tokenize.order_definition import unrank

counts_of_sources = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any)


@given(counts_of_sources, st.integers(0, 2**64 - 1))
def test_drifts_are_the_largest_deviations_of_any_prefix(
    counts: list[int], seed: int
) -> None:
    total = sum(counts)
    sources, _ = unrank(counts, Order(counts, seed).rows(np.arange(total)))
    expected = [
        max(
            abs(Fraction(int(rows_so_far)) - Fraction((place + 1) * rows, total))
            for place, rows_so_far in enumerate(np.cumsum(sources == source))
        )
        for source, rows in enumerate(counts)
    ]
    assert largest_drifts(np.array(counts)).tolist() == pytest.approx(
        [float(drift) for drift in expected]
    )
    for drift_summary in describe_prefixes(
        [str(source) for source in range(len(counts))], [counts]
    ).values():
        assert drift_summary.largest_drift_rows <= drift_summary.bound_rows + 1e-4


def test_phased_set_drifts_as_its_worst_phase() -> None:
    phases = [[1, 9, 0], [5, 3, 2]]
    drifts = describe_prefixes(["a", "b", "c"], phases)
    drifts_by_phase = [describe_prefixes(["a", "b", "c"], [phase]) for phase in phases]
    for name, values in drifts.items():
        assert values == Drift(
            max(part[name].largest_drift_rows for part in drifts_by_phase),
            max(part[name].bound_rows for part in drifts_by_phase),
        )
