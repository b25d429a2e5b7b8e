"""How far any beginning of the training order is from the mixture: the bound that `order.py` states, and what is met.

Which source is at which place is the same in every epoch and for every seed, so it is known when the rows are planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gristmill.dataprep.kernels import kernel
from gristmill.tokenize.order_kernels import rank_row


def describe_prefixes(sources: Sequence[str], stages: Sequence[Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Each source's `largest_drift_rows`, over the beginnings of all stages, and its `bound_rows`.

    A drift is the difference of the rows that the first k places of a stage have of a source, and k times its share of
    the stage's rows. Rows that were emptied count as they were laid out.

    Args:
        sources: names, in order.
        stages: rows of each source, for every stage.
    """
    drifts, bounds = np.zeros(len(sources)), np.zeros(len(sources))
    for rows in stages:
        counts = np.array(rows, dtype=np.int64)
        shares, number = counts / max(1, counts.sum()), np.count_nonzero(counts)
        bound = np.where(counts > 0, (1 - shares) / 2 + shares * (number - 1) / 2, 0.0)
        drifts, bounds = np.maximum(drifts, largest_drifts(counts)), np.maximum(bounds, bound)
    return {name: {"largest_drift_rows": round(drift, 4), "bound_rows": round(bound, 4)}
            for name, drift, bound in zip(sources, drifts.tolist(), bounds.tolist(), strict=True)}


@kernel
def largest_drifts(counts: np.ndarray) -> np.ndarray:
    """The largest drift of each source over all beginnings of the merged order (float64 of shape (S,), rows).

    A source is ahead most just behind one of its rows, and behind most just before one, or at the end.

    Args:
        counts: int64 of shape (S,), rows of each source.
    """
    total, drifts = counts.sum(), np.zeros(len(counts))
    for source in range(len(counts)):
        largest = np.int64(0)
        for row in range(counts[source]):
            # Both products may wrap; their difference, which is small, is exact all the same.
            before = row * total - rank_row(counts, source, row) * counts[source]
            largest = max(largest, -before, before + total - counts[source])
        drifts[source] = largest / max(1, total)
    return drifts
