"""Statistics that separate running English from placeholder text and from words in a
random order.

Of every text:

- placeholder_phrases: occurrences of `lorem ipsum`, ASCII letters in any case.
- lettered_word_ratio: whitespace words with a letter / words. Words without a letter
  are not counted if they mark an item of a list (the first one or two words of a line:
  `1.`, `-`, `• 200`), belong to arithmetic (in a line with `=`), or are numbers in a
  sentence (in a line with at least as many words with a letter). NaN if no word counts.

Of texts in English, or in an unknown language (NaN for others), on the words of
`word_breaks.segmented_words`:

- eflaw: McAlpine's EFLAW score, (words + words of at most three code points) /
  sentences, which GneissWeb calls readability (Gohari et al. 2025, section 3.2).
  Sentences are those of `lines_and_sentences.py`, words those of UAX #29; GneissWeb
  takes both from textstat.
- function_word_ratio: words in FUNCTION_WORDS, in any case / words.
- stray_determiner_ratio: of the words in DETERMINERS that one space or newline and a
  word follow, those whose next word is one of NEVER_NEXT and not the first part of a
  compound (`the in-crowd`). NaN below LEAST_DETERMINERS.

Words in a random order have their function words in each other's places, which no
grammatical sentence has. A chain in which every word follows its predecessor as often
as in prose has the pairs of prose: these statistics do not see it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gristmill.dataprep.conservation import LENGTH_EDGES
from gristmill.dataprep.filters.gopher_words import lower_ascii
from gristmill.dataprep.filters.lines_and_sentences import (
    count_sentences,
    text_classes,
)
from gristmill.dataprep.filters.listed_words import PLACEHOLDER, count_matches
from gristmill.dataprep.filters.rule_sets import RuleSet, is_english, measure_by_kernel
from gristmill.dataprep.text.hashing import first_bytes
from gristmill.dataprep.text.kernels import Bytes, Flags, Offsets, kernel, text_buffers
from gristmill.dataprep.text.spans import skip_to_newlines
from gristmill.dataprep.text.unicode_tables import (
    ALPHABETIC,
    code_point_flags,
    decode,
    skip_flagged,
)
from gristmill.dataprep.text.unicode_tables import SPACE as WHITESPACE
from gristmill.dataprep.thresholds import Columns
from gristmill.dataprep.words.tokenise_words import Words
from gristmill.dataprep.words.word_breaks import segmented_words
from gristmill.mixtures.steps.rules import RunningText

RUNNING_TEXT_STATISTICS = (
    "lettered_word_ratio",
    "eflaw",
    "function_word_ratio",
    "stray_determiner_ratio",
)
DETERMINERS = "the a an my your our their every".split()
NEVER_NEXT = (
    "the a an of and or to in is are was were be with that for by from at as have has "
    "had it they he she we i if than but which these those this"
).split()
FUNCTION_WORDS = (
    "a about after all also an and any are as at be because been before being between "
    "both but by can could did do does down each for from had has have he her here him "
    "his how i if in into is it its just may me might more most must my no not now of "
    "off on one only or other our out over own same she should so some such than that "
    "the their them then there these they this those through to too under until up us "
    "very was we were what when where which while who why will with would you your"
).split()
"""Articles, pronouns, prepositions, conjunctions and auxiliaries: the closed classes of
English.
"""
LEAST_DETERMINERS = 8
"""Smallest number of determiners; with fewer, one slip of the pen would exceed the
threshold.
"""
LONGEST_MINI_WORD = 3
LONGEST_MARKER = 2
"""Number of words without a letter at the beginning of a line: the marker of an item,
and an amount.
"""
LONGEST_LISTED = 8
"""Bytes of the longest listed word: the capacity of a key."""
HYPHEN, SPACE, NEWLINE, EQUALS = (
    np.uint8(0x2D),
    np.uint8(0x20),
    np.uint8(0x0A),
    np.uint8(0x3D),
)


_DETERMINERS, _NEVER_NEXT, _FUNCTION_WORDS = (
    np.array(
        sorted(
            int.from_bytes(word.encode(), "little")
            for word in words
            if len(word) <= LONGEST_LISTED
        ),
        np.uint64,
    )
    for words in (DETERMINERS, NEVER_NEXT, FUNCTION_WORDS)
)
"""Words as keys of `first_bytes`, sorted."""


def measure(rows: pa.Table, section: RunningText) -> Columns:
    """Measure RUNNING_TEXT_STATISTICS and `placeholder_phrases` of n rows: float64 of
    shape (n,).
    """
    data, offsets = text_buffers(rows["text"])
    flags = code_point_flags()
    columns = measure_by_kernel(
        RUNNING_TEXT_STATISTICS,
        _measure_texts,
        rows["text"],
        flags,
        segmented_words(data, offsets, flags, np.arange(len(rows))),
        is_english(rows["language"].to_pylist()),
        text_classes(),
        _DETERMINERS,
        _NEVER_NEXT,
        _FUNCTION_WORDS,
        fill=np.nan,
    )
    placeholders = count_matches(rows["text"], PLACEHOLDER).astype(np.float64)
    return {"placeholder_phrases": placeholders, **columns}


RULE_SET = RuleSet(measure, ("language",), {"eflaw": LENGTH_EDGES})


@kernel
def _measure_texts(
    data: Bytes,
    offsets: Offsets,
    flags: Flags,
    words: Words,
    english: np.ndarray,
    classes: Flags,
    determiners: np.ndarray,
    never_next: np.ndarray,
    function_words: np.ndarray,
    values: np.ndarray,
) -> None:
    for text in range(len(offsets) - 1):
        begin, end, row = offsets[text], offsets[text + 1], values[text]
        row[0] = _lettered_share(data, begin, end, flags)
        first, last = words.offsets[text], words.offsets[text + 1]
        if not english[text] or first == last:
            continue
        mini, functions, followed, stray = 0, 0, 0, 0
        after_determiner = False
        for word in range(first, last):
            start, stop = words.starts[word], words.ends[word]
            key = np.uint64(0)
            if stop - start <= LONGEST_LISTED:
                key = lower_ascii(first_bytes(data, start, stop - start))
            mini += words.chars[word] <= LONGEST_MINI_WORD
            functions += _is_listed(key, function_words)
            if after_determiner:
                followed += 1
                compound = stop < end and data[stop] == HYPHEN
                stray += not compound and _is_listed(key, never_next)
            joined = (
                word + 1 < last
                and words.starts[word + 1] == stop + 1
                and data[stop] in (SPACE, NEWLINE)
            )
            after_determiner = joined and _is_listed(key, determiners)
        number = last - first
        row[1] = (number + mini) / max(count_sentences(data, begin, end, classes), 1)
        row[2] = functions / number
        if followed >= LEAST_DETERMINERS:
            row[3] = stray / followed


@kernel
def _lettered_share(data: Bytes, begin: int, end: int, flags: Flags) -> float:
    """Return words with a letter / words that count; NaN if no word counts."""
    lettered, unlettered = 0, 0
    while begin < end:
        line_end = skip_to_newlines(data, begin, end, 1)
        in_line, markers, lettered_before = 0, 0, lettered
        at, arithmetic = begin, False
        while at < line_end:
            inside, letter = False, False
            while at < line_end:
                code, width = decode(data, at)
                if flags[code] & WHITESPACE != 0:
                    break
                arithmetic |= code == EQUALS
                inside, letter = True, letter or flags[code] & ALPHABETIC != 0
                at += width
            if inside and letter:
                lettered += 1
            elif inside and lettered == lettered_before and markers < LONGEST_MARKER:
                markers += 1
            elif inside:
                in_line += 1
            at = skip_flagged(data, at, line_end, flags, WHITESPACE)
        if not arithmetic and in_line > lettered - lettered_before:
            unlettered += in_line
        begin = line_end + 1
    return lettered / (lettered + unlettered) if lettered + unlettered else np.nan


@kernel
def _is_listed(key: np.uint64, keys: np.ndarray) -> bool:
    place = np.searchsorted(keys, key)
    return bool(place < len(keys) and keys[place] == key)
