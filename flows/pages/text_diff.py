"""Two texts beside each other, word by word: what each has that the other has not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

UNIT = re.compile(r"[^\n.!?]*(?:[\n.!?]+\s*|$)")
"""A line or a sentence, with what ends it."""
WORD = re.compile(r"\w+\s*|[^\w\s]\s*|\s+")
MOST_COMPARED = 1_000_000
"""Words of the one times words of the other; passages beyond are marked whole, since the time grows with it."""
Piece = tuple[str, bool]
"""A part of a text, and whether it differs."""
Span = tuple[int, int, int, int, bool]
"""Begin and end in either sequence, and whether they differ there."""


def differences(before: str, after: str) -> tuple[list[Piece], list[Piece]]:
    """Both texts in pieces. What does not differ is the same in both, in the same order, but for white space.

    Lines and sentences are compared first, then the words of those that differ.
    """
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    ours, theirs = _split(UNIT, before), _split(UNIT, after)
    for begin, end, other_begin, other_end, differs in _spans(ours, theirs):
        one, other = "".join(ours[begin:end]), "".join(theirs[other_begin:other_end])
        if differs and one and other:
            _compare_words(one, other, pieces)
        else:
            _add(pieces, one, other, differs)
    return pieces


def _compare_words(one: str, other: str, pieces: tuple[list[Piece], list[Piece]]) -> None:
    words, others = _split(WORD, one), _split(WORD, other)
    for begin, end, other_begin, other_end, differs in _spans(words, others, MOST_COMPARED):
        _add(pieces, "".join(words[begin:end]), "".join(others[other_begin:other_end]), differs)


def _split(pattern: re.Pattern[str], text: str) -> list[str]:
    return [found for found in pattern.findall(text) if found]


def _spans(ours: Sequence[str], theirs: Sequence[str], most: int | None = None) -> Iterator[Span]:
    """Where two sequences agree and where they do not, in their order; together these are all of both.

    Args:
        most: entries of the one times entries of the other, beyond which they differ as a whole.
    """
    ours, theirs = ([" ".join(part.split()) for part in parts] for parts in (ours, theirs))
    least = min(len(ours), len(theirs))
    # What is equal at both ends needs no search, and texts that are nearly equal are little else.
    first = next((place for place in range(least) if ours[place] != theirs[place]), least)
    last = next((place for place in range(least - first) if ours[-1 - place] != theirs[-1 - place]), least - first)
    end, other_end = len(ours) - last, len(theirs) - last
    yield 0, first, 0, first, False
    if most is not None and (end - first) * (other_end - first) > most:
        yield first, end, first, other_end, True
    else:
        inner = SequenceMatcher(None, ours[first:end], theirs[first:other_end])
        for kind, *places in inner.get_opcodes():
            one, two, three, four = (place + first for place in places)
            yield one, two, three, four, kind != "equal"
    yield end, len(ours), other_end, len(theirs), False


def _add(pieces: tuple[list[Piece], list[Piece]], one: str, other: str, differs: bool) -> None:
    for side, text in zip(pieces, (one, other), strict=True):
        is_marked = differs and not text.isspace()
        if text and side and side[-1][1] == is_marked:
            side[-1] = (side[-1][0] + text, is_marked)
        elif text:
            side.append((text, is_marked))
