"""How well a score tells good documents from others, on labelled ones."""

from __future__ import annotations

from typing import Any

import numpy as np


def area_under_curve(positive: np.ndarray, negative: np.ndarray) -> float:
    """Exact AUC: the chance that a positive scores over a negative, ties counting half (Mann & Whitney 1947).

    Args:
        positive: scores of the positive examples, shape (p,), p > 0.
        negative: scores of the negative examples, shape (n,), n > 0.
    """
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([positive, negative]))
    wins = ranks[: len(positive)].sum() - len(positive) * (len(positive) + 1) / 2
    return float(wins / (len(positive) * len(negative)))


def measure_cut(positive: np.ndarray, negative: np.ndarray, cut: float) -> dict[str, float]:
    """Precision, recall and F1 of taking for good what scores at least `cut`; precision is 1 where nothing does."""
    right, wrong = int((positive >= cut).sum()), int((negative >= cut).sum())
    precision = right / (right + wrong) if right + wrong else 1.0
    return {"cut": float(cut), "precision": precision, "recall": right / len(positive),
            "f1": 2 * right / (right + wrong + len(positive))}  # fmt: skip


def best_cut(positive: np.ndarray, negative: np.ndarray) -> dict[str, float]:
    """The cut of the highest F1 among the scores, the highest such cut where several are as good."""
    cuts = np.unique(np.concatenate([positive, negative]))
    right = len(positive) - np.searchsorted(np.sort(positive), cuts, side="left")
    wrong = len(negative) - np.searchsorted(np.sort(negative), cuts, side="left")
    f1 = 2 * right / (right + wrong + len(positive))
    return measure_cut(positive, negative, float(cuts[np.flatnonzero(f1 == f1.max())[-1]]))


def measure_separation(
    positive: np.ndarray, negative: np.ndarray, cut: float | None, higher_is_better: bool
) -> dict[str, Any]:
    """AUC, what happens at the cut (None where there is no single one), and at the best one.

    Args:
        positive, negative: scores of good and other examples, neither empty.
        cut: the worst score that is kept.
        higher_is_better: false for perplexities, where a good document scores low.
    """
    sign = 1.0 if higher_is_better else -1.0
    at_cut = None if cut is None else measure_cut(sign * positive, sign * negative, sign * cut)
    found = {"at_cut": at_cut, "best": best_cut(sign * positive, sign * negative)}
    for measured in found.values():
        if measured is not None:
            measured["cut"] *= sign
    return {"auc": area_under_curve(sign * positive, sign * negative), **found}
