"""AUC, precision, recall and the best cut equal their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.quality.separation import (
    area_under_curve,
    best_cut,
    measure_cut,
    measure_separation,
)

SCORES = st.lists(st.integers(0, 5), min_size=1, max_size=20)


@settings(deadline=None)  # the first call imports scipy
@given(SCORES, SCORES)
def test_area_under_the_curve_is_the_win_probability(
    positive: list[int], negative: list[int]
) -> None:
    wins = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    area = area_under_curve(np.array(positive, float), np.array(negative, float))
    assert area == pytest.approx(wins / (len(positive) * len(negative)), abs=1e-12)


def test_precision_and_recall_at_a_cut() -> None:
    positive, negative = np.array([0.9, 0.5, 0.1]), np.array([0.5, 0.2])
    assert measure_cut(positive, negative, 0.5) == {
        "cut": 0.5,
        "precision": 2 / 3,
        "recall": 2 / 3,
        "f1": 2 / 3,
    }
    assert measure_cut(positive, negative, 0.95) == {
        "cut": 0.95,
        "precision": 1.0,
        "recall": 0.0,
        "f1": 0.0,
    }


@given(SCORES, SCORES)
def test_best_cut_has_the_highest_f1(positive: list[int], negative: list[int]) -> None:
    good, bad = np.array(positive, float), np.array(negative, float)
    best = best_cut(good, bad)
    assert best["f1"] == max(
        measure_cut(good, bad, cut)["f1"] for cut in {*positive, *negative}
    )


def test_cut_keeps_its_sign_if_lower_is_better() -> None:
    good, bad = np.array([10.0, 20.0]), np.array([100.0, 15.0])
    separation = measure_separation(good, bad, 50.0, higher_is_better=False)
    assert separation["auc"] == 0.75
    assert separation["at_cut"] == {
        "cut": 50.0,
        "precision": 2 / 3,
        "recall": 1.0,
        "f1": 0.8,
    }
    assert separation["best"]["cut"] == 20.0
    assert measure_separation(good, bad, None, higher_is_better=False)["at_cut"] is None
