"""A text that is too long for one document, cut into its chapters or into runs of paragraphs.

A cut is before a line, never inside of one, and loses nothing: the parts of a text, joined, are the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

LEAST_CHAPTER = 500
"""Characters: a heading nearer than that to the one before (`CHAPTER I` below `PART I`, a table of contents) begins
nothing of its own."""
LONGEST_HEADING = 80
_UNIT = (
    r"chapter|book|part|canto|act|scene|letter|volume|section|stave|kapitel|buch|teil|band|chapitre|livre|partie|"
    r"acte|sc[èe]ne|cap[íi]tulo|libro|parte|capitolo|hoofdstuk|rozdzia[łl]|глава|часть|книга|том"
)
_WORDS = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth "
    "thirteenth fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth last erstes zweites "
    "drittes premier première deuxième troisième primero segundo tercero первая вторая третья"
).split()
_NUMBER = rf"(?:the\s+)?(?:\d{{1,4}}|[ivxlcdm]{{1,8}}|(?:(?:twenty|thirty|forty|fifty)-)?(?:{'|'.join(_WORDS)}))"
_HEADING = re.compile(
    rf"(?:(?:{_UNIT})\s+{_NUMBER}(?:\s*[.:,—–-].*|\s*)"  # Chapter IV: Of the Mill
    rf"|{_NUMBER}\s+(?:{_UNIT})\.?"  # Erstes Kapitel
    r"|(?:prologue|epilogue|preface|foreword|introduction|afterword|appendix)\.?"
    r"|#{1,3}\s+\S.*"  # Markdown
    r"|第[一二三四五六七八九十百千零〇\d]{1,8}[章回卷节節].*)",
    re.IGNORECASE,
)
_CAPITALS = re.compile(rf"(?:{_UNIT.upper()})\s+(?:\d{{1,4}}|[IVXLCDM]{{1,8}})\s+[^a-z]+")
_ROMAN = re.compile(r"[IVXLC]{1,8}\.?")
_BLANK_LINES = re.compile(r"(?:[ \t]*\r?\n){2,}[ \t]*(?=\S)|\A\s*(?=\S)")


def chapters(text: str) -> list[str]:
    """The chapters of a text, what stands before the first one as the first part; [text] where it has no headings.

    A heading is a short line after a blank one: a word for a part with a number (`Chapter IV`, `BOOK THE FIRST`,
    `Erstes Kapitel`, `第三回`), a Roman number alone, `Prologue` and its kind, or one of Markdown. It begins a
    chapter where it is LEAST_CHAPTER characters or more behind the heading before and ahead of the end.
    """
    found = [start for start in _paragraph_starts(text) if _is_heading(text, start)]
    apart = [start for before, start in pairwise([-LEAST_CHAPTER, *found]) if start - before >= LEAST_CHAPTER]
    return _cut(text, [start for start in apart if len(text) - start >= LEAST_CHAPTER])


def paragraph_runs(text: str, characters: int) -> list[str]:
    """Runs of whole paragraphs of at least so many characters each; the rest, where it has fewer than half, is the
    last run's."""
    begins, begin = [], 0
    for start in _paragraph_starts(text):
        if start - begin >= characters:
            begins.append(start)
            begin = start
    if begins and len(text) - begins[-1] < characters // 2:
        begins.pop()
    return _cut(text, begins)


def heading_of(chapter: str) -> str | None:
    """The line by which a chapter begins, without the spaces around it; None where that is no heading."""
    start = next(_paragraph_starts(chapter), None)
    return _line(chapter, start) if start is not None and _is_heading(chapter, start) else None


def _paragraph_starts(text: str) -> Iterator[int]:
    """Where a line begins that stands after a blank one, or first."""
    return (found.end() for found in _BLANK_LINES.finditer(text))


def _line(text: str, start: int) -> str:
    end = text.find("\n", start)
    return text[start : len(text) if end < 0 else end].strip()


def _is_heading(text: str, start: int) -> bool:
    line = _line(text, start)
    if not line or len(line) > LONGEST_HEADING:
        return False
    return any(form.fullmatch(line) for form in (_HEADING, _CAPITALS, _ROMAN))


def _cut(text: str, begins: Sequence[int]) -> list[str]:
    """The parts between some places; what is nothing but space before the first belongs to it."""
    first = len(text) - len(text.lstrip())
    places = [begin for begin in begins if begin > first]
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]
