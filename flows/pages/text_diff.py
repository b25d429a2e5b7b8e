"""Differences of two texts, word by word."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

WORD = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
COMPARED_WORDS = 5_000
"""Words at the beginning of each text that are compared, in about a tenth of a
second; the time grows with their square.
"""
Piece = tuple[str, bool]
"""A part of a text, and whether it differs."""


def differences(before: str, after: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts in pieces. Pieces that do not differ are the same in both, in the same
    order, except for white space and for what follows COMPARED_WORDS.
    """
    words, other_words = WORD.findall(before), WORD.findall(after)
    matcher = SequenceMatcher(
        None,
        [word.strip() for word in words[:COMPARED_WORDS]],
        [word.strip() for word in other_words[:COMPARED_WORDS]],
    )
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for kind, begin, end, other_begin, other_end in [
        *matcher.get_opcodes(),
        ("equal", COMPARED_WORDS, len(words), COMPARED_WORDS, len(other_words)),
    ]:
        parts = words[begin:end], other_words[other_begin:other_end]
        for side, part in zip(pieces, map("".join, parts), strict=True):
            if part:
                side.append((part, kind != "equal" and not part.isspace()))
    return pieces
