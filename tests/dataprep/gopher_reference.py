"""The definitions of the Gopher dialects' quality statistics in the plainest Python,
one document at a time.

What the kernels must agree with exactly, and what `bench` measures them against.
Nothing else uses it. Those of the repetition statistics are in
`repetition_reference.py`.
"""

from __future__ import annotations

import re
from statistics import median
from typing import Any

from gristmill.dataprep.text.unicode_tables import (
    ALPHABETIC_BEYOND_LETTERS,
    DATATROVE_PUNCTUATION,
    ranges,
)
from tests.dataprep import word_cuts_reference
from tests.dataprep.repetition_reference import repetition, segments, share

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
CURATOR_MARKS = ("...", "[...]", "…", "(...)", "[…]", "-»", "read more..", "read more")
NAN = float("nan")

__all__ = ["all_statistics", "quality", "repetition"]


def all_statistics(
    text: str, dialect: str = "dclm", words: list[str] | None = None
) -> dict[str, Any]:
    """`gopher.statistics` of one English text; `words` replaces the dialect's own
    words.
    """
    return {**quality(text, dialect, words), **repetition(text, dialect, words)}


def quality(
    text: str, dialect: str = "dclm", words: list[str] | None = None
) -> dict[str, Any]:
    """Quality statistics of one English text."""
    counted = {
        "dclm": dclm,
        "datatrove": datatrove,
        "dolma": dolma,
        "curator": curator,
        "redpajama": redpajama,
    }
    values = counted[dialect](text, words)
    names = (
        "words",
        "mean_word_length",
        "symbol_word_ratio",
        "bullet_line_ratio",
        "ellipsis_line_ratio",
        "alpha_word_ratio",
        "stop_words",
    )
    return dict(zip(names, values, strict=True))


def dclm(text: str, words: list[str] | None) -> tuple[float, ...]:
    """See `gopher_dclm.py`."""
    tokens = (
        [token for token in re.split("[ \n\r\t\v\f\0]+", text) if token[:1].isalnum()]
        if words is None
        else words
    )
    words = text.split() if words is None else words
    lines = segments(text, "\n")
    symbols = (
        text.count("#") + text.count("...") + text.count(". . .") + text.count("…")
    )
    return (
        len(tokens),
        share(sum(map(len, words)), len(words)),
        share(symbols, len(words)),
        share(sum(line.startswith(("•", "●", "*", "-")) for line in lines), len(lines)),
        share(sum(line.endswith(("...", ". . .", "…")) for line in lines), len(lines)),
        share(sum(any(map(str.isalpha, word)) for word in words), len(words)),
        sum(word.lower() in STOP_WORDS for word in words),
    )


def datatrove(text: str, words: list[str] | None) -> tuple[float, ...]:
    """See `gopher_datatrove.py`."""
    words = word_cuts_reference.spacy_english(text) if words is None else words
    marks = {
        chr(code)
        for first, last in ranges(DATATROVE_PUNCTUATION)
        for code in range(first, last + 1)
    }
    content = [word for word in words if not set(word) <= marks]
    lines = text.splitlines()
    return (
        len(content),
        share(sum(map(len, content)), len(content)),
        share(max(text.count("#"), text.count("...") + text.count("…")), len(words)),
        share(sum(line.lstrip().startswith(("•", "-")) for line in lines), len(lines)),
        share(sum(line.rstrip().endswith(("...", "…")) for line in lines), len(lines)),
        share(sum(any(map(str.isalpha, word)) for word in words), len(words)),
        len(set(STOP_WORDS) & set(words)),
    )


def dolma(text: str, words: list[str] | None) -> tuple[float, ...]:
    """See `gopher_dolma.py`."""
    words = text.split() if words is None else words
    if not text:
        return (0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
    lines = text.split("\n")
    return (
        len(words),
        float(median(map(len, words))) if words else 0.0,
        share(sum("#" in word or "…" in word for word in words), len(words)),
        share(sum(line.startswith(("*", "-")) for line in lines), len(lines)),
        share(sum(line.endswith("…") for line in lines), len(lines)),
        share(sum(any(map(str.isalpha, word)) for word in words), len(words)),
        sum(word in STOP_WORDS for word in words),
    )


def curator(text: str, words: list[str] | None) -> tuple[float, ...]:
    """See `gopher_curator.py`."""
    words = text.split() if words is None else words
    lines = segments(text, "\n")
    beyond = {
        chr(code)
        for first, last in ranges(ALPHABETIC_BEYOND_LETTERS)
        for code in range(first, last + 1)
    }
    symbols = sum(
        word in CURATOR_MARKS or len(re.findall("#+", word)) / len(word) > 0.5
        for word in words
    )
    return (
        len(words),
        share(sum(map(len, words)), len(words)),
        share(symbols, len(words), 1.0),
        share(
            sum(line.startswith(tuple("•‣⁃⁌⁍∙○●◘◦⦾⦿")) for line in lines),
            len(lines),
            1.0,
        ),
        share(
            sum(line.lower().endswith(CURATOR_MARKS) for line in lines), len(lines), 1.0
        ),
        share(
            sum(any(c.isalpha() or c in beyond for c in word) for word in words),
            len(words),
        ),
        sum(word in STOP_WORDS for word in words),
    )


def redpajama(text: str, words: list[str] | None) -> tuple[float, ...]:
    """See `gopher_redpajama.py`; given words are the normalised ones."""
    words = word_cuts_reference.normalized(text).split() if words is None else words
    raw = word_cuts_reference.word_punct(text)
    lines = re.findall(r"[^\n]*\n|[^\n]+$", text)
    symbols = text.count("#") + text.count("...") + text.count("…")
    return (
        len(words),
        round(share(sum(map(len, words)), len(words), NAN), 8),
        round(share(symbols, len(raw), NAN), 8),
        round(
            share(
                sum(line.lstrip().startswith(tuple("•‣▶◀◦■□▪▫–")) for line in lines),
                len(lines),
                NAN,
            ),
            8,
        ),
        round(
            share(
                sum(line.rstrip().endswith(("...", "…")) for line in lines),
                len(lines),
                NAN,
            ),
            8,
        ),
        round(
            share(
                sum(re.search("[a-zA-Z]", word) is not None for word in raw),
                len(raw),
                NAN,
            ),
            8,
        ),
        sum(word in STOP_WORDS for word in raw),
    )
