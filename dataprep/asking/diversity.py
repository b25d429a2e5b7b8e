"""How diverse generated texts are, beside the texts that they were made from; measured on a sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gristmill.dataprep.seeds import seeded_key

SAMPLE_TEXTS = 1000
"""Texts that are compared; the first of them by the hash of their ids."""
PAIRS = 2000
WORDS = 2000
"""Of each text."""
SHINGLE = 3


def describe(texts: Sequence[str], parents: Sequence[str]) -> dict[str, Any]:
    """What a sample says of texts.

    Args:
        texts: n generated texts.
        parents: n texts that they were made from.

    Returns:
        `characters`: the 10th, 50th and 90th percentile; `distinct`: per n of 1, 2, 3 the share of n-grams of words
        that are not repeated ones (Li et al. 2016), over all texts; `self_similarity`: mean Jaccard similarity of the
        3-grams of two texts; `parent_similarity`: of a text and its parent; `parent_self_similarity`: of two parents.
    """
    if not texts:
        return {"sampled": 0}
    words = [text.lower().split()[:WORDS] for text in texts]
    shingles, of_parents = _shingles(words), _shingles([text.lower().split()[:WORDS] for text in parents])
    distinct = {}
    for n in (1, 2, 3):
        grams = [gram for one in words for gram in zip(*(one[at:] for at in range(n)), strict=False)]
        distinct[str(n)] = len(set(grams)) / len(grams) if grams else None
    generator = np.random.default_rng(seeded_key("diversity", len(texts)))
    pairs = generator.integers(0, len(texts), (PAIRS, 2))
    apart = [(one, other) for one, other in pairs.tolist() if one != other]
    return {
        "sampled": len(texts),
        "characters": [int(value) for value in np.percentile([len(text) for text in texts], (10, 50, 90))],
        "distinct": distinct,
        "self_similarity": _mean([_jaccard(shingles[one], shingles[other]) for one, other in apart]),
        "parent_similarity": _mean([_jaccard(*both) for both in zip(shingles, of_parents, strict=True)]),
        "parent_self_similarity": _mean(
            [_jaccard(of_parents[one], of_parents[other]) for one, other in apart if parents[one] != parents[other]]
        ),
    }


def _shingles(words: Sequence[Sequence[str]]) -> list[set[int]]:
    return [
        {hash(gram) for gram in zip(*(one[at:] for at in range(SHINGLE)), strict=False)} or {hash(tuple(one))}
        for one in words
    ]


def _jaccard(one: set[int], other: set[int]) -> float:
    return len(one & other) / max(len(one | other), 1)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
