"""Semantic duplicates within a cluster, by exact cosines of each document with the kept
ones.
"""

from __future__ import annotations

import math

import numpy as np

GRID = 1_000
"""Cosines are rounded to thousandths before they are compared with a threshold."""
BLOCK = 1_024
KEPT_AT_ONCE = 16_384
"""Kept rows that BLOCK rows are compared with at a time: 67 MB of cosines."""


def survivors_in_order(
    vectors: np.ndarray, threshold: float
) -> tuple[np.ndarray, np.ndarray]:
    """Choose survivors among n documents, sorted from best to worst.

    A document is dropped if a better kept document reaches the threshold, and the best
    such document is its survivor; otherwise it is kept and its own survivor. No two
    kept documents reach the threshold.

    Args:
        vectors: float16 of shape (n, dim), of length 1 or all zeros; a zero vector is
            not similar to any.
        threshold: least cosine.

    Returns:
        the survivor of each document, int64 of shape (n,); and the cosine with it,
        rounded to thousandths, float64, 1 for a kept document.
    """
    # the least cosine that, rounded to thousandths, reaches the threshold
    least = (math.ceil(threshold * GRID - 1e-6) - 0.5) / GRID
    survivor = np.arange(len(vectors))
    cosine = np.ones(len(vectors))
    kept = np.empty(0, np.int64)
    for begin in range(0, len(vectors), BLOCK):
        rows = np.arange(begin, min(begin + BLOCK, len(vectors)))
        rows = rows[vectors[rows].any(axis=1)]
        for first in range(0, len(kept), KEPT_AT_ONCE):
            kept_rows = kept[first : first + KEPT_AT_ONCE]
            cosines = _products(vectors, rows, kept_rows)
            is_similar = cosines >= least
            column = is_similar.argmax(axis=1)
            is_dropped = is_similar.any(axis=1)
            survivor[rows[is_dropped]] = kept_rows[column[is_dropped]]
            cosine[rows[is_dropped]] = cosines[is_dropped, column[is_dropped]]
            rows = rows[~is_dropped]
        cosines = np.tril(_products(vectors, rows, rows), -1)
        is_similar = np.tril(cosines >= least, -1)
        is_kept = np.ones(len(rows), bool)
        for row in np.flatnonzero(is_similar.any(axis=1)):
            better = np.flatnonzero(is_similar[row] & is_kept)
            if len(better):
                is_kept[row] = False
                survivor[rows[row]], cosine[rows[row]] = (
                    rows[better[0]],
                    cosines[row, better[0]],
                )
        kept = np.concatenate([kept, rows[is_kept]])
    return survivor, np.minimum(np.round(cosine, 3), 1.0)


def _products(vectors: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Cosines of all pairs of `rows` and `columns`: float32."""
    return vectors[rows].astype(np.float32) @ vectors[columns].astype(np.float32).T
