"""Paired differences between arms of an experiment: intervals, decisions and power.

Runs of one seed share initialisation and order in all arms, so noise that they share
cancels in the difference of a seed. Intervals and tests are Student's t over seeds; of
several arms, p values are adjusted by Holm's step-down procedure (Holm 1979), which
bounds the chance of any false decision.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Decision = Literal["better", "worse", "cannot tell"]
POWER = 0.8
"""Chance to find a difference for which a number of seeds is planned (Cohen 1988,
section 2.4).
"""
MOST_SEEDS = 1000
"""Number of seeds from which on a difference counts as out of reach."""


@dataclass(frozen=True)
class Difference:
    """Differences between two arms, seed by seed; negative values favour the first.

    Attributes:
        mean: over the seeds.
        low, high: confidence interval of the mean.
        spread: sample standard deviation.
        p: two-sided p value of no difference.
        agreement: share of seeds whose difference has the sign of the mean.
        seeds: number of seeds.
    """

    mean: float
    low: float
    high: float
    spread: float
    p: float
    agreement: float
    seeds: int


def difference(
    values: Sequence[float], reference: Sequence[float], confidence: float
) -> Difference:
    """Compare the values of an arm with those of another one, seed by seed.

    Args:
        values, reference: of the same seeds, at least two, in the same order.
        confidence: of the interval, such as 0.95.
    """
    from scipy.stats import ttest_1samp

    paired = np.subtract(values, reference, dtype=np.float64)
    mean, spread = float(paired.mean()), float(paired.std(ddof=1))
    agreement = float((np.sign(paired) == np.sign(mean)).mean())
    # Equal differences have no noise: an arm that changes nothing, or a certainty.
    low, high, p = mean, mean, float(mean == 0)
    if spread:
        test = ttest_1samp(paired, 0.0)
        low, high = map(float, test.confidence_interval(confidence))
        p = float(test.pvalue)
    return Difference(mean, low, high, spread, p, agreement, len(paired))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p values of several tests, in their order (Holm 1979).

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[np.argsort(p_values)] = np.maximum.accumulate(factors * np.sort(p_values))
    return np.minimum(adjusted, 1.0).tolist()


def decide(
    mean: float, adjusted_p: float, confidence: float, smallest_difference: float
) -> Decision:
    """Decide by the rule: a difference counts if chance is ruled out with this
    confidence and it is at least the smallest difference that matters.
    """
    if adjusted_p > 1 - confidence or abs(mean) < smallest_difference or not mean:
        return "cannot tell"
    return "better" if mean < 0 else "worse"


def power_of(seeds: int, size: float, spread: float, confidence: float) -> float:
    """Chance that a t test over some seeds finds a true difference of a size."""
    from scipy.stats import nct, t

    cut = t.ppf((1 + confidence) / 2, seeds - 1)
    shift = abs(size) / spread * math.sqrt(seeds)
    # The other tail is a decision in the wrong direction.
    return float(nct.sf(cut, seeds - 1, shift))


def seeds_to_find(size: float, spread: float, confidence: float) -> int | None:
    """Fewest seeds that find a difference with `POWER`; None above `MOST_SEEDS`."""
    if not spread:
        return 2
    numbers = range(2, MOST_SEEDS + 1)
    place = bisect_left(
        numbers, POWER, key=lambda seeds: power_of(seeds, size, spread, confidence)
    )
    return numbers[place] if place < len(numbers) else None


def detectable(seeds: int, spread: float, confidence: float) -> float:
    """Smallest true difference that some seeds find with `POWER`."""
    from scipy.optimize import brentq

    if not spread:
        return 0.0
    return float(
        brentq(
            lambda size: power_of(seeds, size, spread, confidence) - POWER,
            0.0,
            100 * spread,
        )
    )
