"""Index of the word n-grams of evaluation items, and their search in other texts.

Words, and n-grams of their hashes, are identified by hashes of 64 bits: of V distinct
n-grams of the items and W of the texts about VW / 2^64 pairs share one by chance (a
million and a billion: 5 in 100,000). The index is built once, consists of plain arrays,
and is shared by all tasks of a stage through one Arrow file.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column, offsets_of
from gristmill.dataprep.shuffle_format import open_batches, ranges, write_rows
from gristmill.dataprep.text.hashing import ODD, fmix64
from gristmill.dataprep.text.kernels import (
    Bytes,
    Offsets,
    inner_kernel,
    kernel,
    text_buffers,
)
from gristmill.dataprep.text.spans import hashed_words
from gristmill.dataprep.text.unicode_tables import word_letters

LETTER = r"\p{L}"
"""Pattern of a letter. Items without letters are rows of numbers, which many clean
documents contain (tables, lists of years).
"""
MOST_PLACES = 64
"""Maximum number of places of an n-gram in the evaluation sets. A more frequent n-gram
belongs to a template ("answer the following") and is not searched for.
"""
PREFIX_BYTES = 8
"""Least bytes of the bit set per prefix: at most one in 64 other prefixes passes."""


class NgramIndex(NamedTuple):
    """N-grams of n parts, as plain arrays for kernels.

    Attributes:
        part_offsets: int64 of shape (n + 1,), positions of each part's words among
            those of all parts.
        lengths: int64 per part, words per n-gram: the configured number, less in a
            shorter part, 0 in a part that is too short to search for or has no letter.
        counted_words: int64 per part, number of words in an n-gram that is searched
            for.
        hashes: uint64, ascending: the distinct n-grams.
        place_offsets: int64; n-gram i is at places[place_offsets[i]:place_offsets[i +
            1]], positions of its first word.
        prefixes: uint8, bit set of the hashes of the n-grams' first words.
        prefix_words: int64 of shape (1,), number of words per prefix.
    """

    part_offsets: np.ndarray
    lengths: np.ndarray
    counted_words: np.ndarray
    hashes: np.ndarray
    place_offsets: np.ndarray
    places: np.ndarray
    prefixes: np.ndarray
    prefix_words: np.ndarray

    @property
    def num_ngrams(self) -> int:
        """Number of distinct n-grams, including templates."""
        return len(self.hashes)


class Hits(NamedTuple):
    """Occurrences of the index's n-grams in n texts, by text and word.

    Attributes:
        text: int64, position of the text. word: int64, number of the n-gram's first
            word in it.
        begin, end: int64, bytes of the n-gram in the text. ngram: int64, number of the
            n-gram in the index.
    """

    text: np.ndarray
    word: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    ngram: np.ndarray


def build_index(texts: pa.Array, ngram: int, min_words: int) -> NgramIndex:
    """Index the n-grams of n parts.

    Args:
        texts: one string per part.
        ngram: words per n-gram; a part with fewer words is a single n-gram.
        min_words: parts with fewer words are skipped, as are parts without a letter.
    """
    words, part_offsets = _hash_words(
        *text_buffers(texts), word_letters(invisible=True)
    )
    sums = _suffix_sums(words)
    sizes = np.diff(part_offsets)
    lettered = pc.match_substring_regex(texts, LETTER).to_numpy(zero_copy_only=False)
    lengths = np.where(
        lettered & (sizes >= min_words), np.minimum(sizes, ngram), 0
    ).astype(np.int64)
    num_places = np.where(lengths > 0, sizes - lengths + 1, 0)
    part = np.repeat(np.arange(len(texts)), num_places)
    positions = ranges(part_offsets[:-1], part_offsets[:-1] + num_places)
    hashes, number = np.unique(
        _hash_windows(sums, positions, lengths[part]), return_inverse=True
    )
    places = positions[np.argsort(number, kind="stable")]
    place_offsets = offsets_of(np.bincount(number, minlength=len(hashes)))
    is_template = np.diff(place_offsets) > MOST_PLACES
    firsts = places[place_offsets[:-1]][~is_template]
    prefix_words = np.array([min(min_words, ngram)])
    prefix_hashes = _hash_windows(sums, firsts, np.repeat(prefix_words, len(firsts)))
    prefixes = np.zeros(
        1 << max(10, (PREFIX_BYTES * len(firsts)).bit_length()), np.uint8
    )
    bits = prefix_hashes & np.uint64(8 * len(prefixes) - 1)
    np.bitwise_or.at(
        prefixes, bits >> np.uint64(3), (1 << (bits & np.uint64(7))).astype(np.uint8)
    )
    counted = positions[~is_template[number]]
    return NgramIndex(
        part_offsets,
        lengths,
        covered_words(counted, part_offsets, lengths).astype(np.int64),
        hashes,
        place_offsets,
        places,
        prefixes,
        prefix_words,
    )


def write_index(path: Path, index: NgramIndex) -> None:
    """Write the index as one Arrow file."""
    arrays = [
        pa.array([values], pa.large_list(pa.from_numpy_dtype(values.dtype)))
        for values in index
    ]
    write_rows(path, pa.table(arrays, names=list(index._fields)))


def read_index(path: Path) -> NgramIndex:
    """Read the file of `write_index`; a local file is mapped, so that all workers share
    its memory.
    """
    batch = open_batches(path).get_batch(0)
    return NgramIndex._make(
        batch[name].values.to_numpy() for name in NgramIndex._fields
    )


def find_ngrams(texts: Column, index: NgramIndex) -> Hits:
    """Find all n-grams of the index in n texts, except templates.

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    lengths = np.unique(index.lengths)
    return Hits(
        *_find_ngrams(
            *text_buffers(texts),
            word_letters(invisible=True),
            lengths[lengths > 0],
            index.hashes,
            index.place_offsets,
            index.prefixes,
            int(index.prefix_words[0]),
        )
    )


