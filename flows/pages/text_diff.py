"""Differences of two texts, word by word."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from itertools import takewhile
from operator import eq

WORD = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
COMPARED_WORDS = 5_000
"""Words at the beginning of each text that are aligned, in about a tenth of a second;
the time grows with their square.
"""
Piece = tuple[str, bool]
"""A part of a text, and whether it differs."""


def differences(before: str, after: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts in pieces. Pieces that do not differ are the same in both, in the same
    order, except for white space. What follows COMPARED_WORDS differs up to the words
    in which both texts end.
    """
    words, other_words = WORD.findall(before), WORD.findall(after)
    ours, theirs = ([word.strip() for word in side] for side in (words, other_words))
    matcher = SequenceMatcher(None, ours[:COMPARED_WORDS], theirs[:COMPARED_WORDS])
    ends = (reversed(side[COMPARED_WORDS:]) for side in (ours, theirs))
    num_shared = len(list(takewhile(bool, map(eq, *ends))))
    rest, other_rest = len(words) - num_shared, len(other_words) - num_shared
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for kind, begin, end, other_begin, other_end in [
        *matcher.get_opcodes(),
        ("replace", COMPARED_WORDS, rest, COMPARED_WORDS, other_rest),
        ("equal", rest, len(words), other_rest, len(other_words)),
    ]:
        parts = words[begin:end], other_words[other_begin:other_end]
        for side, part in zip(pieces, map("".join, parts), strict=True):
            if part:
                side.append((part, kind != "equal" and not part.isspace()))
    return pieces
