"""The part of a text that shows why it was found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

SNIPPET_CHARS = 280
BEFORE_HIT = 60
"""Characters of a snippet before the first word that was looked for."""


def pattern_of(words: Iterable[str]) -> re.Pattern[str]:
    """What finds some words in a text, in capitals or not; without any it finds nothing."""
    return re.compile("|".join(map(re.escape, words)) or "(?!)", re.IGNORECASE)


def snippet(text: str, words: Sequence[str], most: int = SNIPPET_CHARS) -> str:
    """The part of a text around the first of some words, on one line; its beginning where it has none of them."""
    hit = pattern_of(words).search(text)
    begin = max(0, hit.start() - BEFORE_HIT) if hit else 0
    if hit and begin and (blank := re.search(r"\s", text[begin : hit.start()])):
        begin += blank.start()  # at a word
    shown = " ".join(text[begin : begin + 2 * most].split())[:most]
    return f"... {shown}" if begin else shown
