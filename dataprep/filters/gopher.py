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

from typing import get_args

import numpy as np
import pyarrow as pa

from gristmill.core.arrays import Column
from gristmill.dataprep.conservation import LENGTH_EDGES
from gristmill.dataprep.filters import (
    gopher_curator,
    gopher_datatrove,
    gopher_dclm,
    gopher_dolma,
    gopher_redpajama,
)
from gristmill.dataprep.filters.gopher_words import cut_words, stop_words_of
from gristmill.dataprep.filters.repetition import DUPLICATE_NGRAMS, TOP_NGRAMS
from gristmill.dataprep.filters.rule_sets import RuleSet
from gristmill.dataprep.langid.language_codes import Languages
from gristmill.dataprep.text.kernels import text_buffers
from gristmill.dataprep.thresholds import Columns
from gristmill.dataprep.words.language_words import language_names
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
    if any(
        getattr(sections[0], name) != getattr(sections[-1], name)
        for name in GopherRules.model_fields
    ):
        passes = [[section] for section in sections]
    columns: dict[str, np.ndarray] = {}
    for counted in passes:
        quality = [item for item in counted if isinstance(item, GopherQuality)]
        by_script = counted[0].words == "language"
        columns |= statistics(
            rows["text"],
            counted[0],
            language_names(rows) if by_script else rows["language"].to_pylist(),
            quality=bool(quality),
            repetition=len(counted) > len(quality),
            stop_words=quality[0].stop_words if quality else None,
        )
    return columns


RULE_SET = RuleSet(measure, ("language", "script"), {"mean_word_length": LENGTH_EDGES})


def statistics(
    texts: Column,
    counting: GopherRules = DCLM,
    languages: Languages | None = None,
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
        gristmill.dataprep.words.spacy_words.NoSpacyError: `dialect: datatrove` without
            the package spacy.
        gristmill.dataprep.words.language_words.NoTokenizerError: `words: language`
            without what it needs.
    """
    data, offsets = text_buffers(texts)
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
    without_list, unspaced = np.zeros((2, num_texts), bool)
    begin = 0
    while begin < num_texts:
        last = np.searchsorted(offsets, offsets[begin] + BATCH_BYTES, side="right") - 1
        rows = slice(begin, min(max(int(last), begin + 1), num_texts))
        bounds, codes = offsets[begin : rows.stop + 1], text_languages[rows]
        values = quality_values[rows], repetition_values[rows]
        begin = rows.stop
        words = cut_words(data, bounds, counting, codes)
        # DCLM ignores case
        listed = stop_words_of(codes, stop_words, counting.dialect == "dclm")
        if counting.dialect in _MEASURES_OF_TWO_CUTS:
            measure_texts = _MEASURES_OF_TWO_CUTS[counting.dialect]
            measure_texts(words, counting, codes, listed, *values)
        else:
            _MEASURES[counting.dialect](words, listed, *values)
        without_list[rows], unspaced[rows] = listed.languages < 0, words.per_word > 1
    columns: dict[str, np.ndarray] = {}
    if quality:
        columns |= zip(QUALITY_STATISTICS, quality_values.T.copy())
        columns["words"] = columns["words"].astype(np.int64)
        columns["stop_words"][without_list] = np.nan
        columns["mean_word_length"][unspaced] = np.nan
    if repetition:
        columns |= zip(REPETITION_STATISTICS, repetition_values.T.copy())
    return columns
