"""The statistics that Gopher's rules judge a document by, one value per document and
statistic.

The paper (Rae et al. 2021, section A1.1 and table A1) names the rules but not how to
count. Each project that has them counts in its own way, a dialect, and so one threshold
draws five different lines:

| | dclm | datatrove | dolma | curator | redpajama |
|---|---|---|---|---|---|
| words | fastText's tokens that begin with a letter or digit | tokens, not only marks | whitespace | whitespace | lower-case NFD, no marks |
| mean_word_length | mean | mean | median | mean | mean |
| symbols | `#` + `...` + `. . .` + `…` | `#` or `...`+`…` | words with `#`, `…` | words that are marks | `#` + `...` + `…` |
| bullets | `•●*-` | `•-` | `*-` | 12, no `-*` | 10, `–` not `-*` |
| line ends | `... . . . …` | `... …` | `…` | 8 marks | `... …` |
| letters | isalpha | isalpha | isalpha | Alphabetic | a-z A-Z |
| stop words | any case | different ones | as they are | as they are | as they are |
| lines | stripped, not empty | between runs of `\\n` | all | not blank | no such rules |
| first copy of a line | counts | is free | counts | is free | - |
| chars of lines / | those of lines | text | words | those of lines | - |
| n-grams of | words of UAX #29 that begin with a letter or digit | words | words | words | words |
| top n-gram, on ties | longest, twice at least | first | first | first, found in the text | first, twice at least |
| its spaces | no | yes | no | yes | no |
| duplicate n-grams | words covered | later copies, greedy | n-gram masses | later copies + spaces | words covered |
| n-grams / | chars of words | text | masses of all n-grams | text | chars of words |

`gopher_dclm.py` and so on have each definition in full, with its source. NaN stands for
a statistic that a dialect does not have or that says nothing about a text; it passes
every threshold (`thresholds.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
import pyarrow as pa

from gristmill.dataprep.conservation import LENGTH_EDGES
from gristmill.dataprep.filtering import (
    gopher_curator,
    gopher_datatrove,
    gopher_dclm,
    gopher_dolma,
    gopher_redpajama,
)
from gristmill.dataprep.filtering.gopher_words import Texts, cut_words, stop_words_of
from gristmill.dataprep.filtering.repetition import DUPLICATE_NGRAMS, TOP_NGRAMS
from gristmill.dataprep.filtering.rule_sets import RuleSet
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.dataprep.text.unicode_tables import code_point_flags, lower_case
from gristmill.dataprep.words.language_words import language_names, language_words
from gristmill.mixtures.steps.rules import (
    Dialect,
    GopherQuality,
    GopherRepetition,
    GopherRules,
)

QUALITY_STATISTICS = (
    "words",
    "mean_word_length",
    "symbol_word_ratio",
    "bullet_line_ratio",
    "ellipsis_line_ratio",
    "alpha_word_ratio",
    "stop_words",
)
REPETITION_STATISTICS = (
    "duplicate_line_ratio",
    "duplicate_line_char_ratio",
    "duplicate_paragraph_ratio",
    "duplicate_paragraph_char_ratio",
    *(f"top_{n}gram_char_ratio" for n in TOP_NGRAMS),
    *(f"duplicate_{n}gram_char_ratio" for n in DUPLICATE_NGRAMS),
)
"""Statistics of Gopher's two rule sets. `words` is int64; `stop_words`, which can be
NaN, is float64 like the others.
"""

DIALECTS: tuple[Dialect, ...] = get_args(Dialect)
BATCH_BYTES = 500_000
"""Text bytes measured at a time (at least one text), so that their words stay in the
cache.
"""
DCLM = GopherRules()
_MEASURES = {
    "datatrove": gopher_datatrove.measure,
    "dolma": gopher_dolma.measure,
    "curator": gopher_curator.measure,
}
_MEASURES_OF_TWO_CUTS = {
    "dclm": gopher_dclm.measure_segmented,
    "redpajama": gopher_redpajama.measure_normalized,
}
"""Dialects that split a text into words in more than one way."""

Columns = dict[str, np.ndarray]


def measure(rows: pa.Table, *sections: GopherQuality | GopherRepetition) -> Columns:
    """Measure the statistics of one or both Gopher rule sets.

    Args:
        rows: n rows with `text`, `language` (null if unknown) and, for `words:
            language`, `script`.
        sections: the configured sets; two that are counted alike take one pass.

    Returns:
        statistic -> int64 or float64 of shape (n,).
    """
    passes = [list(sections)]
    if not counted_alike(sections[0], sections[-1]):
        passes = [[section] for section in sections]
    columns: Columns = {}
    for counted in passes:
        quality = [item for item in counted if isinstance(item, GopherQuality)]
        columns |= statistics(
            rows["text"],
            counted[0],
            _languages(rows, counted[0]),
            quality=bool(quality),
            repetition=len(counted) > len(quality),
            stop_words=quality[0].stop_words if quality else None,
        )
    return columns


RULE_SET = RuleSet(measure, ("language", "script"), {"mean_word_length": LENGTH_EDGES})


def _languages(rows: pa.Table, counting: GopherRules) -> list[str | None]:
    codes: list[str | None] = rows["language"].to_pylist()
    return language_names(rows) if counting.words == "language" else codes


def counted_alike(first: GopherRules, second: GopherRules) -> bool:
    """Return True if two rule sets need the same counting, so that one pass serves
    both.
    """
    return all(
        getattr(first, name) == getattr(second, name)
        for name in GopherRules.model_fields
    )


def statistics(
    texts: pa.Array | pa.ChunkedArray,
    counting: GopherRules = DCLM,
    languages: Sequence[str | None] | None = None,
    quality: bool = True,
    repetition: bool = True,
    stop_words: tuple[str, ...] | None = None,
) -> Columns:
    """Measure QUALITY_STATISTICS, REPETITION_STATISTICS or both of every text.

    Args:
        texts: n strings; null counts as empty.
        counting: the dialect, its words and the language.
        languages: one code per text, for `language: auto`; None, or a text's None,
            means English.
        stop_words: instead of those of each text's language.

    Returns:
        statistic -> int64 or float64 of shape (n,).

    Raises:
        pa.ArrowInvalid: a text is not UTF-8.
        gristmill.dataprep.words.spacy_words.NoSpacyError: `words: exact` without the
            package spacy.
        gristmill.dataprep.words.language_words.NoTokenizerError: `words: language`
            without what it needs.
    """
    data, offsets = text_buffers(texts)
    if counting.dialect == "dclm" and stop_words is not None:  # DCLM ignores case
        stop_words = tuple(word.lower() for word in stop_words)
    num_texts = len(offsets) - 1
    text_languages = (
        [counting.language] * num_texts
        if counting.language != "auto"
        else languages or [None] * num_texts
    )
    quality_values = np.zeros((num_texts if quality else 0, len(QUALITY_STATISTICS)))
    repetition_values = np.zeros(
        (num_texts if repetition else 0, len(REPETITION_STATISTICS))
    )
    for rows in _batches(offsets):
        _measure(
            data,
            offsets[rows.start : rows.stop + 1],
            counting,
            text_languages[rows],
            quality_values[rows],
            repetition_values[rows],
            stop_words,
        )
    columns: Columns = {}
    if quality:
        columns |= zip(QUALITY_STATISTICS, quality_values.T.copy())
        columns["words"] = columns["words"].astype(np.int64)
    if repetition:
        columns |= zip(REPETITION_STATISTICS, repetition_values.T.copy())
    return columns


def _batches(offsets: np.ndarray) -> Iterator[slice]:
    begin, number = 0, len(offsets) - 1
    while begin < number:
        end = (
            int(np.searchsorted(offsets, offsets[begin] + BATCH_BYTES, side="right"))
            - 1
        )
        end = min(max(end, begin + 1), number)
        yield slice(begin, end)
        begin = end


def _measure(
    data: np.ndarray,
    offsets: np.ndarray,
    counting: GopherRules,
    languages: Sequence[str | None],
    quality: np.ndarray,
    repetition: np.ndarray,
    custom_stop_words: tuple[str, ...] | None,
) -> None:
    """Write the rows of a batch; an array of length 0 is not written."""
    if counting.words == "language":
        segmented = language_words(data, offsets, languages)
        texts = Texts(
            segmented.data,
            segmented.offsets,
            code_point_flags(),
            segmented.words,
            segmented.places,
            np.ones(len(languages), np.uint8),
        )
    else:
        texts = Texts(
            data,
            offsets,
            code_point_flags(),
            *cut_words(data, offsets, counting, languages),
        )
    stop_words = stop_words_of(languages, custom_stop_words)
    if counting.dialect in _MEASURES_OF_TWO_CUTS:
        measure = _MEASURES_OF_TWO_CUTS[counting.dialect]
        measure(texts, counting, languages, stop_words, quality, repetition)
    else:
        _MEASURES[counting.dialect](
            texts, stop_words, lower_case(), quality, repetition
        )
    if len(quality):
        quality[stop_words.languages < 0, QUALITY_STATISTICS.index("stop_words")] = (
            np.nan
        )
        quality[texts.per_word > 1, QUALITY_STATISTICS.index("mean_word_length")] = (
            np.nan
        )
