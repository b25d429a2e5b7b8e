"""Training of n-gram models: interpolated modified Kneser-Ney smoothing (Chen & Goodman
1999), as KenLM's lmplz.

Counts are of hashes of word sequences, in sorted arrays: the result depends only on the
multiset of sentences. The highest order and sequences at the beginning of a sentence
are counted by occurrences; all others by the number of distinct words before them.
Three discounts per order, for counts of 1, 2, and 3 or more, are derived from the
counts of counts; if these are insufficient (one is 0, or a discount leaves its range),
they are 0.5, 1 and 1.5 (lmplz --discount_fallback).

lmplz cannot be installed from packages: kenlm on PyPI has only the scorer (its source
archive omits lm/builder), Debian has no package, and building the repository needs
Boost. Training here gives the same model on every machine; the tests compare with
KenLM's results for the same entries.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.quality.ngram_tables import (
    BEGIN,
    UNKNOWN,
    Entries,
    extend,
    split_sentences,
)
from gristmill.dataprep.text.kernels import kernel, text_buffers

FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
IMPOSSIBLE = -99.0
"""log10 probability of `<s>`, which is never predicted (value of SRILM and KenLM)."""


class Sentences(NamedTuple):
    """Sentences, each between BEGIN and END.

    Attributes:
        words: uint64 of shape (n,).
        positions: int64 of shape (n,), index within the sentence, 0 for BEGIN.
    """

    words: np.ndarray
    positions: np.ndarray


class _OrderCounts(NamedTuple):
    """N-grams of one order by ascending key: their counts, and the indices of their
    parts in the order below.
    """

    keys: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    suffixes: np.ndarray
    initial: np.ndarray


def read_sentences(texts: pa.Array | pa.ChunkedArray) -> Sentences:
    """Sentences from the lines of texts, without lines that have no words."""
    words, positions, _ = split_sentences(*text_buffers(texts))
    return Sentences(words, positions)


def train_entries(sentences: Sentences, order: int) -> list[Entries]:
    """Train a model: the entries of orders 1 to `order`.

    Args:
        sentences: at least one.
        order: words in the longest sequences, at least 2.
    """
    counts_by_order = _count_orders(sentences, order)
    # Kneser-Ney counts: distinct preceding words, or occurrences for sequences that begin
    # a sentence
    adjusted = [
        np.where(
            part.initial,
            part.counts,
            np.bincount(higher.suffixes, minlength=len(part.keys)),
        )
        for part, higher in pairwise(counts_by_order)
    ]
    adjusted.append(counts_by_order[-1].counts.copy())
    adjusted[0][np.searchsorted(counts_by_order[0].keys, BEGIN)] = 0
    entries: list[Entries] = []
    lower = np.empty(0)
    for number, (part, counts) in enumerate(
        zip(counts_by_order, adjusted, strict=True)
    ):
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        if number == 0:
            vocabulary = len(part.keys)  # without BEGIN, plus UNKNOWN
            free_mass = discounts.sum() / counts.sum()
            probabilities = (counts - discounts) / counts.sum() + free_mass / vocabulary
            unknown = free_mass / vocabulary
        else:
            sums = np.bincount(
                part.contexts, counts, len(counts_by_order[number - 1].keys)
            )
            is_context = sums > 0
            weights = np.where(
                is_context,
                np.bincount(part.contexts, discounts, len(sums))
                / np.where(is_context, sums, 1),
                1.0,
            )
            entries[-1].backoffs[: len(weights)] = np.log10(weights)
            probabilities = (counts - discounts) / sums[part.contexts] + weights[
                part.contexts
            ] * lower[part.suffixes]
        lower = probabilities
        logs = np.where(
            counts > 0, np.log10(np.maximum(probabilities, 1e-99)), IMPOSSIBLE
        )
        entries.append(
            Entries(
                part.keys, logs.astype(np.float32), np.zeros(len(part.keys), np.float32)
            )
        )
    mark = (
        np.array([UNKNOWN]),
        np.array([np.log10(unknown)], np.float32),
        np.zeros(1, np.float32),
    )
    pairs = zip(entries[0], mark, strict=True)
    entries[0] = Entries(*(np.concatenate(pair) for pair in pairs))
    return entries


def _count_orders(sentences: Sentences, order: int) -> list[_OrderCounts]:
    words, positions = sentences
    counts_by_order: list[_OrderCounts] = []
    chain = words
    for number in range(order):
        longer = words if number == 0 else _extend_all(chain, words)
        ends = np.flatnonzero(positions >= number)
        keys, first_indices, counts = np.unique(
            longer[ends], return_index=True, return_counts=True
        )
        places = ends[first_indices]
        contexts = suffixes = np.zeros(0, np.int64)
        if number:
            contexts = np.searchsorted(counts_by_order[-1].keys, chain[places - 1])
            suffixes = np.searchsorted(counts_by_order[-1].keys, chain[places])
        counts_by_order.append(
            _OrderCounts(keys, counts, contexts, suffixes, positions[places] == number)
        )
        chain = longer
    return counts_by_order


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts of counts of 0, 1, 2, and 3 or more (Chen & Goodman 1999, equation
    26).
    """
    counts_of_counts = np.bincount(np.minimum(counts, 5), minlength=6).astype(
        np.float64
    )
    n1 = counts_of_counts[1]
    n2 = counts_of_counts[2]
    if counts_of_counts[1:5].all():
        scale = n1 / (n1 + 2 * n2)
        discounts = [
            k - (k + 1) * scale * counts_of_counts[k + 1] / counts_of_counts[k]
            for k in (1, 2, 3)
        ]
        if all(0 <= discount <= k for k, discount in enumerate(discounts, 1)):
            return np.array([0.0, *discounts])
    return np.array([0.0, *FALLBACK_DISCOUNTS])


@kernel
def _extend_all(chain: np.ndarray, words: np.ndarray) -> np.ndarray:
    longer = np.zeros(len(words), np.uint64)
    for index in range(1, len(words)):
        longer[index] = extend(chain[index - 1], words[index])
    return longer
