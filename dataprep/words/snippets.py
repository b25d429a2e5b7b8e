"""Snippets: the part of a text around a search hit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

SNIPPET_CHARS = 280
BEFORE_HIT = 60
"""Characters of a snippet before the first search term."""


def pattern_of(words: Iterable[str]) -> re.Pattern[str]:
    """Case-insensitive pattern of any of the words; without words it matches
    nothing.
    """
    return re.compile("|".join(map(re.escape, words)) or "(?!)", re.IGNORECASE)


def snippet(text: str, words: Sequence[str], most: int = SNIPPET_CHARS) -> str:
    """Part of a text around the first of some words, on one line; the start of the text
    without a hit.
    """
    hit = pattern_of(words).search(text)
    begin = max(0, hit.start() - BEFORE_HIT) if hit else 0
    if hit and begin and (blank := re.search(r"\s", text[begin : hit.start()])):
        begin += blank.start()  # start at a word
    line = " ".join(text[begin : begin + 2 * most].split())[:most]
    return f"... {line}" if begin else line
