"""How far two judges agree: counts that shards add up, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gristmill.dataprep.counts import Counts


def count_pairs(first: np.ndarray, second: np.ndarray) -> Counts:
    """Counts of the scores of two judges (float64 of shape (n,), NaN where there is none).

    Returns:
        `pairs`, by both scores rounded to whole numbers, and the moments that a correlation needs.
    """
    both = ~(np.isnan(first) | np.isnan(second))
    x, y = first[both], second[both]
    pairs: dict[str, int] = {}
    for one, other in zip(np.rint(x).astype(int).tolist(), np.rint(y).astype(int).tolist(), strict=True):
        pairs[f"{one} {other}"] = pairs.get(f"{one} {other}", 0) + 1
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
    """What follows from the counts of `count_pairs`, None where it is undefined.

    Returns:
        `documents`; `same`, the share with equal scores; `kappa` (Cohen 1960) and `weighted_kappa` (quadratic weights:
        Cohen 1968) of the rounded scores; `correlation` (Pearson's) of the scores; `difference`, the first judge's mean
        score less the second's.
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
    pairs = {tuple(map(int, key.split())): number for key, number in counts["pairs"].items()}
    scores = sorted({score for pair in pairs for score in pair})
    observed = np.array([[pairs.get((one, other), 0) for other in scores] for one in scores], np.float64) / n
    expected = np.outer(observed.sum(1), observed.sum(0))
    apart = np.subtract.outer(scores, scores).astype(np.float64) ** 2
    spread = (counts["xx"] - counts["x"] ** 2 / n) * (counts["yy"] - counts["y"] ** 2 / n)
    together = counts["xy"] - counts["x"] * counts["y"] / n
    by_chance = float(expected.trace())
    return {
        "documents": n,
        "same": float(observed.trace()),
        "kappa": None if by_chance >= 1 else float((observed.trace() - by_chance) / (1 - by_chance)),
        "weighted_kappa": None
        if not (apart * expected).sum()
        else float(1 - (apart * observed).sum() / (apart * expected).sum()),
        "correlation": None if spread <= 1e-12 else together / math.sqrt(spread),
        "difference": (counts["x"] - counts["y"]) / n,
    }
