"""Agreement of two judges, from counts that add up over shards."""

from __future__ import annotations

import math
from collections import Counter
from typing import TypedDict

import numpy as np


class PairCounts(TypedDict, total=False):
    """Counts of the scores of two judges, which add up over shards; empty without a
    shard.

    Attributes:
        pairs: by both scores rounded to integers, separated by a blank.
        x: sum of the first judge's scores.
        xx: sum of their squares.
    """

    pairs: dict[str, int]
    n: int
    x: float
    y: float
    xx: float
    yy: float
    xy: float


class Agreement(TypedDict):
    """Agreement of two judges; what is undefined is None.

    Attributes:
        same: share with equal scores.
        kappa: of the rounded scores (Cohen 1960).
        weighted_kappa: with quadratic weights (Cohen 1968).
        correlation: pearson's, of the scores.
        difference: mean score of the first judge minus the second's.
    """

    documents: int
    same: float | None
    kappa: float | None
    weighted_kappa: float | None
    correlation: float | None
    difference: float | None


def count_pairs(first: np.ndarray, second: np.ndarray) -> PairCounts:
    """Counts of the scores of two judges (float64 of shape (n,), NaN for no score)."""
    has_scores = ~(np.isnan(first) | np.isnan(second))
    x = first[has_scores]
    y = second[has_scores]
    rounded = np.rint(np.stack([x, y], axis=1)).astype(int).tolist()
    return {
        "pairs": dict(
            Counter(
                f"{first_score} {second_score}" for first_score, second_score in rounded
            )
        ),
        "n": len(x),
        "x": float(x.sum()),
        "y": float(y.sum()),
        "xx": float((x * x).sum()),
        "yy": float((y * y).sum()),
        "xy": float((x * y).sum()),
    }


def agreement(counts: PairCounts) -> Agreement:
    """Statistics of the counts of `count_pairs`."""
    n = counts.get("n", 0)
    result = Agreement(
        documents=n,
        same=None,
        kappa=None,
        weighted_kappa=None,
        correlation=None,
        difference=None,
    )
    if not n:
        return result
    pairs = {
        tuple(map(int, key.split())): number for key, number in counts["pairs"].items()
    }
    scores = sorted({score for pair in pairs for score in pair})
    observed = (
        np.array(
            [[pairs.get((row, column), 0) for column in scores] for row in scores],
            np.float64,
        )
        / n
    )
    expected = np.outer(observed.sum(1), observed.sum(0))
    squared_distance = np.subtract.outer(scores, scores).astype(np.float64) ** 2
    variance_product = (counts["xx"] - counts["x"] ** 2 / n) * (
        counts["yy"] - counts["y"] ** 2 / n
    )
    covariance = counts["xy"] - counts["x"] * counts["y"] / n
    same = float(observed.trace())
    by_chance = float(expected.trace())
    distance = float((squared_distance * observed).sum())
    distance_by_chance = float((squared_distance * expected).sum())
    result["same"] = same
    result["difference"] = (counts["x"] - counts["y"]) / n
    if by_chance < 1:
        result["kappa"] = (same - by_chance) / (1 - by_chance)
    if distance_by_chance:
        result["weighted_kappa"] = 1 - distance / distance_by_chance
    if variance_product > 1e-12:
        result["correlation"] = covariance / math.sqrt(variance_product)
    return result
