"""Index of the word n-grams of evaluation items, and their search in other texts.

The distinct words of the items are numbered. A word is identified by its 64-bit hash:
among V distinct words of the items and W of the texts about VW / 2^64 pairs share one
by chance (a million and a billion: 5 in 100,000). The index is built once, consists of
plain arrays, and is shared by all tasks of a stage through one Arrow file.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column
from gristmill.dataprep.filters.repetition import empty_table
from gristmill.dataprep.shuffle_format import open_batches, write_rows
from gristmill.dataprep.text.hashing import fmix64
from gristmill.dataprep.text.kernels import (
    Bytes,
    Flags,
    Offsets,
    Positions,
    kernel,
    text_buffers,
)
from gristmill.dataprep.text.spans import hashed_words
from gristmill.dataprep.text.unicode_tables import (
    code_point_flags,
    lower_case_seen,
)

_ODD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, as in hashing.py
LETTER = r"\p{L}"
"""Pattern of a letter. Items without letters are rows of numbers, which many clean
documents contain (tables, lists of years).
"""
MOST_PLACES = 64
"""Maximum number of places of an n-gram in the evaluation sets. A more frequent n-gram
belongs to a template ("answer the following") and is not searched for.
"""


@kernel
def number_words(
    data: Bytes, offsets: Offsets, flags: Flags, lower: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Number the distinct words of all parts in order of appearance; returns the first
    arrays of `NgramIndex`.
    """
    parts = len(offsets) - 1
    capacity = offsets[parts] - offsets[0]
    words = np.empty(capacity, np.int32)
    part_offsets = np.zeros(parts + 1, np.int64)
    table = empty_table(capacity)
    hashes = np.empty(capacity, np.uint64)
    total = 0
    distinct = 0
    for part in range(parts):
        _, _, values = hashed_words(
            data, offsets[part], offsets[part + 1], flags, lower
        )
        for value in values:
            slot = _word_slot(value, table, hashes)
            if table[slot] < 0:
                table[slot] = distinct
                hashes[distinct] = value
                distinct += 1
            words[total] = table[slot]
            total += 1
        part_offsets[part + 1] = total
    return table, hashes[:distinct].copy(), words[:total].copy(), part_offsets


@kernel
def _word_slot(value: np.uint64, table: np.ndarray, hashes: np.ndarray) -> np.uint64:
    """Slot of the word with a hash in the table, or the free slot for it."""
    mask = np.uint64(len(table) - 1)
    slot = value & mask
    while table[slot] >= 0 and hashes[table[slot]] != value:
        slot = (slot + np.uint64(1)) & mask
    return slot


@kernel
def _ngram_slot(
    words: np.ndarray,
    begin: int,
    length: int,
    indexed: np.ndarray,
    table: np.ndarray,
    begins: np.ndarray,
    lengths: np.ndarray,
) -> np.uint64:
    """Slot of the n-gram `words[begin:begin + length]` in the table, or the free slot
    for it.
    """
    value = np.uint64(length)
    for word in words[begin : begin + length]:
        value = (value ^ np.uint64(word)) * _ODD
        value ^= value >> np.uint64(32)
    mask = np.uint64(len(table) - 1)
    slot = fmix64(value) & mask
    while True:
        ngram = table[slot]
        if ngram < 0:
            return slot
        if lengths[ngram] == length:
            step = 0
            while step < length and (
                words[begin + step] == indexed[begins[ngram] + step]
            ):
                step += 1
            if step == length:
                return slot
        slot = (slot + np.uint64(1)) & mask


