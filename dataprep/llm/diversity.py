"""Diversity of generated texts and of their parents, measured on a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypedDict

import numpy as np

from gristmill.core.seeds import seeded_key

SAMPLE_TEXTS = 1000
"""Texts that are compared: the first by the hash of their ids."""
PAIRS = 2000
WORDS = 2000
"""Words of each text."""
SHINGLE = 3


class Diversity(TypedDict, total=False):
    """Diversity of generated texts; similarities are means of Jaccard similarities of
    3-grams of words.

    Attributes:
        sampled: number of texts; without any, all other keys are missing.
        characters: 10th, 50th and 90th percentile.
        distinct: per n of 1, 2, 3 the share of distinct n-grams of words (Li et al.
            2016).
        self_similarity: of two texts.
        parent_similarity: of a text and its parent.
        parent_self_similarity: of two parents.
    """

    sampled: int
    characters: list[int]
    distinct: dict[str, float | None]
    self_similarity: float | None
    parent_similarity: float | None
    parent_self_similarity: float | None


def describe(texts: Sequence[str], parents: Sequence[str]) -> Diversity:
    """Diversity statistics of texts.

    Args:
        texts: n generated texts.
        parents: n texts that they were generated from.
    """
    if not texts:
        return {"sampled": 0}
    words, parent_words = (
        [text.lower().split()[:WORDS] for text in group] for group in (texts, parents)
    )
    shingles, parent_shingles = _shingles(words), _shingles(parent_words)
    distinct: dict[str, float | None] = {}
    for n in (1, 2, 3):
        grams = [gram for text_words in words for gram in _ngrams(text_words, n)]
        distinct[str(n)] = len(set(grams)) / len(grams) if grams else None
    generator = np.random.default_rng(seeded_key("diversity", len(texts)))
    pairs = generator.integers(0, len(texts), (PAIRS, 2))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]].tolist()
    lengths = np.percentile([len(text) for text in texts], (10, 50, 90))
    return {
        "sampled": len(texts),
        "characters": lengths.astype(int).tolist(),
        "distinct": distinct,
        "self_similarity": _mean(
            [_jaccard(shingles[first], shingles[second]) for first, second in pairs]
        ),
        "parent_similarity": _mean(
            [_jaccard(*pair) for pair in zip(shingles, parent_shingles, strict=True)]
        ),
        "parent_self_similarity": _mean(
            [
                _jaccard(parent_shingles[first], parent_shingles[second])
                for first, second in pairs
                if parents[first] != parents[second]
            ]
        ),
    }


def _shingles(words: Sequence[Sequence[str]]) -> list[set[int]]:
    return [
        set(map(hash, _ngrams(text_words, SHINGLE))) or {hash(tuple(text_words))}
        for text_words in words
    ]


def _ngrams(words: Sequence[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[offset:] for offset in range(n)), strict=False)


def _jaccard(first: set[int], second: set[int]) -> float:
    return len(first & second) / max(len(first | second), 1)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
