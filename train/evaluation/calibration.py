"""Whether a model's confidence is its accuracy: expected calibration error, and the reliability plot's points."""

from __future__ import annotations

from typing import Any

import numpy as np

BINS = 15
"""Guo et al. 2017."""


def calibration(confidence: np.ndarray, correct: np.ndarray, bins: int = BINS) -> dict[str, Any]:
    """Expected calibration error (Guo et al. 2017, equation 3) by two ways of binning, since both are in use.

    Args:
        confidence: (n,) in (0, 1]: the share that the chosen answer has of all choices' likelihood.
        correct: (n,) bool.
        bins: how many, at most.

    Returns:
        `ece_equal_width` (bins of equal width on (0, 1]), `ece_equal_mass` (bins of equally many items), and
        `reliability`: per bin of equal width its items, mean confidence and accuracy.
    """
    width = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    # Items of equal confidence share a bin, whatever their order.
    rank = np.searchsorted(np.sort(confidence), confidence, side="left")
    mass = np.minimum(rank * bins // max(len(confidence), 1), bins - 1)
    by_width = _bins(width, confidence, correct)
    return {"ece_equal_width": _error(by_width), "ece_equal_mass": _error(_bins(mass, confidence, correct)),
            "bins": bins, "reliability": by_width}


def _bins(which: np.ndarray, confidence: np.ndarray, correct: np.ndarray) -> list[dict[str, float]]:
    return [{"items": int(chosen.sum()), "confidence": float(confidence[chosen].mean()),
             "accuracy": float(correct[chosen].mean())}
            for number in np.unique(which) for chosen in [which == number]]


def _error(found: list[dict[str, float]]) -> float:
    total = sum(one["items"] for one in found)
    return float(sum(one["items"] / total * abs(one["accuracy"] - one["confidence"]) for one in found))
