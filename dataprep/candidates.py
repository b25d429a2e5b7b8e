"""From equal keys to candidate pairs, without a bucket ever costing the square of its size.

Documents of equal text are joined to one of them, which alone stands for the text in its bucket. A bucket of at most
LARGEST_BUCKET different texts makes all pairs. In a larger one (a template, a licence) every text is paired with the
first and with the next one in the order of their digests: linear, and enough to connect them if they are alike; what
can be missed is a pair that is alike only with each other. Such buckets are counted and reported.
"""

from __future__ import annotations

import numpy as np

LARGEST_BUCKET = 64
"""Different texts of a bucket of which all pairs are compared: 2,016 pairs."""


def candidate_pairs(keys: np.ndarray, documents: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pair up documents with equal keys.

    Args:
        keys, texts: uint64 of shape (n,): the key, and what tells texts apart.
        documents: int64 of shape (n,).

    Returns:
        pairs: int64 of shape (m, 2), distinct, ascending, the smaller number first.
        oversized: int64, sizes (different texts) of the buckets that are larger than LARGEST_BUCKET.
    """
    order = np.lexsort((documents, texts, keys))
    keys, documents, texts = keys[order], documents[order], texts[order]
    first = np.ones(len(keys), bool)
    first[1:] = (keys[1:] != keys[:-1]) | (texts[1:] != texts[:-1])
    stands_for = documents[first][np.cumsum(first) - 1]
    copies = np.stack([stands_for[~first], documents[~first]], axis=1)
    alike, oversized = _pairs_in_buckets(keys[first], documents[first])
    return distinct_pairs(np.concatenate([copies, alike])), oversized


def distinct_pairs(pairs: np.ndarray) -> np.ndarray:
    """Pairs in ascending order, the smaller number first, each once and none of a number with itself."""
    pairs = np.sort(pairs, axis=1)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    new = np.ones(len(pairs), bool)
    new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    return pairs[new]


def _pairs_in_buckets(keys: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of documents with equal keys (sorted); one document per text and key."""
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.empty(0, np.int64)
    sizes = np.diff(np.append(starts, len(keys)))
    parts = [np.empty((0, 2), np.int64)]
    for size in np.unique(sizes[(sizes > 1) & (sizes <= LARGEST_BUCKET)]):
        left, right = np.triu_indices(size, 1)
        members = documents[starts[sizes == size, None] + np.arange(size)]
        parts.append(np.stack([members[:, left], members[:, right]], axis=-1).reshape(-1, 2))
    oversized = sizes > LARGEST_BUCKET
    for start, size in zip(starts[oversized], sizes[oversized]):
        members = documents[start : start + size]
        parts.append(np.stack([np.full(size - 1, members[0]), members[1:]], axis=1))
        parts.append(np.stack([members[:-1], members[1:]], axis=1))
    return np.concatenate(parts), sizes[oversized].astype(np.int64)