def count_documents(hits: Hits) -> tuple[np.ndarray, np.ndarray]:
    """Distinct n-grams of the hits (int64, ascending), and the number of texts with
    each.
    """
    text_ngrams = np.unique(np.stack([hits.text, hits.ngram]), axis=1)
    ngrams, documents = np.unique(text_ngrams[1], return_counts=True)
    return ngrams, documents


def covered(positions: np.ndarray, length: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Number of words that each n-gram covers beyond the preceding n-gram.

    Args:
        positions: int64, starts of the n-grams, ascending within a group. length:
            int64, their numbers of words.
        new: bool, true at the first n-gram of a group.
    """
    gaps = np.diff(positions, prepend=0)
    return np.where(new, length, np.minimum(gaps, length))


def covered_words(
    places: np.ndarray, part_offsets: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Number of words of each part that the n-grams at some places, ascending, cover."""
    part = np.searchsorted(part_offsets, places, side="right") - 1
    new = np.diff(part, prepend=-1) != 0
    return np.bincount(part, covered(places, lengths[part], new), len(lengths))


@kernel
def _hash_words(
    data: Bytes, offsets: Offsets, letters: np.ndarray
) -> tuple[np.ndarray, Offsets]:
    """Hashes of the words of all texts (uint64), and offsets of those of each."""
    words = np.empty(offsets[-1] - offsets[0], np.uint64)
    word_offsets = np.zeros(len(offsets), np.int64)
    for text in range(len(offsets) - 1):
        _, _, hashes = hashed_words(data, offsets[text], offsets[text + 1], letters)
        begin, end = word_offsets[text], word_offsets[text] + len(hashes)
        words[begin:end], word_offsets[text + 1] = hashes, end
    return words[: word_offsets[-1]].copy(), word_offsets


@kernel
def _suffix_sums(words: np.ndarray) -> np.ndarray:
    """Polynomial in the hashes of n words from each on, modulo 2^64: uint64 of shape (n
    + 1,).
    """
    sums = np.zeros(len(words) + 1, np.uint64)
    for word in range(len(words) - 1, -1, -1):
        sums[word] = sums[word + 1] * ODD + words[word]
    return sums


@inner_kernel
def _hash_window(
    sums: np.ndarray, begin: int, length: int, power: np.uint64
) -> np.uint64:
    """Hash of some consecutive words; `power` is ODD to the power of their number."""
    value = sums[np.uint64(begin)] - sums[np.uint64(begin + length)] * power
    return fmix64(value + np.uint64(length))


@inner_kernel
def _power(length: int) -> np.uint64:
    power = np.uint64(1)
    for _ in range(length):
        power *= ODD
    return power


@kernel
def _hash_windows(
    sums: np.ndarray, begins: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    """Hash of each n-gram (uint64)."""
    hashes = np.empty(len(begins), np.uint64)
    for ngram in range(len(begins)):
        length = lengths[ngram]
        hashes[ngram] = _hash_window(sums, begins[ngram], length, _power(length))
    return hashes


@kernel
def _find_ngrams(
    data: Bytes,
    offsets: Offsets,
    letters: np.ndarray,
    lengths: np.ndarray,
    indexed: np.ndarray,
    place_offsets: np.ndarray,
    prefixes: np.ndarray,
    prefix_words: int,
) -> np.ndarray:
    """Find all n-grams of the index in texts.

    Args:
        lengths: int64, distinct lengths of n-grams, ascending.
        indexed: `NgramIndex.hashes`.

    Returns:
        int64 of shape (5, hits), the columns of `Hits`.
    """
    hits = np.empty((5, 1024), np.int64)
    count = 0
    mask = np.uint64(8 * len(prefixes) - 1)
    prefix_power = _power(prefix_words)
    powers = np.array([_power(length) for length in lengths])
    for text in range(len(offsets) - 1):
        starts, ends, words = hashed_words(
            data, offsets[text], offsets[text + 1], letters
        )
        sums = _suffix_sums(words)
        for word in range(len(words) - prefix_words + 1):
            bit = _hash_window(sums, word, prefix_words, prefix_power) & mask
            if prefixes[bit >> np.uint64(3)] >> (bit & np.uint64(7)) & 1 == 0:
                continue
            for choice in range(len(lengths)):
                length = lengths[choice]
                if word + length > len(words):
                    break
                value = _hash_window(sums, word, length, powers[choice])
                ngram = np.searchsorted(indexed, value)
                if (
                    ngram == len(indexed)
                    or indexed[ngram] != value
                    or place_offsets[ngram + 1] - place_offsets[ngram] > MOST_PLACES
                ):
                    continue
                if count == hits.shape[1]:
                    hits = np.concatenate((hits, np.empty_like(hits)), axis=1)
                hits[0, count], hits[1, count], hits[4, count] = text, word, ngram
                hits[2, count] = starts[word] - offsets[text]
                hits[3, count] = ends[word + length - 1] - offsets[text]
                count += 1
    return hits[:, :count]
