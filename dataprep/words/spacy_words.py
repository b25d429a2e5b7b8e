"""Words of spaCy's tokenizers, which split each run between whitespace independently.

Nearly all English runs are only letters or digits, possibly between marks (`"yes,"`),
or letters around hyphens. Unless one of spaCy's 1,300 exceptions may apply, these are
split here: spaCy's prefixes and suffixes take such marks off one by one, its infixes
are the hyphens, and no rule splits between letters. An exception is searched in the
run, in the rest without affixes, and finally in adjacent words (`(him):` has a `):`),
so here in all sequences of adjacent words. Other runs are passed to spaCy once: runs
repeat (Zipf's law), so that nearly all are looked up.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np

from gristmill.core.arrays import offsets_of
from gristmill.dataprep.filters.repetition import number_spans
from gristmill.dataprep.text.hashing import hash_bytes
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, Positions, kernel
from gristmill.dataprep.text.unicode_tables import code_point_flags
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

OTHER, LOWER, UPPER, DIGIT, HYPHEN, QUOTE, OPENING, CLOSING, MARK, STOP = range(10)
"""Kinds of bytes."""
KINDS = {
    LOWER: "abcdefghijklmnopqrstuvwxyz",
    UPPER: "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    DIGIT: "0123456789",
    HYPHEN: "-",
    QUOTE: '"',
    OPENING: "(",
    CLOSING: ")",
    MARK: ",;:!?",
    STOP: ".",
}
MOST_WORDS, MOST_HYPHENS = 8, 2
"""Limits of a run split here: its words, and adjacent hyphens."""
EXCEPTION_BITS = 18


class NoSpacyError(ImportError):
    """`dialect: datatrove` needs spaCy."""


@lru_cache(maxsize=1)
def load_tokenizer() -> Any:
    """spaCy's English tokenizer, without a model.

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
            "dialect: datatrove takes its words from the package spacy, which is not "
            "installed; install it with: pip install 'gristmill[spacy]', or choose "
            "another dialect"
        ) from error
    finally:
        if hides_torch:
            del sys.modules["torch"]
    tokenizer = spacy.blank("en").tokenizer
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
    sizes = count_simple_words(
        data, runs.starts, runs.ends, _byte_kinds(), _exceptions(tokenizer)
    )
    return _split_runs(data, runs, sizes, tokenizer, _lengths_of)


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
    return _split_runs(
        data, runs, np.zeros(len(runs.starts), np.uint8), tokenizer, lengths_of
    )


def _split_runs(
    data: Bytes,
    runs: Words,
    sizes: np.ndarray,
    tokenizer: Any,
    lengths_of: Lengths,
) -> Words:
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
        data, code_point_flags(), _byte_kinds(), runs, sizes, numbers, bounds, flat
    )


@lru_cache(maxsize=1)
def _byte_kinds() -> np.ndarray:
    kinds = np.full(256, OTHER, np.uint8)
    for kind, members in KINDS.items():
        kinds[list(members.encode())] = kind
    return kinds


@lru_cache(maxsize=1)
def _exceptions(tokenizer: Any) -> np.ndarray:
    """Bloom filter of the tokenizer's exceptions, with one hash: bool of shape
    (2^EXCEPTION_BITS,).

    Other words may seem to be exceptions.
    """
    marked = np.zeros(1 << EXCEPTION_BITS, np.bool_)
    for word in tokenizer.rules:
        encoded = np.frombuffer(word.encode(), np.uint8)
        marked[_exception_slot(encoded, 0, len(encoded))] = True
    return marked


@kernel
def _exception_slot(data: Bytes, begin: int, end: int) -> int:
    return int(hash_bytes(data, begin, end) >> np.uint64(64 - EXCEPTION_BITS))


@kernel
def count_simple_words(
    data: Bytes,
    starts: Positions,
    ends: Positions,
    kinds: np.ndarray,
    exceptions: np.ndarray,
) -> np.ndarray:
    """Count the words of runs that need no tokenizer.

    Args:
        data, starts, ends: the runs.
        kinds: of bytes, of shape (256,).
        exceptions: of the tokenizer (`_exceptions`).

    Returns:
        uint8, one per run: its number of words, each of them letters, digits, adjacent
        hyphens, or one mark; 0 if the run needs the tokenizer.
    """
    word_counts = np.zeros(len(starts), np.uint8)
    cuts = np.empty(MOST_WORDS + 1, np.int64)
    for run in range(len(starts)):
        words = _split_simple(data, starts[run], ends[run], kinds, cuts)
        if not _is_simple(data, kinds, cuts, words):
            continue
        # any sequence of adjacent words may be an exception
        may_be_exception = False
        for first in range(words):
            for last in range(first + 1, words + 1):
                slot = _exception_slot(data, cuts[first], cuts[last])
                may_be_exception |= exceptions[slot]
        if not may_be_exception:
            word_counts[run] = words
    return word_counts


