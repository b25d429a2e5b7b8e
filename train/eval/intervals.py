"""Uncertainty of measurements: bootstrap intervals and paired differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import numpy as np

LEVEL = 0.95
NORMAL_QUANTILE = 1.959963984540054
"""Quantile of the normal distribution: LEVEL lies within plus and minus it."""
CHUNK = 1 << 22
"""Random numbers per batch."""
Statistic = Callable[[np.ndarray], np.ndarray]
"""Function from means (bootstrap_samples, columns) to (bootstrap_samples,) values."""


class Estimate(TypedDict, total=False):
    """A measured value, or its uncertainty alone, as far as they are known.

    Attributes:
        value: as measured.
        low, high: limits of its interval at 95 %.
        units: number of items, prompts or pairs that it was measured on.
        significant: of a difference, True if the interval excludes zero.
    """

    value: float
    low: float
    high: float
    units: int
    significant: bool


def mean_with_interval(
    values: np.ndarray, seed: int, bootstrap_samples: int
) -> Estimate:
    """Mean of n values and its bootstrap interval."""
    return interval(
        np.asarray(values, dtype=np.float64)[:, None],
        lambda means: means[:, 0],
        seed,
        bootstrap_samples,
    )


def share_with_interval(hits: np.ndarray) -> Estimate | None:
    """Share of n units with Wilson's interval at 95 % (Wilson 1927), not degenerate for
    shares of 0 and 1; None without units.

    Args:
        hits: (n,) bool.
    """
    if not len(hits):
        return None
    number = len(hits)
    share = float(np.mean(hits))
    spread = NORMAL_QUANTILE**2 / number
    middle = (share + spread / 2) / (1 + spread)
    half = (
        NORMAL_QUANTILE
        * np.sqrt(share * (1 - share) / number + spread / (4 * number))
        / (1 + spread)
    )
    return {
        "value": share,
        "low": max(0.0, float(middle - half)),
        "high": min(1.0, float(middle + half)),
        "units": number,
    }


def interval(
    columns: np.ndarray, statistic: Statistic, seed: int, bootstrap_samples: int
) -> Estimate:
    """A function of column means, and its percentile bootstrap interval (Efron 1979) at
    95 %.

    Args:
        columns: (n, c) float64: measurements of each unit (document, item).
        statistic: function of the means of the columns, for all bootstrap_samples at
            once.
        seed: of the bootstrap samples.
        bootstrap_samples: number of samples.
    """
    return {
        "value": float(statistic(columns.mean(axis=0, keepdims=True))[0]),
        **percentiles(statistic(resampled_means(columns, seed, bootstrap_samples))),
    }


def percentiles(values: np.ndarray) -> Estimate:
    """Interval that holds the middle 95 % of values of shape (n,)."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"low": float(low), "high": float(high)}


def resampled_means(
    columns: np.ndarray, seed: int, bootstrap_samples: int
) -> np.ndarray:
    """Means of the columns over units drawn with replacement: (bootstrap_samples,
    c).
    """
    generator = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1)))
    number = len(columns)
    rows = max(1, CHUNK // number)
    parts = []
    for start in range(0, bootstrap_samples, rows):
        chosen = generator.integers(
            0, number, (min(rows, bootstrap_samples - start), number)
        )
        parts.append(columns[chosen].mean(axis=1))
    return np.concatenate(parts)


def paired_difference(
    first: np.ndarray, second: np.ndarray, seed: int, bootstrap_samples: int
) -> Estimate:
    """Mean of second - first over the same units, its interval, and `significant`: true
    if that excludes zero.
    """
    difference = mean_with_interval(
        np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64),
        seed,
        bootstrap_samples,
    )
    return {
        **difference,
        "significant": not difference["low"] <= 0.0 <= difference["high"],
    }
