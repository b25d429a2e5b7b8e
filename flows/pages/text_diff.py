"""Differences of two texts, word by word."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

UNIT = re.compile(r"[^\n.!?]*(?:[\n.!?]+\s*|$)")
"""A line or a sentence, with its end."""
WORD = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
MOST_COMPARED = 1_000_000
"""Words of one text times words of the other; larger passages are marked whole, since
the time grows with it.
"""
Piece = tuple[str, bool]
"""A part of a text, and whether it differs."""
Run = tuple[int, int, int, int, bool]
"""Begin and end in either sequence, and whether they differ there."""


def differences(before: str, after: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts in pieces. Pieces that do not differ are the same in both, in the same
    order, except for white space.

    Lines and sentences are compared first, then the words of those that differ.
    """
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    units, other_units = _split(UNIT, before), _split(UNIT, after)
    for begin, end, other_begin, other_end, differs in _runs(units, other_units):
        text, other_text = (
            "".join(units[begin:end]),
            "".join(other_units[other_begin:other_end]),
        )
        if differs and text and other_text:
            _compare_words(text, other_text, pieces)
        else:
            _add(pieces, text, other_text, differs)
    return pieces


def _compare_words(
    text: str, other_text: str, pieces: tuple[list[Piece], list[Piece]]
) -> None:
    words, other_words = _split(WORD, text), _split(WORD, other_text)
    for begin, end, other_begin, other_end, differs in _runs(
        words, other_words, MOST_COMPARED
    ):
        _add(
            pieces,
            "".join(words[begin:end]),
            "".join(other_words[other_begin:other_end]),
            differs,
        )


def _split(pattern: re.Pattern[str], text: str) -> list[str]:
    return [part for part in pattern.findall(text) if part]


def _runs(
    parts: Sequence[str], other_parts: Sequence[str], most: int | None = None
) -> Iterator[Run]:
    """Runs of two sequences that agree or differ, in order; together these are all of
    both.

    Args:
        parts, other_parts: compared apart from white space.
        most: product of lengths beyond which they differ as a whole.
    """
    ours = [" ".join(part.split()) for part in parts]
    theirs = [" ".join(part.split()) for part in other_parts]
    shorter = min(len(ours), len(theirs))
    # Equal ends need no search, and nearly equal texts are little else.
    first = next(
        (index for index in range(shorter) if ours[index] != theirs[index]), shorter
    )
    last = next(
        (
            index
            for index in range(shorter - first)
            if ours[-1 - index] != theirs[-1 - index]
        ),
        shorter - first,
    )
    end, other_end = len(ours) - last, len(theirs) - last
    yield 0, first, 0, first, False
    if most is not None and (end - first) * (other_end - first) > most:
        yield first, end, first, other_end, True
    else:
        matcher = SequenceMatcher(None, ours[first:end], theirs[first:other_end])
        for kind, *bounds in matcher.get_opcodes():
            begin, stop, other_begin, other_stop = (bound + first for bound in bounds)
            yield begin, stop, other_begin, other_stop, kind != "equal"
    yield end, len(ours), other_end, len(theirs), False


def _add(
    pieces: tuple[list[Piece], list[Piece]], text: str, other_text: str, differs: bool
) -> None:
    """Add a text to each side; it joins the last piece of the same kind."""
    for side, addition in zip(pieces, (text, other_text), strict=True):
        is_marked = differs and not addition.isspace()
        if addition and side and side[-1][1] == is_marked:
            side[-1] = (side[-1][0] + addition, is_marked)
        elif addition:
            side.append((addition, is_marked))
