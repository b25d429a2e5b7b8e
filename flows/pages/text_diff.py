"""Differences of the beginnings of two texts, word by word."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

from gristmill.flows.pages.page_elements import Span

WORD = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
COMPARED_WORDS = 5_000
"""Words at the beginning of each text that are compared, in about a tenth of a second;
the time grows with their square.
"""


def word_diff(before: str, after: str) -> list[Span]:
    """The first COMPARED_WORDS words of both texts as one: words of both, removed and
    added ones. White space makes no difference.
    """
    words, new_words = (WORD.findall(text)[:COMPARED_WORDS] for text in (before, after))
    stripped, new_stripped = (
        [word.strip() for word in side] for side in (words, new_words)
    )
    spans = []
    matcher = SequenceMatcher(None, stripped, new_stripped)
    for kind, begin, end, new_begin, new_end in matcher.get_opcodes():
        added = "".join(new_words[new_begin:new_end])
        if kind == "equal":
            spans.append(Span(added))
            continue
        removed = "".join(words[begin:end])
        spans += [Span(removed, "removed"), Span(added, "added")]
    return [span for span in spans if span.text.strip() or not span.mark]
