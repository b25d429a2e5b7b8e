"""Paired differences: values derived by hand, and rates of false decisions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gristmill.flows.sweeps.paired_differences import (
    decide,
    detectable,
    difference,
    holm,
    power_of,
    seeds_to_find,
)

SEED = 20261130


def test_difference_equals_students_t_by_hand() -> None:
    """Differences -1, -2, -3: mean -2, deviation 1, error 1 / sqrt(3). The t of two
    degrees of freedom at 97.5 % is 4.302653, and of |t| = 2 sqrt(3) the two-sided p is
    1 - t / sqrt(2 + t^2) = 1 - sqrt(12 / 14).
    """
    compared = difference([1.0, 2.0, 3.0], [2.0, 4.0, 6.0], 0.95)
    assert (compared.mean, compared.spread, compared.seeds) == (-2.0, 1.0, 3)
    width = 4.302653 / math.sqrt(3)
    assert compared.low == pytest.approx(-2 - width, abs=1e-6)
    assert compared.high == pytest.approx(-2 + width, abs=1e-6)
    assert compared.p == pytest.approx(1 - math.sqrt(12 / 14))
    assert compared.agreement == 1.0
    mixed = difference([1.0, 1.0, 0.0, 5.0], [0.0, 0.0, 1.0, 0.0], 0.95)
    assert (mixed.mean, mixed.agreement) == (1.5, 0.75)


def test_equal_arms_and_constant_differences_have_no_noise() -> None:
    same = difference([1.0, 2.0], [1.0, 2.0], 0.95)
    assert (same.mean, same.p) == (0.0, 1.0)
    certain = difference([2.0, 3.0], [1.0, 2.0], 0.95)
    assert (certain.mean, certain.p, certain.low, certain.high) == (1.0, 0.0, 1.0, 1.0)


def test_holm_adjusts_in_steps_and_never_decreases() -> None:
    """0.005 x 4, 0.011 x 3, 0.02 x 2 and 0.04 x 1, the last raised to the one before."""
    assert holm([0.02, 0.005, 0.04, 0.011]) == pytest.approx([0.04, 0.02, 0.04, 0.033])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_decision_needs_certainty_and_size() -> None:
    assert decide(-0.02, 0.01, 0.95, 0.01) == "better"
    assert decide(0.02, 0.01, 0.95, 0.01) == "worse"
    assert decide(-0.02, 0.06, 0.95, 0.01) == "cannot tell"
    assert decide(-0.005, 0.0, 0.95, 0.01) == "cannot tell"
    assert decide(0.0, 0.0, 0.95, 0.0) == "cannot tell"


def test_power_agrees_with_published_sample_sizes() -> None:
    """Cohen 1988, table 2.4.1 by way of G*Power: a paired effect of 0.5 deviations
    needs 34 pairs, one of 0.8 needs 15, for a power of 0.8 at 5 %, two-sided.
    """
    assert seeds_to_find(0.5, 1.0, 0.95) == 34
    assert seeds_to_find(-1.6, 2.0, 0.95) == 15
    assert detectable(34, 1.0, 0.95) == pytest.approx(0.4946, abs=2e-3)
    assert power_of(34, detectable(34, 1.0, 0.95), 1.0, 0.95) == pytest.approx(0.8)
    assert seeds_to_find(1e-6, 1.0, 0.95) is None
    assert seeds_to_find(0.1, 0.0, 0.95) == 2


def test_equal_arms_are_called_different_at_the_nominal_rate() -> None:
    """Of 4,000 comparisons of equal arms 5 % may be called different by one test, and of
    1,000 ablations of four equal arms 5 % may have any decision.
    """
    print("seed", SEED)
    draws = np.random.default_rng(SEED).standard_normal((1000, 5, 5))
    p_values = [
        [difference(arm, runs[0], 0.95).p for arm in runs[1:]] for runs in draws
    ]
    single = np.mean([p < 0.05 for family in p_values for p in family])
    assert 0.035 < single < 0.065
    any_false = np.mean([min(holm(family)) < 0.05 for family in p_values])
    assert any_false < 0.065
