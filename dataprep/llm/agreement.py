"""Agreement of two judges, from counts that add up over shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gristmill.dataprep.conservation import Counts


def count_pairs(first: np.ndarray, second: np.ndarray) -> Counts:
    """Counts of the scores of two judges (float64 of shape (n,), NaN for no score).

    Returns:
        `pairs`, by both scores rounded to integers, and the sums that a correlation
        needs.
    """
    has_scores = ~(np.isnan(first) | np.isnan(second))
    x, y = first[has_scores], second[has_scores]
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


def agreement(counts: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics of the counts of `count_pairs`, None if undefined.

    Returns:
        `documents`; `same`, the share with equal scores; `kappa` (Cohen 1960) and
        `weighted_kappa` (quadratic weights:
            Cohen 1968) of the rounded scores; `correlation` (Pearson's) of the scores;
            `difference`, the first judge's mean score minus the second's.
    """
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
