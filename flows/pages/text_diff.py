"""Differences of two texts, word by word."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import takewhile
from operator import eq

UNIT = re.compile(r"[^\n.!?]*(?:[\n.!?]+\s*|$)")
"""A line or a sentence, with its end."""
WORD = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
MOST_COMPARED = 1_000_000
"""Words of one text times words of the other; larger passages are marked whole, since
the time grows with it.
"""
Piece = tuple[str, bool]
"""A part of a text, and whether it differs."""
Run = tuple[str, str, bool]
"""Parts of both texts, and whether they differ."""


def differences(before: str, after: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts in pieces. Pieces that do not differ are the same in both, in the same
    order, except for white space.

    Lines and sentences are compared first, then the words of those that differ.
    """
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for unit in _runs(UNIT, math.inf, before, after):
        text, other_text, is_changed = unit
        runs: Iterable[Run] = [unit]
        if is_changed and text and other_text:
            runs = _runs(WORD, MOST_COMPARED, text, other_text)
        for part, other_part, differs in runs:
            for side, addition in zip(pieces, (part, other_part), strict=True):
                is_marked = differs and not addition.isspace()
                if addition and side and side[-1][1] == is_marked:
                    side[-1] = (side[-1][0] + addition, is_marked)
                elif addition:
                    side.append((addition, is_marked))
    return pieces


def _runs(pattern: re.Pattern[str], most: float, *texts: str) -> Iterator[Run]:
    """Runs of two texts that agree or differ, in order; together these are all of both.

    Args:
        pattern: parts that are compared, apart from white space.
        most: product of the numbers of parts beyond which the texts differ as a whole.
        texts: both.
    """
    parts, other_parts = (list(filter(None, pattern.findall(text))) for text in texts)
    ours, theirs = (
        [" ".join(part.split()) for part in side] for side in (parts, other_parts)
    )
    # Equal ends need no search, and nearly equal texts are little else.
    first = len(list(takewhile(bool, map(eq, ours, theirs))))
    ends = (reversed(side[first:]) for side in (ours, theirs))
    last = len(list(takewhile(bool, map(eq, *ends))))
    ours, theirs = ours[first : len(ours) - last], theirs[first : len(theirs) - last]
    changes: Sequence[tuple[str, int, int, int, int]]
    changes = [("replace", 0, len(ours), 0, len(theirs))]
    if len(ours) * len(theirs) <= most:
        changes = SequenceMatcher(None, ours, theirs).get_opcodes()
    yield "".join(parts[:first]), "".join(other_parts[:first]), False
    for kind, *bounds in changes:
        begin, end, other_begin, other_end = (bound + first for bound in bounds)
        text, other_text = parts[begin:end], other_parts[other_begin:other_end]
        yield "".join(text), "".join(other_text), kind != "equal"
    end, other_end = first + len(ours), first + len(theirs)
    yield "".join(parts[end:]), "".join(other_parts[other_end:]), False
