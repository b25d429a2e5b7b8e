"""Metrics of tasks from scores of answers, by the definitions of lm-evaluation-harness
0.4.13.

Every function returns metric -> (n,) values per item, from which means, errors and
intervals are computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gristmill.dataprep.user_functions import blaming, call_own, load_own, wrong
from gristmill.mixtures.schema.evaluation import OwnMetric
from gristmill.train.eval.likelihood import Score
from gristmill.train.eval.tasks import Item

PerItem = dict[str, np.ndarray]


def choice_metrics(items: Sequence[Item], scores: Sequence[Sequence[Score]]) -> PerItem:
    """acc (largest sum), acc_norm (per character), acc_bytes (per UTF-8 byte),
    acc_token (per token), brier.

    Ties go to the first choice. Brier is the sum over the choices of (share - right)^2,
    between 0 and 2; a choice's share is the softmax of the sums (all choices of an item
    together are 1).
    """
    values_by_metric: dict[str, list[float]] = {
        name: [] for name in ("acc", "acc_norm", "acc_bytes", "acc_token", "brier")
    }
    for item, answered in zip(items, scores, strict=True):
        sums = np.array([score.logp for score in answered])
        lengths = {
            "acc": np.ones(len(sums)),
            "acc_norm": np.array([len(text) for text in item.answers]),
            "acc_bytes": np.array([len(text.encode()) for text in item.answers]),
            "acc_token": np.array([score.tokens for score in answered]),
        }
        for name, length in lengths.items():
            values_by_metric[name].append(
                float(np.argmax(sums / np.maximum(length, 1)) == item.right)
            )
        shares = np.exp(sums - sums.max())
        shares /= shares.sum()
        values_by_metric["brier"].append(
            float(((shares - np.eye(len(sums))[item.right]) ** 2).sum())
        )
    return {name: np.array(values) for name, values in values_by_metric.items()}


def bits_per_byte(sums: np.ndarray) -> np.ndarray:
    """Bits per byte from sums or means (..., 3) of log-probability, UTF-8 bytes and
    words.
    """
    return -sums[..., 0] / sums[..., 1] / math.log(2.0)


def generation_metrics(
    names: Sequence[str], items: Sequence[Item], answers: Sequence[str]
) -> PerItem:
    """Metrics of answers; the best of an item's references counts."""
    return {
        name: np.array(
            [
                max(
                    answer_metric(name, answer, reference) for reference in item.answers
                )
                for item, answer in zip(items, answers, strict=True)
            ],
            dtype=np.float64,
        )
        for name in names
    }


def own_metric(
    metric: OwnMetric, items: Sequence[Item], answers: Sequence[str]
) -> np.ndarray | float:
    """Values of a user's metric: (n,) per item, or one number for all.

    Raises:
        OwnCodeError: the function fails, or returns another shape or a number that is
            not finite.
    """
    function = load_own(metric, "predictions", "references")
    references = [list(item.answers) for item in items]
    returned = call_own(metric, function, list(answers), references)
    with blaming(metric.use):
        values = np.asarray(returned, dtype=np.float64)
    if values.shape not in ((), (len(items),)):
        raise wrong(
            metric,
            f"returned values of shape {values.shape} for {len(items)} items; return "
            "a number, or a list with one for each item",
        )
    invalid = np.flatnonzero(~np.isfinite(values))
    if len(invalid):
        where = f" for item {invalid[0] + 1}" if values.shape else ""
        raise wrong(
            metric, f"returned {values.flat[invalid[0]]}{where}; return finite numbers"
        )
    return values if values.shape else float(values)


def answer_metric(name: str, answer: str, reference: str) -> float:
    """Return `exact_match`, `contains` or `f1` of one answer and a reference: 0 to 1.

    Raises:
        ValueError: no such metric.
    """
    if name == "exact_match":
        return float(answer.strip() == reference.strip())
    if name == "contains":
        return float(reference.strip() in answer)
    if name != "f1":
        raise ValueError(f"there is no metric {name!r} of an answer and a reference")
    # F1 over lower-cased words, as multisets (SQuAD, without its removal of articles
    # and punctuation).
    ours = answer.lower().split()
    theirs = reference.lower().split()
    common = sum(min(ours.count(word), theirs.count(word)) for word in set(ours))
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0