@kernel
def _split_simple(
    data: Bytes, begin: int, end: int, kinds: np.ndarray, cuts: np.ndarray
) -> int:
    """Split a run into letters, digits, adjacent hyphens, and single marks.

    Args:
        cuts: output: start of each word, and the end of the last.

    Returns:
        the number of words; 0 if there are too many, or a byte of kind OTHER.
    """
    words = 0
    last = OTHER
    for pos in range(begin, end):
        kind = kinds[data[pos]]
        if kind == UPPER:
            kind = LOWER
        if kind == OTHER:
            return 0
        if kind != last or kind > HYPHEN:
            if words == MOST_WORDS:
                return 0
            cuts[words] = pos
            words = words + 1
            last = kind
    cuts[words] = end
    return words


@kernel
def _is_simple(data: Bytes, kinds: np.ndarray, cuts: np.ndarray, words: int) -> bool:
    """True for marks, then digits or letters with hyphens between them, then marks that
    come off one by one.

    A full stop comes off digits, off letters of which the last two are lower-case, and
    off a quote or bracket; it may stay after others.
    """
    word = 0
    while word < words and (
        kinds[data[cuts[word]]] == QUOTE or kinds[data[cuts[word]]] == OPENING
    ):
        word += 1
    if word == words or kinds[data[cuts[word]]] > DIGIT:
        return False
    while word + 2 < words and kinds[data[cuts[word + 1]]] == HYPHEN:
        before = kinds[data[cuts[word]]]
        after = kinds[data[cuts[word + 2]]]
        if (
            before == DIGIT
            or after >= DIGIT
            or cuts[word + 2] - cuts[word + 1] > MOST_HYPHENS
        ):
            return False
        word += 2
    for number in range(word + 1, words):
        pos = cuts[number]
        kind = kinds[data[pos]]
        before = kinds[data[pos - 1]]
        if kind < QUOTE or kind == OPENING:
            return False
        small = (
            before == LOWER and pos - 2 >= cuts[word] and kinds[data[pos - 2]] == LOWER
        )
        if (
            kind == STOP
            and not small
            and before != DIGIT
            and before != QUOTE
            and before != CLOSING
        ):
            return False
    return True


@kernel
def _lay_out(
    data: Bytes,
    flags: Flags,
    kinds: np.ndarray,
    runs: Words,
    sizes: np.ndarray,
    numbers: np.ndarray,
    bounds: np.ndarray,
    lengths: np.ndarray,
) -> Words:
    """Words of all runs: of simple ones by the kinds of their bytes, of complex ones by
    the lengths of their words.
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
    cuts = np.empty(MOST_WORDS + 1, np.int64)
    count = 0
    complex_run = 0
    for text in range(len(runs.offsets) - 1):
        for run in range(runs.offsets[text], runs.offsets[text + 1]):
            pos = runs.starts[run]
            end = runs.ends[run]
            if sizes[run] == 1:
                starts[count], ends[count], chars[count], flag_unions[count] = (
                    pos,
                    end,
                    runs.chars[run],
                    runs.seen[run],
                )
                count += 1
                continue
            if sizes[run] > 0:
                for word in range(_split_simple(data, pos, end, kinds, cuts)):
                    starts[count], ends[count] = cuts[word], cuts[word + 1]
                    chars[count], flag_unions[count] = (
                        cuts[word + 1] - cuts[word],
                        flags[data[cuts[word]]],
                    )
                    count += 1
                continue
            for word in range(
                bounds[numbers[complex_run]], bounds[numbers[complex_run] + 1]
            ):
                starts[count], ends[count] = pos, pos + lengths[word]
                chars[count], flag_unions[count] = describe_word(
                    data, pos, pos + lengths[word], flags
                )
                pos += lengths[word]
                count += 1
            complex_run += 1
        word_offsets[text + 1] = count
    return Words(word_offsets, starts, ends, chars, flag_unions)
