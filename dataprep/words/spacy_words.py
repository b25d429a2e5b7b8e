"""Words of spaCy's tokenizers, which split each run between whitespace independently.

A kernel splits nearly all English runs (`spacy_rules.py`). Other runs are passed to
spaCy once: runs repeat (Zipf's law), so that nearly all are looked up.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

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
    lengths: np.ndarray,
    tokenizer: Any,
    lengths_of: Lengths,
) -> Words:
    """Split the runs that `spacy_rules.split_runs` did not, and lay out the words of
    all.
    """
    others = np.flatnonzero(sizes == 0)
    starts, ends = runs.starts[others], runs.ends[others]
    numbers, _ = number_spans(data, starts, ends)
    firsts = np.unique(numbers, return_index=True)[1]
    distinct_runs = [data[starts[run] : ends[run]].tobytes() for run in firsts]
    known = {run: lengths_of.get(run) for run in distinct_runs}
    unknown = [run for run, run_lengths in known.items() if run_lengths is None]
    if unknown:
        # all unknown runs are split in one call
        cut: list[list[int]] = [[]]
        for token in tokenizer(BETWEEN_RUNS.join(run.decode() for run in unknown)):
            if token.text == BETWEEN_RUNS:
                cut.append([])
            else:
                cut[-1].append(len(token.text.encode()))
        new_lengths = dict(zip(unknown, cut, strict=True))
        known |= new_lengths
        if len(lengths_of) + len(new_lengths) > REMEMBERED_RUNS:
            lengths_of.clear()
        lengths_of.update(new_lengths)
    words = pa.array([*known.values()], pa.list_(pa.int64())).take(pa.array(numbers))
    return _lay_out(
        data,
        code_point_flags(),
        runs,
        sizes,
        lengths,
        words.value_lengths().to_numpy(),
        words.flatten().to_numpy(),
    )


@kernel
def _lay_out(
    data: Bytes,
    flags: Flags,
    runs: Words,
    sizes: np.ndarray,
    lengths: np.ndarray,
    other_sizes: np.ndarray,
    other_lengths: np.ndarray,
) -> Words:
    """Words of all runs, by their numbers in each and their lengths; those of runs with
    size 0 are in `other_sizes` and `other_lengths`.
    """
    total = np.int64(sizes.sum()) + len(other_lengths)
    starts = np.empty(total, np.int64)
    ends = np.empty(total, np.int64)
    chars = np.empty(total, np.int32)
    flag_unions = np.empty(total, np.uint16)
    word_offsets = np.zeros(len(runs.offsets), np.int64)
    count, other, other_word = 0, 0, 0
    for text in range(len(runs.offsets) - 1):
        for run in range(runs.offsets[text], runs.offsets[text + 1]):
            pos = runs.starts[run]
            is_other = sizes[run] == 0
            size = other_sizes[other] if is_other else int(sizes[run])
            other += is_other
            for _ in range(size):
                if is_other:
                    length = other_lengths[other_word]
                    other_word += 1
                else:
                    length = int(lengths[count - other_word])
                starts[count], ends[count] = pos, pos + length
                if size == 1:
                    chars[count], flag_unions[count] = runs.chars[run], runs.seen[run]
                else:
                    chars[count], flag_unions[count] = describe_word(
                        data, pos, pos + length, flags
                    )
                pos += length
                count += 1
        word_offsets[text + 1] = count
    return Words(word_offsets, starts, ends, chars, flag_unions)
