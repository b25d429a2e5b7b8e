"""Distributions of measured values that add up over shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Histogram = dict[str, list[Any]]
"""`edges`, ascending, and `counts`, one more: below the first edge, between two (the lower one included), above."""

SHARE_EDGES = [round(0.02 * step, 2) for step in range(51)]
COUNT_EDGES = [0, *(2**power for power in range(21))]
LENGTH_EDGES = [0.5 * step for step in range(41)]


def histogram(values: np.ndarray, edges: Sequence[float]) -> Histogram:
    """Count values between edges; NaN is not counted."""
    bins = np.searchsorted(np.asarray(edges, np.float64), values[~np.isnan(values)], side="right")
    return {"edges": list(edges), "counts": np.bincount(bins, minlength=len(edges) + 1).tolist()}


def add_histograms(parts: Iterable[Mapping[str, Histogram]]) -> dict[str, Histogram]:
    """Add histograms of the same edges, name by name."""
    total: dict[str, Histogram] = {}
    for part in parts:
        for name, added in part.items():
            before = total.get(name, {"edges": added["edges"], "counts": [0] * len(added["counts"])})
            counts = [a + b for a, b in zip(before["counts"], added["counts"], strict=True)]
            total[name] = {"edges": added["edges"], "counts": counts}
    return total


def add_by_source(parts: Iterable[Mapping[str, Mapping[str, Histogram]]]) -> dict[str, dict[str, Histogram]]:
    """Add histograms source by source and name by name; the sources in the order of their names."""
    total: dict[str, dict[str, Histogram]] = {}
    for part in parts:
        for source, added in part.items():
            total[source] = add_histograms([total.get(source, {}), added])
    return dict(sorted(total.items()))
