"""An index of the word n-grams of evaluation items, and where they stand in other texts.

Distinct words of the items have numbers, by code points. A word of another text is first taken for the word with its
hash of 64 bits; where an n-gram of such numbers is found, its words are compared code point by code point, so that
nothing is found that is not there. (Two words of the items that share a hash would hide one another: of V distinct
ones about V^2 / 2^65 do.) Built once, held as plain arrays and shared by all tasks of a stage through one Arrow file.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.files import atomic_write
from gristmill.dataprep.passages.ngram_kernels import (
    MOST_PLACES,
    flag_prefixes,
    number_ngrams,
    number_words,
    scan_texts,
)
from gristmill.dataprep.shuffle import open_batches
from gristmill.dataprep.text_buffers import text_buffers
from gristmill.dataprep.unicode_tables import code_point_flags, lower_case_seen


class NgramIndex(NamedTuple):
    """All n-grams of n parts; arrays only, so that kernels can take it.

    Attributes:
        word_table: int32, open addressing; the number of a word, or -1.
        word_hashes: uint64 per word. word_codes: uint32, lower-cased code points of all words;
        word_offsets: int64, word i has word_codes[word_offsets[i]:word_offsets[i + 1]].
        words: int32, the words of all parts; part_offsets: int64 of shape (n + 1,).
        lengths: int64 per part, words per n-gram: the configured number, less in a shorter part, 0 where the part is
            too short to be looked for.
        ngram_table: int32, open addressing; the number of a distinct n-gram, or -1.
        ngram_begins, ngram_lengths: int64 per distinct n-gram, where it stands first in `words`, and its words.
        place_offsets: int64; n-gram i stands at places[place_offsets[i]:place_offsets[i + 1]], positions in `words`.
        prefixes: uint8, bits indexed by the hash of the first words of an n-gram: whether one begins so.
        prefix_words: int64 of shape (1,).
        counted_words: int64 per part, words that lie in an n-gram which is looked for.
    """

    word_table: np.ndarray
    word_hashes: np.ndarray
    word_codes: np.ndarray
    word_offsets: np.ndarray
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
        """Distinct n-grams, those of templates included."""
        return len(self.ngram_begins)

    def num_templates(self) -> int:
        """Distinct n-grams that are in too many places to be looked for."""
        return int((np.diff(self.place_offsets) > MOST_PLACES).sum())


class Hits(NamedTuple):
    """Where n-grams of the index stand in n texts, in no particular order within a text.

    Attributes:
        text: int64, which text. word: int64, number of the n-gram's first word in it.
        begin, end: int64, its bytes in the text. ngram: int64, its number in the index.
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
        ngram: words per n-gram; a part with fewer words is one n-gram of all of them.
        min_words: parts with fewer words are left out.
    """
    prefix_words = min(min_words, ngram)
    data, offsets = text_buffers(texts)
    *vocabulary, words, part_offsets = number_words(data, offsets, code_point_flags(), lower_case_seen())
    sizes = np.diff(part_offsets)
    lengths = np.where(sizes < min_words, 0, np.minimum(sizes, ngram)).astype(np.int64)
    table, begins, ngram_lengths, number_at = number_ngrams(words, part_offsets, lengths)
    standing = np.flatnonzero(number_at >= 0)
    order = np.argsort(number_at[standing], kind="stable")
    places = standing[order].astype(np.int64)
    place_offsets = np.searchsorted(number_at[places], np.arange(len(begins) + 1)).astype(np.int64)
    template = np.diff(place_offsets) > MOST_PLACES
    prefixes = flag_prefixes(words, begins[~template], prefix_words)
    counted = _counted_words(number_at, template, part_offsets, lengths)
    return NgramIndex._make([
        *vocabulary, words, part_offsets, lengths, table, begins, ngram_lengths, place_offsets, places, prefixes,
        np.array([prefix_words]), counted,
    ])  # fmt: skip


def write_index(path: Path, index: NgramIndex) -> None:
    """Write the index as one Arrow file."""
    arrays = [pa.array([values], pa.large_list(pa.from_numpy_dtype(values.dtype))) for values in index]
    batch = pa.record_batch(arrays, names=list(index._fields))
    with atomic_write(path) as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def read_index(path: Path) -> NgramIndex:
    """The inverse of `write_index`; a local file is mapped, so that all workers share its memory."""
    batch = open_batches(path).get_batch(0)
    return NgramIndex._make(batch[name].values.to_numpy() for name in NgramIndex._fields)


def find_ngrams(texts: pa.Array | pa.ChunkedArray, index: NgramIndex) -> Hits:
    """Find all n-grams of the index in n texts, those of templates left out.

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
    """
    data, offsets = text_buffers(texts)
    wanted = np.unique(index.ngram_lengths)
    found = scan_texts(
        data, offsets, code_point_flags(), lower_case_seen(), wanted, index.word_table, index.word_hashes,
        index.word_codes, index.word_offsets, index.words, index.ngram_table, index.ngram_begins, index.ngram_lengths,
        index.place_offsets, index.prefixes, int(index.prefix_words[0]),
    )  # fmt: skip
    return Hits(*found)


def count_documents(hits: Hits) -> tuple[np.ndarray, np.ndarray]:
    """The distinct n-grams that were found (int64, ascending), and in how many texts each stands."""
    once = np.unique(np.stack([hits.text, hits.ngram]), axis=1)
    ngrams, documents = np.unique(once[1], return_counts=True)
    return ngrams, documents


def covered(positions: np.ndarray, length: np.ndarray, new: np.ndarray) -> np.ndarray:
    """How many words each n-gram covers that the one before it does not.

    Args:
        positions: int64, where n-grams begin, ascending within a group. length: int64, their words.
        new: bool, whether a group begins here.
    """
    gaps = np.diff(positions, prepend=0)
    result: np.ndarray = np.where(new, length, np.minimum(gaps, length))
    return result


def _counted_words(
    number_at: np.ndarray, template: np.ndarray, part_offsets: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
    at = np.flatnonzero(number_at >= 0)
    at = at[~template[number_at[at]]]
    part = np.searchsorted(part_offsets, at, side="right") - 1
    new = np.diff(part, prepend=-1) != 0
    total: np.ndarray = np.bincount(part, covered(at, lengths[part], new), len(lengths)).astype(np.int64)
    return total
