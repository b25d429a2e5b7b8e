"""Thresholds turned into verdicts. A rule is named after its set and threshold: `gopher_quality/min_words`.

A threshold `min_x` or `max_x` bounds the statistic x; the bound itself passes, and so does a statistic that is NaN. A
threshold that is null bounds nothing. Rules are tried in the order in which the manifest's schema declares them, and
the first one that a document fails is the reason why it is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel


def failures(statistics: Mapping[str, np.ndarray], thresholds: Mapping[str, BaseModel]) -> dict[str, np.ndarray]:
    """Which documents fail which rule.

    Args:
        statistics: name -> values of shape (n,).
        thresholds: rule set -> its section; its fields `min_x` and `max_x` are thresholds, the others are options.

    Returns:
        rule -> bool of shape (n,), in the order of the rules.
    """
    failed: dict[str, np.ndarray] = {}
    for rule_set, bounds in thresholds.items():
        for threshold, (side, statistic) in bounded_statistics(type(bounds)).items():
            values, bound = statistics[statistic], getattr(bounds, threshold)
            if bound is not None:
                failed[f"{rule_set}/{threshold}"] = values < bound if side == "min" else values > bound
    return failed


def bounded_statistics(section: type[BaseModel]) -> dict[str, tuple[str, str]]:
    """The thresholds among a section's fields: name -> (`min` or `max`, statistic)."""
    parts = {name: name.partition("_") for name in section.model_fields}
    return {name: (side, statistic) for name, (side, _, statistic) in parts.items() if side in ("min", "max")}


def first_failures(failed: Mapping[str, np.ndarray], documents: int) -> list[str | None]:
    """The first rule that each of n documents fails, or None."""
    reasons: list[str | None] = [None] * documents
    for rule, mask in failed.items():
        for row in np.flatnonzero(mask):
            reasons[row] = reasons[row] or rule
    return reasons


def count_failures(failed: Mapping[str, np.ndarray]) -> dict[str, dict[str, int]]:
    """Per rule: how many documents fail it (`failing`), and how many fail it and no other (`only`)."""
    if not failed:
        return {}
    number_failed: Sequence[int] | np.ndarray = np.sum(list(failed.values()), axis=0)
    return {
        rule: {"failing": int(mask.sum()), "only": int((mask & (number_failed == 1)).sum())}
        for rule, mask in failed.items()
    }
