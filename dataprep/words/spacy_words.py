"""Words of spaCy's tokenizers, which split each run between whitespace independently.

A kernel splits nearly all English runs (`spacy_rules.py`). Other runs are passed to
spaCy once: runs repeat (Zipf's law), so that nearly all are looked up.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from gristmill.core.arrays import offsets_of
from gristmill.dataprep.filters.repetition import number_spans
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel
from gristmill.dataprep.text.unicode_tables import code_point_flags
from gristmill.dataprep.words.spacy_rules import Rules, read_rules, split_runs
from gristmill.dataprep.words.tokenise_words import (
    Words,
    describe_word,
    whitespace_words,
)

REMEMBERED_RUNS = 1_000_000
"""Largest number of runs in the cache of a process, some 100 MB; then it is cleared."""

BETWEEN_RUNS = "\n"
"""Separator that is a word for spaCy, which searches no exception across it, unlike
across a space.
"""

Lengths = dict[bytes, list[int]]
"""Run -> byte lengths of its words, a pure function of the run."""
_lengths_of: Lengths = {}
"""Cache of the English tokenizer."""


class NoSpacyError(ImportError):
    """spaCy is not installed."""


def import_spacy() -> Any:
    """Import spaCy without torch.

    Raises:
        NoSpacyError: the package spacy is not installed.
    """
    # spaCy's models would use torch, its rules do not, and its import takes longest.
    hides_torch = "torch" not in sys.modules
    if hides_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import spacy
    except ImportError as error:
        raise NoSpacyError(
            "dialect: datatrove and mask.entities need the package spacy, which is not "
            "installed; install it with: pip install 'gristmill[spacy]'"
        ) from error
    finally:
        if hides_torch:
            del sys.modules["torch"]
    return spacy


@lru_cache(maxsize=1)
def load_tokenizer() -> Any:
    """spaCy's English tokenizer, without a model.

    Raises:
        NoSpacyError: the package spacy is not installed.
    """
    tokenizer = import_spacy().blank("en").tokenizer
    # shapes and other attributes of new words take two fifths of the time
    tokenizer.vocab.lex_attr_getters = {}
    return tokenizer


def spacy_words(
    data: Bytes, offsets: Offsets, flags: Flags, which: np.ndarray
) -> Words:
    """Split texts into spaCy's English words; the arguments are those of
    `tokenise_words.whitespace_words`.

    Raises:
        NoSpacyError: the package spacy is not installed.
    """
    tokenizer = load_tokenizer()
    runs = whitespace_words(data, offsets, flags, which)
    sizes, lengths = split_runs(data, runs.starts, runs.ends, english_rules())
    return _split_others(data, runs, sizes, lengths, tokenizer, _lengths_of)


@lru_cache(maxsize=1)
def english_rules() -> Rules:
    """Rules of `load_tokenizer()`."""
    return read_rules(load_tokenizer())


def words_of_runs(
    data: Bytes,
    offsets: Offsets,
    which: np.ndarray,
    tokenizer: Any,
    lengths_of: Lengths,
) -> Words:
    """Split texts by a tokenizer that splits each run between whitespace independently.

    Args:
        data, offsets: the texts.
        which: int64, numbers of the texts to split.
        tokenizer: called with a run; its tokens have a `text`.
        lengths_of: cache of runs, which is extended.
    """
    runs = whitespace_words(data, offsets, code_point_flags(), which)
    sizes = np.zeros(len(runs.starts), np.uint8)
    return _split_others(data, runs, sizes, sizes, tokenizer, lengths_of)


def _split_others(
    data: Bytes,
    runs: Words,
    sizes: np.ndarray,
    simple_lengths: np.ndarray,
    tokenizer: Any,
    lengths_of: Lengths,
) -> Words:
    """Split the runs that `spacy_rules.split_runs` did not, and lay out the words of
    all.
    """
    complex_runs = np.flatnonzero(sizes == 0)
    numbers, _ = number_spans(data, runs.starts[complex_runs], runs.ends[complex_runs])
    firsts = complex_runs[np.unique(numbers, return_index=True)[1]]
    places = zip(runs.starts[firsts].tolist(), runs.ends[firsts].tolist(), strict=True)
    distinct_runs = [data[begin:end].tobytes() for begin, end in places]
    cached = [lengths_of.get(run) for run in distinct_runs]
    unknown = [
        run
        for run, run_lengths in zip(distinct_runs, cached, strict=True)
        if run_lengths is None
    ]
    new_lengths: Lengths = {}
    if unknown:
        # all unknown runs are split in one call
        cut: list[list[int]] = [[]]
        for token in tokenizer(BETWEEN_RUNS.join(run.decode() for run in unknown)):
            if token.text == BETWEEN_RUNS:
                cut.append([])
            else:
                cut[-1].append(len(token.text.encode()))
        new_lengths = dict(zip(unknown, cut, strict=True))
        if len(lengths_of) + len(new_lengths) > REMEMBERED_RUNS:
            lengths_of.clear()
        lengths_of.update(new_lengths)
    lengths = [
        new_lengths[run] if run_lengths is None else run_lengths
        for run, run_lengths in zip(distinct_runs, cached, strict=True)
    ]
    bounds = offsets_of([len(run) for run in lengths])
    flat = np.array([length for run in lengths for length in run], np.int64)
    return _lay_out(
        data, code_point_flags(), runs, sizes, simple_lengths, numbers, bounds, flat
    )


@kernel
def _lay_out(
    data: Bytes,
    flags: Flags,
    runs: Words,
    sizes: np.ndarray,
    simple_lengths: np.ndarray,
    numbers: np.ndarray,
    bounds: np.ndarray,
    lengths: np.ndarray,
) -> Words:
    """Words of all runs, by the lengths of their words: in a row, or by the number of a
    complex run.
    """
    total = 0
    complex_run = 0
    for size in sizes:
        total += int(size)
        if size == 0:
            total += bounds[numbers[complex_run] + 1] - bounds[numbers[complex_run]]
            complex_run += 1
    starts = np.empty(total, np.int64)
    ends = np.empty(total, np.int64)
    chars = np.empty(total, np.int32)
    flag_unions = np.empty(total, np.uint16)
    word_offsets = np.zeros(len(runs.offsets), np.int64)
    count = 0
    complex_run = 0
    simple_word = 0
    for text in range(len(runs.offsets) - 1):
        for run in range(runs.offsets[text], runs.offsets[text + 1]):
            pos = runs.starts[run]
            if sizes[run] == 1:
                starts[count], ends[count], chars[count], flag_unions[count] = (
                    pos,
                    runs.ends[run],
                    runs.chars[run],
                    runs.seen[run],
                )
                simple_word += 1
                count += 1
                continue
            is_simple = sizes[run] > 0
            first, last = simple_word, simple_word + int(sizes[run])
            if not is_simple:
                number = numbers[complex_run]
                first, last = bounds[number], bounds[number + 1]
                complex_run += 1
            for word in range(first, last):
                length = int(simple_lengths[word]) if is_simple else lengths[word]
                starts[count], ends[count] = pos, pos + length
                chars[count], flag_unions[count] = describe_word(
                    data, pos, pos + length, flags
                )
                pos += length
                count += 1
            if is_simple:
                simple_word = last
        word_offsets[text + 1] = count
    return Words(word_offsets, starts, ends, chars, flag_unions)
