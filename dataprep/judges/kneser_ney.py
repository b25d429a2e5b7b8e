"""Training an n-gram model: interpolated modified Kneser-Ney smoothing (Chen & Goodman 1999), as KenLM's lmplz does.

Counts are of hashes of word sequences, in sorted arrays: the result depends on the multiset of sentences alone. The
highest order, and what begins a sentence, is counted by occurrences; all else by how many different words stand
before it. Three discounts per order, for counts of 1, 2, and 3 or more, follow from the counts of counts; where these
are too few to say (one is 0, or a discount leaves its range), they are 0.5, 1 and 1.5 (lmplz --discount_fallback).

lmplz itself cannot be installed by package files: kenlm's package on PyPI has the scorer alone (its source archive
leaves lm/builder out), Debian has no package, and a build of the repository needs Boost. So that a manifest gives the
same model everywhere, models are trained here; what KenLM makes of the same entries is the tests' referee.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.judges.ngram_tables import BEGIN, END, UNKNOWN, Entries, extend, next_word, word_hash
from gristmill.dataprep.text.kernels import kernel, text_buffers

FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)
IMPOSSIBLE = -99.0
"""log10 of the probability of `<s>`, which is never predicted (SRILM's and KenLM's value)."""


class Sentences(NamedTuple):
    """Sentences, each between BEGIN and END.

    Attributes:
        words: uint64 of shape (n,).
        positions: int64 of shape (n,), place within the sentence, 0 for BEGIN.
    """

    words: np.ndarray
    positions: np.ndarray


class _Counted(NamedTuple):
    """The n-grams of one order, by ascending key: how often each occurs, and where its parts are an order below."""

    keys: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    suffixes: np.ndarray
    initial: np.ndarray


def read_sentences(texts: pa.Array | pa.ChunkedArray) -> Sentences:
    """The lines of some texts that have words."""
    return Sentences(*_sentences(*text_buffers(texts)))


def train_entries(sentences: Sentences, order: int) -> list[Entries]:
    """Train a model: the entries of orders 1 to `order`.

    Args:
        sentences: at least one.
        order: words in the longest sequences, at least 2.
    """
    counted = _count_orders(sentences, order)
    adjusted = [_adjust(low, high) for low, high in zip(counted, [*counted[1:], None], strict=True)]
    adjusted[0][np.searchsorted(counted[0].keys, BEGIN)] = 0
    entries: list[Entries] = []
    below = np.empty(0)
    for number, (part, counts) in enumerate(zip(counted, adjusted, strict=True)):
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        if number == 0:
            vocabulary = len(part.keys)  # less BEGIN, and UNKNOWN besides
            left = discounts.sum() / counts.sum()
            probabilities = (counts - discounts) / counts.sum() + left / vocabulary
            unknown = left / vocabulary
        else:
            sums = np.bincount(part.contexts, counts, len(counted[number - 1].keys))
            seen = sums > 0
            weights = np.where(seen, np.bincount(part.contexts, discounts, len(sums)) / np.where(seen, sums, 1), 1.0)
            entries[-1].backoffs[: len(weights)] = np.log10(weights)
            probabilities = (counts - discounts) / sums[part.contexts] + weights[part.contexts] * below[part.suffixes]
        below = probabilities
        logs = np.where(counts > 0, np.log10(np.maximum(probabilities, 1e-99)), IMPOSSIBLE)
        entries.append(Entries(part.keys, logs.astype(np.float32), np.zeros(len(part.keys), np.float32)))
    return [_with_unknown(entries[0], unknown), *entries[1:]]


def _with_unknown(entries: Entries, probability: float) -> Entries:
    unknown = (np.array([UNKNOWN]), np.array([np.log10(probability)], np.float32), np.zeros(1, np.float32))
    return Entries(*(np.concatenate(pair) for pair in zip(entries, unknown, strict=True)))


def _count_orders(sentences: Sentences, order: int) -> list[_Counted]:
    words, positions = sentences
    counted: list[_Counted] = []
    chain = words
    for number in range(order):
        longer = words if number == 0 else _extend_all(chain, words)
        ends = np.flatnonzero(positions >= number)
        keys, first, counts = np.unique(longer[ends], return_index=True, return_counts=True)
        places = ends[first]
        contexts = suffixes = np.zeros(0, np.int64)
        if number:
            contexts = np.searchsorted(counted[-1].keys, chain[places - 1])
            suffixes = np.searchsorted(counted[-1].keys, chain[places])
        counted.append(_Counted(keys, counts, contexts, suffixes, positions[places] == number))
        chain = longer
    return counted


def _adjust(part: _Counted, above: _Counted | None) -> np.ndarray:
    """What Kneser-Ney counts: different words before it, or occurrences where no word can be (int64)."""
    if above is None:
        return part.counts.copy()
    before = np.bincount(above.suffixes, minlength=len(part.keys))
    return np.where(part.initial, part.counts, before)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """What is taken off counts of 0, 1, 2, and 3 or more (Chen & Goodman 1999, equation 26)."""
    of_counts = np.bincount(np.minimum(counts, 5), minlength=6).astype(np.float64)
    one, two = of_counts[1], of_counts[2]
    if of_counts[1:5].all():
        scale = one / (one + 2 * two)
        found = [k - (k + 1) * scale * of_counts[k + 1] / of_counts[k] for k in (1, 2, 3)]
        if all(0 <= discount <= k for k, discount in enumerate(found, 1)):
            return np.array([0.0, *found])
    return np.array([0.0, *FALLBACK_DISCOUNTS])


@kernel
def _extend_all(chain: np.ndarray, words: np.ndarray) -> np.ndarray:
    longer = np.zeros(len(words), np.uint64)
    for at in range(1, len(words)):
        longer[at] = extend(chain[at - 1], words[at])
    return longer


@kernel
def _sentences(data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    most = 2 * (offsets[-1] - offsets[0]) + 2
    words, positions = np.empty(most, np.uint64), np.empty(most, np.int64)
    count = 0
    for text in range(len(offsets) - 1):
        at, end = offsets[text], offsets[text + 1]
        while at < end:
            begin, at, found = next_word(data, at, end)
            position = 0
            while found:
                if position == 0:
                    words[count], positions[count] = BEGIN, 0
                    count, position = count + 1, 1
                words[count], positions[count] = word_hash(data, begin, at), position
                count, position = count + 1, position + 1
                begin, at, found = next_word(data, at, end)
            if position:
                words[count], positions[count] = END, position
                count += 1
            at += 1
    return words[:count].copy(), positions[:count].copy()
