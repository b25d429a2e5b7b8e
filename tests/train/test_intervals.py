from __future__ import annotations

import numpy as np
import pytest

from gristmill.train.eval.intervals import (
    interval,
    mean_with_interval,
    paired_difference,
)


def test_interval_of_a_mean_approaches_the_normal_one() -> None:
    values = np.random.default_rng(5).normal(3.0, 2.0, 4000)
    mean = mean_with_interval(values, 1, 2000)
    assert mean["value"] == pytest.approx(values.mean())
    error = 1.96 * values.std(ddof=1) / np.sqrt(4000)
    assert mean["low"] == pytest.approx(mean["value"] - error, abs=0.01)
    assert mean["high"] == pytest.approx(mean["value"] + error, abs=0.01)


def test_interval_depends_on_the_seed_only() -> None:
    values = np.arange(20.0)
    assert mean_with_interval(values, 1, 50) == mean_with_interval(values, 1, 50)
    assert (
        mean_with_interval(values, 1, 50)["low"]
        != mean_with_interval(values, 2, 50)["low"]
    )


def test_ratio_of_sums_is_bootstrapped_over_units() -> None:
    # Every unit has the same ratio, so nothing is uncertain however much the units
    # differ.
    columns = np.array([[2.0, 1.0], [20.0, 10.0], [6.0, 3.0]])
    assert interval(columns, lambda means: means[:, 0] / means[:, 1], 0, 100) == {
        "value": 2.0,
        "low": 2.0,
        "high": 2.0,
    }


def test_paired_difference_is_significant_where_intervals_overlap() -> None:
    hard = np.random.default_rng(0).normal(0.0, 10.0, 200)
    difference = paired_difference(
        hard, hard + 0.1 + np.random.default_rng(1).normal(0.0, 0.1, 200), 0, 500
    )
    assert difference["significant"]
    assert difference["value"] == pytest.approx(0.1, abs=0.03)
    assert not paired_difference(hard, hard[::-1].copy(), 0, 500)["significant"]
