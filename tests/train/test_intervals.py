from __future__ import annotations

import numpy as np
import pytest

from gristmill.train.evaluation.intervals import (
    interval,
    mean_with_interval,
    paired_difference,
)
from gristmill.train.evaluation.metrics import calibration


def test_interval_of_a_mean_approaches_the_normal_one() -> None:
    values = np.random.default_rng(5).normal(3.0, 2.0, 4000)
    mean = mean_with_interval(values, 1, 2000)
    assert mean["value"] == pytest.approx(values.mean())
    assert mean["stderr"] == pytest.approx(values.std(ddof=1) / np.sqrt(4000))
    assert mean["low"] == pytest.approx(mean["value"] - 1.96 * mean["stderr"], abs=0.01)
    assert mean["high"] == pytest.approx(
        mean["value"] + 1.96 * mean["stderr"], abs=0.01
    )


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


def test_calibration_error_is_derived_by_hand() -> None:
    # Bins of a third: (0.25, 0.3) has mean 0.275 and half right; (0.9, 0.9, 1.0) has
    # mean 0.9333 and two thirds right.
    confidence = np.array([0.25, 0.3, 0.9, 0.9, 1.0])
    correct = np.array([True, False, True, True, False])
    calibration_ = calibration(confidence, correct, bins=3)
    assert calibration_.ece_equal_width == pytest.approx(
        2 / 5 * (0.5 - 0.275) + 3 / 5 * (2.8 / 3 - 2 / 3)
    )
    assert [bin_.items for bin_ in calibration_.reliability] == [2, 3]
    # Of equal mass: ranks 0 and 1 of 5, then both 0.9 together, then 1.0 with them or
    # alone: 5 items in 3 bins.
    assert calibration_.ece_equal_mass == pytest.approx(
        2 / 5 * abs(0.5 - 0.275) + 2 / 5 * abs(1 - 0.9) + 1 / 5 * 1.0
    )


def test_perfect_calibration_has_no_error() -> None:
    assert calibration(np.ones(4), np.ones(4, dtype=bool)).ece_equal_width == 0.0
    half = calibration(np.full(4, 0.5), np.array([True, False, True, False]))
    assert half.ece_equal_width == half.ece_equal_mass == 0.0
