"""Differences of the beginnings of two texts, word by word."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

WORD = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
COMPARED_WORDS = 5_000
"""Words at the beginning of each text that are compared, in about a tenth of a second;
the time grows with their square.
"""
Piece = tuple[str, bool]
"""A part of a text, and whether it differs."""


def differences(before: str, after: str) -> tuple[list[Piece], list[Piece]]:
    """The first COMPARED_WORDS words of both texts in pieces. Pieces that do not differ
    are the same in both, in the same order, except for white space.
    """
    words, other_words = (
        WORD.findall(text)[:COMPARED_WORDS] for text in (before, after)
    )
    stripped = [word.strip() for word in words]
    other_stripped = [word.strip() for word in other_words]
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for kind, begin, end, other_begin, other_end in SequenceMatcher(
        None, stripped, other_stripped
    ).get_opcodes():
        parts = words[begin:end], other_words[other_begin:other_end]
        for side, part in zip(pieces, map("".join, parts), strict=True):
            if part:
                side.append((part, kind != "equal" and not part.isspace()))
    return pieces
