"""Columns of each rule set, and the edges of their histograms.

Code that only needs the columns imports no kernel. Each module of rules fills the
columns that it defines here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gristmill.dataprep.conservation import COUNT_EDGES, LENGTH_EDGES, SHARE_EDGES

Edges = Sequence[float]

TOP_NGRAMS = (2, 3, 4)
DUPLICATE_NGRAMS = (5, 6, 7, 8, 9, 10)
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
C4_STATISTICS = ("document_characters", "sentences", "lorem_ipsum", "curly_brackets")
FINEWEB_STATISTICS = (
    "filled_lines",
    "terminal_line_ratio",
    "short_line_ratio",
    "repeated_line_char_ratio",
    "newline_word_ratio",
)
RUNNING_TEXT_STATISTICS = (
    "placeholder_phrases",
    "lettered_word_ratio",
    "eflaw",
    "function_word_ratio",
    "stray_determiner_ratio",
)
CURATOR_SHARES = (
    "non_alphanumeric_ratio",
    "digit_ratio",
    "url_char_ratio",
    "whitespace_ratio",
    "bracket_ratio",
    "boilerplate_paragraph_ratio",
    "unended_line_ratio",
)
CODE_INTEGERS = (
    "generated_markers",
    "minified",
    "code_lines",
    "longest_encoded_characters",
    "code_tokens",
)
"""Columns of `code` that are whole numbers and never null (int64); all its others are
float64.
"""
CODE_COUNTS = (
    *CODE_INTEGERS,
    "xml_header",
    "data_lines",
    "data_characters",
    "longest_line_characters",
    "mean_line_characters",
    "longest_markup_line_characters",
    "html_visible_characters",
)
CODE_SHARES = (
    "alphanumeric_ratio",
    "alphabetic_ratio",
    "encoded_ratio",
    "html_visible_ratio",
)
URL_STATISTICS = (
    "url_blocked_domain",
    "url_blocked_page",
    "url_hard_words",
    "url_soft_words",
    "url_strict_words",
)


def shares(*names: str) -> dict[str, Edges]:
    """Return the histogram edges of columns between 0 and 1."""
    return dict.fromkeys(names, SHARE_EDGES)


def counts(*names: str) -> dict[str, Edges]:
    """Return the histogram edges of columns of whole numbers."""
    return dict.fromkeys(names, COUNT_EDGES)


RULE_COLUMNS: Mapping[str, Mapping[str, Edges]] = {
    "gopher_quality": {
        **shares(*QUALITY_STATISTICS),
        **counts("words", "stop_words"),
        "mean_word_length": LENGTH_EDGES,
    },
    "gopher_repetition": shares(*REPETITION_STATISTICS),
    "c4": counts(*C4_STATISTICS),
    "mc4": counts("long_paragraphs"),
    "fineweb": {**shares(*FINEWEB_STATISTICS), **counts("filled_lines")},
    "curator": {**shares(*CURATOR_SHARES), **counts("longest_word_characters")},
    "running_text": {
        **shares(*RUNNING_TEXT_STATISTICS),
        **counts("placeholder_phrases"),
        "eflaw": LENGTH_EDGES,
    },
    "code": {**shares(*CODE_SHARES), **counts(*CODE_COUNTS)},
    "urls": counts(*URL_STATISTICS),
    "bad_words": {**counts("bad_words"), **shares("bad_word_ratio")},
    "toxicity": shares("toxicity"),
}
"""Rule set -> column -> the edges of its histogram."""


def edges(statistic: str) -> Edges:
    """Return the histogram edges of a column."""
    return next(
        columns[statistic] for columns in RULE_COLUMNS.values() if statistic in columns
    )
