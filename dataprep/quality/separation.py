"""Separation of good and other documents by a score."""

from __future__ import annotations

import numpy as np
from typing_extensions import TypedDict


def area_under_curve(positive: np.ndarray, negative: np.ndarray) -> float:
    """Exact AUC: probability that a positive scores above a negative, with ties counted
    half (Mann & Whitney 1947).

    Args:
        positive: scores of the positive examples, shape (p,), p > 0.
        negative: scores of the negative examples, shape (n,), n > 0.
    """
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([positive, negative]))
    wins = ranks[: len(positive)].sum() - len(positive) * (len(positive) + 1) / 2
    return float(wins / (len(positive) * len(negative)))


class CutQuality(TypedDict):
    """Quality of accepting documents up to a cut."""

    cut: float
    precision: float
    recall: float
    f1: float


class Separation(TypedDict):
    """Separation of good and other documents by a score.

    Attributes:
        at_cut: at the configured cut; None without a single cut.
        best: at the cut with the highest F1.
    """

    auc: float
    at_cut: CutQuality | None
    best: CutQuality


def measure_cut(positive: np.ndarray, negative: np.ndarray, cut: float) -> CutQuality:
    """Precision, recall and F1 of accepting scores of at least `cut`; precision is 1 if
    nothing is accepted.
    """
    true_positives = int((positive >= cut).sum())
    false_positives = int((negative >= cut).sum())
    precision = (
        true_positives / (true_positives + false_positives)
        if true_positives + false_positives
        else 1.0
    )
    return {
        "cut": float(cut),
        "precision": precision,
        "recall": true_positives / len(positive),
        "f1": 2 * true_positives / (true_positives + false_positives + len(positive)),
    }


def best_cut(positive: np.ndarray, negative: np.ndarray) -> CutQuality:
    """Cut with the highest F1 among the scores; the highest such cut if several are
    equal.
    """
    cuts = np.unique(np.concatenate([positive, negative]))
    true_positives = len(positive) - np.searchsorted(
        np.sort(positive), cuts, side="left"
    )
    false_positives = len(negative) - np.searchsorted(
        np.sort(negative), cuts, side="left"
    )
    f1 = 2 * true_positives / (true_positives + false_positives + len(positive))
    return measure_cut(
        positive, negative, float(cuts[np.flatnonzero(f1 == f1.max())[-1]])
    )


def measure_separation(
    positive: np.ndarray,
    negative: np.ndarray,
    cut: float | None,
    higher_is_better: bool,
) -> Separation:
    """Measure the separation.

    Args:
        positive, negative: scores of good and other examples, neither empty.
        cut: the worst score that is kept.
        higher_is_better: False for perplexities, for which good documents score low.
    """
    sign = 1.0 if higher_is_better else -1.0
    at_cut = (
        None
        if cut is None
        else measure_cut(sign * positive, sign * negative, sign * cut)
    )
    best = best_cut(sign * positive, sign * negative)
    for measured in (at_cut, best):
        if measured is not None:
            measured["cut"] *= sign
    return {
        "auc": area_under_curve(sign * positive, sign * negative),
        "at_cut": at_cut,
        "best": best,
    }


class DistilledAgreement(Separation):
    """Agreement of a classifier with the judge that it was distilled from, on held-out
    documents.

    Attributes:
        sample: documents that the judge scored.
        good: good ones of these.
        learnt: documents that the classifier was trained on.
        held_out: documents that all figures are of.
        confusion: at the cut.
        calibration: see `distil_classifier.calibrate`.
    """

    sample: int
    good: int
    learnt: int
    held_out: int
    confusion: dict[str, int]
    calibration: list[dict[str, float]]
