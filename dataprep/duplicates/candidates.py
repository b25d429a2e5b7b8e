"""From equal keys to candidate pairs, without a bucket ever costing the square of its size.

Documents of equal text are joined to that with the smallest id, which alone stands for the text in its bucket. A
bucket of at most LARGEST_BUCKET different texts makes all pairs. In a larger one (a template, a licence) every text is
paired with the first and with the next one in the order of their digests: linear, and enough to connect them if they
are alike; what can be missed is a pair that is alike only with each other. Such buckets are counted and reported.

Of an older corpus, which is not to be deduplicated again, documents are paired with new ones only. They stand for
their texts and come first in their buckets, so that every new text is compared with one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

LARGEST_BUCKET = 64
"""Different texts of a bucket of which all pairs are compared: 2,016 pairs."""


@dataclass(frozen=True)
class Bucket:
    """A bucket with more than LARGEST_BUCKET texts.

    Attributes:
        key: the key that its documents share.
        size: how many different texts it has.
        example: the document with the smallest id of those whose text has the smallest digest.
    """

    key: int
    size: int
    example: int


@dataclass(frozen=True)
class Candidates:
    """What the keys of one partition give.

    Attributes:
        pairs: int64 of shape (m, 2), distinct, ascending: new document first, and that with the smaller id.
        oversized: the buckets of which not all pairs are there.
    """

    pairs: np.ndarray
    oversized: list[Bucket] = field(default_factory=list)


def candidate_pairs(
    keys: np.ndarray, documents: np.ndarray, texts: np.ndarray, ranks: np.ndarray, num_new: int
) -> Candidates:
    """Pair up documents with equal keys, but for pairs of two old ones.

    Which pairs there are depends on keys, texts and the order of the ids alone.

    Args:
        keys, texts: uint64 of shape (n,): the key, and what tells texts apart.
        documents, ranks: int64 of shape (n,): the document, and its place in the order of all ids.
        num_new: documents from this number on are old.
    """
    is_new = documents < num_new
    order = np.lexsort((ranks, is_new, texts, keys))
    keys, documents, texts, ranks = keys[order], documents[order], texts[order], ranks[order]
    is_new = is_new[order]
    first = np.ones(len(keys), bool)
    first[1:] = (keys[1:] != keys[:-1]) | (texts[1:] != texts[:-1])
    standing = np.flatnonzero(first)
    copies = np.stack([standing[np.cumsum(first) - 1], np.arange(len(keys))], axis=1)[~first]
    # Within a bucket: old texts first, then in the order of their digests.
    standing = standing[np.lexsort((texts[standing], is_new[standing], keys[standing]))]
    pairs, oversized = _pairs_in_buckets(keys[standing])
    pairs = np.concatenate([copies, standing[pairs]])
    pairs = pairs[is_new[pairs].any(axis=1)]
    turned = np.lexsort((ranks[pairs], ~is_new[pairs]), axis=1)
    pairs = documents[np.take_along_axis(pairs, turned, axis=1)]
    return Candidates(
        distinct_pairs(pairs),
        [Bucket(int(keys[standing[at]]), size, int(documents[standing[at]])) for at, size in oversized],
    )


def distinct_pairs(pairs: np.ndarray) -> np.ndarray:
    """Pairs (int64 of shape (n, 2)) in ascending order, each once."""
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    new = np.ones(len(pairs), bool)
    new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    return pairs[new]


def shared_keys(keys: np.ndarray) -> np.ndarray:
    """Positions of the keys that occur more than once; most do not, and need no further sorting."""
    order = np.argsort(keys)
    same = keys[order[1:]] == keys[order[:-1]]
    shared = np.zeros(len(keys), bool)
    shared[1:] |= same
    shared[:-1] |= same
    return order[shared]


def _pairs_in_buckets(keys: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Pairs of positions with equal keys (sorted); and (begin, size) of the oversized buckets."""
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.empty(0, np.int64)
    sizes = np.diff(np.append(starts, len(keys)))
    parts = [np.empty((0, 2), np.int64)]
    for size in np.unique(sizes[(sizes > 1) & (sizes <= LARGEST_BUCKET)]):
        left, right = np.triu_indices(size, 1)
        members = starts[sizes == size, None] + np.arange(size)
        parts.append(np.stack([members[:, left], members[:, right]], axis=-1).reshape(-1, 2))
    oversized = sizes > LARGEST_BUCKET
    for start, size in zip(starts[oversized], sizes[oversized]):
        members = start + np.arange(size)
        parts.append(np.stack([np.full(size - 1, members[0]), members[1:]], axis=1))
        parts.append(np.stack([members[:-1], members[1:]], axis=1))
    return np.concatenate(parts), list(zip(starts[oversized].tolist(), sizes[oversized].tolist(), strict=True))
