"""Words of spaCy's blank English tokeniser, fast: every run without whitespace is given to spaCy once.

spaCy takes each run between whitespace apart on its own, so its words in a text are those of the runs, one after
another. Text repeats its runs (Zipf's law), and so nearly all of them are looked up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from gristmill.dataprep.filtering.repetition import number_spans
from gristmill.dataprep.filtering.word_cuts import Words, describe_words, whitespace_words
from gristmill.dataprep.text.kernels import kernel
from gristmill.dataprep.text.unicode_tables import code_point_flags

REMEMBERED_RUNS = 1_000_000
"""How many different runs a process remembers, some 100 MB; then it starts over."""

_lengths_of: dict[bytes, list[int]] = {}
"""Run -> byte lengths of its words, which a function of the run alone computes."""


class NoSpacyError(RuntimeError):
    """`words: exact` needs spaCy."""


def spacy_words(data: np.ndarray, offsets: np.ndarray) -> Words:
    """Cut n texts into spaCy's English words.

    Args:
        data, offsets: the texts (`text_buffers.text_buffers`).

    Raises:
        NoSpacyError: the package spacy is not installed.
    """
    tokenizer = load_tokenizer()
    flags = code_point_flags()
    runs = whitespace_words(data, offsets, flags, np.arange(len(offsets) - 1))
    numbers, _ = number_spans(data, runs.starts, runs.ends)
    firsts = np.unique(numbers, return_index=True)[1]
    lengths = [
        _word_lengths(tokenizer, data[begin:end].tobytes())
        for begin, end in zip(runs.starts[firsts].tolist(), runs.ends[firsts].tolist(), strict=True)
    ]
    bounds = np.cumsum([0, *map(len, lengths)]).astype(np.int64)
    flat = np.array([length for run in lengths for length in run], np.int64)
    return describe_words(data, flags, *_lay_out(runs.offsets, runs.starts, numbers, bounds, flat))


@lru_cache(maxsize=1)
def load_tokenizer() -> Any:
    """spaCy's tokeniser for English, without a model.

    Raises:
        NoSpacyError: the package spacy is not installed.
    """
    try:
        import spacy
    except ImportError as error:
        raise NoSpacyError(
            "words: exact takes its words from the package spacy, which is not installed; install spacy, or leave "
            "`words` out to use gristmill's own rule"
        ) from error
    return spacy.blank("en").tokenizer


def _word_lengths(tokenizer: Any, run: bytes) -> list[int]:
    found = _lengths_of.get(run)
    if found is None:
        if len(_lengths_of) >= REMEMBERED_RUNS:
            _lengths_of.clear()
        found = _lengths_of[run] = [len(token.text.encode()) for token in tokenizer(run.decode())]
    return found


@kernel
def _lay_out(
    offsets: np.ndarray, run_starts: np.ndarray, numbers: np.ndarray, bounds: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Offsets, starts and ends of the words, from the lengths of the words of each different run."""
    total = 0
    for number in numbers:
        total += bounds[number + 1] - bounds[number]
    starts, ends = np.empty(total, np.int64), np.empty(total, np.int64)
    word_offsets = np.zeros(len(offsets), np.int64)
    count = 0
    for text in range(len(offsets) - 1):
        for run in range(offsets[text], offsets[text + 1]):
            at = run_starts[run]
            for word in range(bounds[numbers[run]], bounds[numbers[run] + 1]):
                starts[count], ends[count] = at, at + lengths[word]
                at, count = ends[count], count + 1
        word_offsets[text + 1] = count
    return word_offsets, starts, ends
