"""Agreement of two judges, from counts that add up over shards."""

from __future__ import annotations

import math
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
    pairs: dict[str, int] = {}
    for score, second_score in zip(
        np.rint(x).astype(int).tolist(), np.rint(y).astype(int).tolist(), strict=True
    ):
        pairs[f"{score} {second_score}"] = pairs.get(f"{score} {second_score}", 0) + 1
    return {
        "pairs": pairs,
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
    if not n:
        return {
            "documents": 0,
            "same": None,
            "kappa": None,
            "weighted_kappa": None,
            "correlation": None,
            "difference": None,
        }
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
    chance_agreement = float(expected.trace())
    return {
        "documents": n,
        "same": float(observed.trace()),
        "kappa": None
        if chance_agreement >= 1
        else float((observed.trace() - chance_agreement) / (1 - chance_agreement)),
        "weighted_kappa": None
        if not (squared_distance * expected).sum()
        else float(
            1
            - (squared_distance * observed).sum() / (squared_distance * expected).sum()
        ),
        "correlation": None
        if variance_product <= 1e-12
        else covariance / math.sqrt(variance_product),
        "difference": (counts["x"] - counts["y"]) / n,
    }
