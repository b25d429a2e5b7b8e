"""Sets of word n-grams, hashed to 32 bits each, for near-duplicate detection.

- word: a maximal run of code points that `\\w` matches in a regular expression
  (`str.isalnum()` or `_`), each replaced by its lower case (U+0130, whose lower case is
  two code points, stays). In scripts that are written without spaces
  (`unicode_tables.UNSPACED_RANGES`) each such code point is a word. Text is not
  normalised: composed and decomposed accents differ.
- shingle: n consecutive words (Broder 1997). A text with fewer words has one shingle of
  all its words; a text without words has no shingles and is never a near duplicate.

Among k shingles about k^2 / 2^33 pairs share a hash by chance: one in a text of a
hundred thousand words.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gristmill.core.arrays import Column
from gristmill.dataprep.text.hashing import ODD, fmix64, sort_distinct
from gristmill.dataprep.text.kernels import Bytes, Offsets, kernel, text_buffers
from gristmill.dataprep.text.spans import hashed_words
from gristmill.dataprep.text.unicode_tables import word_letters


class ShingleSets(NamedTuple):
    """Shingles of n texts, concatenated.

    Attributes:
        hashes: uint32; text i has `hashes[offsets[i]:offsets[i + 1]]`, ascending and
            distinct.
        offsets: int64 of shape (n + 1,).
    """

    hashes: np.ndarray
    offsets: np.ndarray


def no_shingles(texts: int) -> ShingleSets:
    """Empty sets for this many texts."""
    return ShingleSets(np.empty(0, np.uint32), np.zeros(texts + 1, np.int64))


def shingle_sets(texts: Column, ngram: int) -> ShingleSets:
    """Hash the word n-grams of every text.

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    return hash_shingles(*text_buffers(texts), word_letters(invisible=False), ngram)


@kernel
def similarities(sets: ShingleSets, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Jaccard similarity of pairs of texts; 0 if neither has shingles.

    Args:
        left, right: int64 of shape (n,), positions of the texts of each pair.

    Returns:
        float64 of shape (n,).
    """
    hashes, offsets = sets
    result = np.zeros(len(left))
    for pair in range(len(left)):
        first = hashes[offsets[left[pair]] : offsets[left[pair] + 1]]
        second = hashes[offsets[right[pair]] : offsets[right[pair] + 1]]
        shared = 0
        i = 0
        j = 0
        while i < len(first) and j < len(second):
            a = first[i]
            b = second[j]
            shared += a == b
            i += a <= b
            j += b <= a
        if shared:
            result[pair] = shared / (len(first) + len(second) - shared)
    return result


@kernel
def hash_shingles(
    data: Bytes, offsets: Offsets, letters: np.ndarray, ngram: int
) -> ShingleSets:
    """Hash the word n-grams of every text in the buffers of `text_buffers`.

    Args:
        letters: `unicode_tables.word_letters`.
    """
    number = len(offsets) - 1
    hashes = np.empty((offsets[-1] - offsets[0]) // 2 + number, np.uint32)
    ends = np.zeros(number + 1, np.int64)
    for text in range(number):
        _, _, words = hashed_words(data, offsets[text], offsets[text + 1], letters)
        shingles = hashes[
            ends[text] : ends[text] + max(len(words) - ngram + 1, min(len(words), 1))
        ]
        _roll(words, min(ngram, len(words)), shingles)
        ends[text + 1] = ends[text] + sort_distinct(
            shingles, np.empty(len(shingles), np.uint32)
        )
    return ShingleSets(hashes[: ends[number]].copy(), ends)


@kernel
def _roll(words: np.ndarray, ngram: int, shingles: np.ndarray) -> None:
    """Hash every n-gram: the upper 32 bits of a polynomial in the word hashes mod 2^64,
    mixed.
    """
    oldest = np.uint64(1)
    for _ in range(ngram):
        oldest *= ODD
    value = np.uint64(0)
    for position in range(len(words)):
        value = value * ODD + words[position]
        if position >= ngram:
            value -= oldest * words[position - ngram]
        if position >= ngram - 1:
            shingles[position - ngram + 1] = np.uint32(fmix64(value) >> np.uint64(32))
