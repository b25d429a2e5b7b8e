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
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.unicode_tables import (
    ALONE,
    WORD,
    code_point_flags,
    decode,
    lower_case,
)


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
    return hash_shingles(*text_buffers(texts), ngram)


def hash_shingles(data: Bytes, offsets: Offsets, ngram: int) -> ShingleSets:
    """Hash the word n-grams of every text in the buffers of `text_buffers`."""
    return ShingleSets(
        *_shingle_texts(data, offsets, code_point_flags(), lower_case(), ngram)
    )


def similarities(sets: ShingleSets, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Jaccard similarity of pairs of texts; 0 if neither has shingles.

    Args:
        left, right: int64 of shape (n,), positions of the texts of each pair.

    Returns:
        float64 of shape (n,).
    """
    return _similarities(sets.hashes, sets.offsets, left, right)


@kernel
def _similarities(
    hashes: np.ndarray,
    offsets: Offsets,
    first_texts: np.ndarray,
    second_texts: np.ndarray,
) -> np.ndarray:
    result = np.zeros(len(first_texts))
    for pair in range(len(first_texts)):
        first = hashes[offsets[first_texts[pair]] : offsets[first_texts[pair] + 1]]
        second = hashes[offsets[second_texts[pair]] : offsets[second_texts[pair] + 1]]
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
def _shingle_texts(
    data: Bytes,
    offsets: Offsets,
    flags: Flags,
    lower: np.ndarray,
    ngram: int,
) -> tuple[np.ndarray, np.ndarray]:
    number = len(offsets) - 1
    hashes = np.empty((offsets[-1] - offsets[0]) // 2 + number, np.uint32)
    ends = np.zeros(number + 1, np.int64)
    # Lower case of each ASCII byte of a word, 0 for a byte that ends a word: 128 bytes,
    # small enough for the cache.
    ascii_words = np.zeros(128, np.uint8)
    for code in range(128):
        if flags[code] & WORD != 0:
            ascii_words[code] = lower[code]
    for text in range(number):
        words = _word_hashes(
            data, offsets[text], offsets[text + 1], flags, lower, ascii_words
        )
        shingles = hashes[
            ends[text] : ends[text] + max(len(words) - ngram + 1, min(len(words), 1))
        ]
        _roll(words, min(ngram, len(words)), shingles)
        ends[text + 1] = ends[text] + sort_distinct(
            shingles, np.empty(len(shingles), np.uint32)
        )
    return hashes[: ends[number]].copy(), ends


@kernel
def _word_hashes(
    data: Bytes,
    begin: int,
    end: int,
    flags: Flags,
    lower: np.ndarray,
    ascii_words: np.ndarray,
) -> np.ndarray:
    words = np.empty((end - begin) // 2 + 1, np.uint64)
    count = 0
    length = np.uint64(0)
    value = np.uint64(0)
    position = begin
    while position < end:
        byte = data[np.uint64(position)]
        if byte < 128:
            position += 1
            letter = ascii_words[byte]
            if letter != 0:
                value = (value ^ np.uint64(letter)) * ODD
                value ^= value >> np.uint64(32)
                length += np.uint64(1)
            elif length > 0:
                words[count] = fmix64(value + length)
                count = count + 1
                length = np.uint64(0)
                value = np.uint64(0)
            continue
        code, width = decode(data, position)
        position += width
        flag = flags[code]
        if length > 0 and (flag & WORD == 0 or flag & ALONE != 0):
            words[count] = fmix64(value + length)
            count = count + 1
            length = np.uint64(0)
            value = np.uint64(0)
        if flag & WORD == 0:
            continue
        value = (value ^ np.uint64(lower[code])) * ODD
        value ^= value >> np.uint64(32)
        length += np.uint64(1)
        if flag & ALONE != 0:
            words[count] = fmix64(value + length)
            count = count + 1
            length = np.uint64(0)
            value = np.uint64(0)
    if length > 0:
        words[count] = fmix64(value + length)
        count += 1
    return words[:count]


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