@kernel
def number_ngrams(
    words: np.ndarray, part_offsets: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Number the distinct n-grams; the last array has the n-gram at each position of
    `words`, or -1.
    """
    table = empty_table(len(words))
    begins = np.empty(len(words), np.int64)
    ngram_lengths = np.empty(len(words), np.int64)
    number_at = np.full(len(words), -1, np.int64)
    distinct = 0
    for part in range(len(lengths)):
        length = lengths[part]
        if length == 0:
            continue
        for position in range(part_offsets[part], part_offsets[part + 1] - length + 1):
            slot = _ngram_slot(
                words, position, length, words, table, begins, ngram_lengths
            )
            if table[slot] < 0:
                table[slot] = distinct
                begins[distinct], ngram_lengths[distinct] = position, length
                distinct += 1
            number_at[position] = table[slot]
    return table, begins[:distinct].copy(), ngram_lengths[:distinct].copy(), number_at


@kernel
def flag_prefixes(
    words: np.ndarray, begins: np.ndarray, prefix_words: int
) -> np.ndarray:
    """Set the bit of the first words of every n-gram that begins at one of `begins`."""
    size = 1024
    while size < 2 * len(begins):
        size *= 2
    prefixes = np.zeros(size, np.uint8)
    for begin in begins:
        value = np.uint64(0)
        for position in range(begin + prefix_words - 1, begin - 1, -1):
            value = value * _ODD + np.uint64(words[position])
        bit = fmix64(value) & np.uint64(8 * size - 1)
        prefixes[bit >> np.uint64(3)] |= np.uint8(1) << (bit & np.uint64(7))
    return prefixes


@kernel
def _number_hashed(
    hashes: np.ndarray, word_table: np.ndarray, word_hashes: np.ndarray
) -> np.ndarray:
    """Number of the word with each hash, or -1 (int32)."""
    words = np.empty(len(hashes), np.int32)
    for position in range(len(hashes)):
        slot = _word_slot(hashes[position], word_table, word_hashes)
        words[position] = word_table[slot]
    return words


@kernel
def scan_texts(
    data: Bytes,
    offsets: Offsets,
    flags: Flags,
    lower: np.ndarray,
    wanted: np.ndarray,
    word_table: np.ndarray,
    word_hashes: np.ndarray,
    indexed: np.ndarray,
    table: np.ndarray,
    begins: Positions,
    lengths: np.ndarray,
    place_offsets: np.ndarray,
    prefixes: np.ndarray,
    prefix_words: int,
) -> np.ndarray:
    """Find all n-grams of the index in texts; the arrays are those of `NgramIndex`.

    Args:
        wanted: int64, distinct lengths of n-grams, ascending.

    Returns:
        int64 of shape (5, hits), the columns of `Hits`.
    """
    size = 1024
    hits = np.empty((5, size), np.int64)
    count = 0
    mask = np.uint64(8 * len(prefixes) - 1)
    oldest = np.uint64(1)
    for _ in range(prefix_words):
        oldest *= _ODD
    for text in range(len(offsets) - 1):
        starts, ends, hashes = hashed_words(
            data, offsets[text], offsets[text + 1], flags, lower
        )
        words = _number_hashed(hashes, word_table, word_hashes)
        num_known = 0  # consecutive indexed words from here on
        value = np.uint64(0)
        for position in range(len(words) - 1, -1, -1):
            num_known = num_known + 1 if words[position] >= 0 else 0
            value = value * _ODD + np.uint64(words[position])
            if position + prefix_words < len(words):
                value -= oldest * np.uint64(words[position + prefix_words])
            bit = fmix64(value) & mask
            if (
                num_known < prefix_words
                or prefixes[bit >> np.uint64(3)] >> (bit & np.uint64(7)) & 1 == 0
            ):
                continue
            for length in wanted:
                if length > num_known:
                    break
                ngram = table[
                    _ngram_slot(
                        words, position, length, indexed, table, begins, lengths
                    )
                ]
                if (
                    ngram < 0
                    or place_offsets[ngram + 1] - place_offsets[ngram] > MOST_PLACES
                ):
                    continue
                if count == size:
                    grown = np.empty((5, 2 * size), np.int64)
                    grown[:, :size] = hits
                    hits = grown
                    size = 2 * size
                hits[0, count], hits[1, count], hits[4, count] = text, position, ngram
                hits[2, count] = starts[position] - offsets[text]
                hits[3, count] = ends[position + length - 1] - offsets[text]
                count += 1
    return hits[:, :count]


class NgramIndex(NamedTuple):
    """N-grams of n parts, as plain arrays for kernels.

    Attributes:
        word_table: int32, open addressing; the number of a word, or -1.
        word_hashes: uint64 per word.
        words: int32, the words of all parts; part_offsets: int64 of shape (n + 1,).
        lengths: int64 per part, words per n-gram: the configured number, less in a
            shorter part, 0 in a part that is too short to search for or has no letter.
        ngram_table: int32, open addressing; the number of a distinct n-gram, or -1.
        ngram_begins, ngram_lengths: int64 per distinct n-gram, its first position in
            `words`, and its number of words.
        place_offsets: int64; n-gram i is at places[place_offsets[i]:place_offsets[i +
            1]], positions in `words`.
        prefixes: uint8, bit set of the hashes of the n-grams' first words.
        prefix_words: int64 of shape (1,), number of words per prefix.
        counted_words: int64 per part, number of words in an n-gram that is searched
            for.
    """

    word_table: np.ndarray
    word_hashes: np.ndarray
    words: np.ndarray
    part_offsets: np.ndarray
    lengths: np.ndarray
    ngram_table: np.ndarray
    ngram_begins: np.ndarray
    ngram_lengths: np.ndarray
    place_offsets: np.ndarray
    places: np.ndarray
    prefixes: np.ndarray
    prefix_words: np.ndarray
    counted_words: np.ndarray

    @property
    def num_ngrams(self) -> int:
        """Number of distinct n-grams, including templates."""
        return len(self.ngram_begins)


class Hits(NamedTuple):
    """Occurrences of the index's n-grams in n texts, unordered within a text.

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
    prefix_words = min(min_words, ngram)
    *vocabulary, words, part_offsets = number_words(
        *text_buffers(texts), code_point_flags(), lower_case_seen()
    )
    sizes = np.diff(part_offsets)
    lettered = pc.match_substring_regex(texts, LETTER).to_numpy(zero_copy_only=False)
    lengths = np.where(
        lettered & (sizes >= min_words), np.minimum(sizes, ngram), 0
    ).astype(np.int64)
    table, begins, ngram_lengths, number_at = number_ngrams(
        words, part_offsets, lengths
    )
    ngram_positions = np.flatnonzero(number_at >= 0)
    order = np.argsort(number_at[ngram_positions], kind="stable")
    places = ngram_positions[order].astype(np.int64)
    place_offsets = np.searchsorted(
        number_at[places], np.arange(len(begins) + 1)
    ).astype(np.int64)
    template = np.diff(place_offsets) > MOST_PLACES
    prefixes = flag_prefixes(words, begins[~template], prefix_words)
    counted_positions = ngram_positions[~template[number_at[ngram_positions]]]
    counted = covered_words(counted_positions, part_offsets, lengths).astype(np.int64)
    return NgramIndex._make(
        [
            *vocabulary,
            words,
            part_offsets,
            lengths,
            table,
            begins,
            ngram_lengths,
            place_offsets,
            places,
            prefixes,
            np.array([prefix_words]),
            counted,
        ]
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
    lengths = np.unique(index.ngram_lengths)
    return Hits(
        *scan_texts(
            *text_buffers(texts),
            code_point_flags(),
            lower_case_seen(),
            lengths,
            index.word_table,
            index.word_hashes,
            index.words,
            index.ngram_table,
            index.ngram_begins,
            index.ngram_lengths,
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
