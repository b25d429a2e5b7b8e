"""Splitting of a text that is too long for one document into its chapters or into runs
of paragraphs.

Splits are before lines and lossless: the joined parts of a text are the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

LEAST_CHAPTER = 500
"""Shortest chapter in characters: headings closer together (`CHAPTER I` after `PART I`,
a table of contents) do not start a chapter.
"""
LONGEST_HEADING = 80
_UNIT = (
    r"chapter|book|part|canto|act|scene|letter|volume|section|stave|kapitel|buch|teil|band|chapitre|livre|partie|"
    r"acte|sc[èe]ne|cap[íi]tulo|libro|parte|capitolo|hoofdstuk|rozdzia[łl]|глава|часть|книга|том"
)
_WORDS = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty first second third fourth "
    "fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth last erstes "
    "zweites drittes premier première deuxième troisième primero segundo tercero "
    "первая вторая третья"
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
_CAPITALS = re.compile(
    rf"(?:{_UNIT.upper()})\s+(?:\d{{1,4}}|[IVXLCDM]{{1,8}})\s+[^a-z]+"
)
_ROMAN = re.compile(r"[IVXLC]{1,8}\.?")
_BLANK_LINES = re.compile(r"(?:[ \t]*\r?\n){2,}[ \t]*(?=\S)|\A\s*(?=\S)")


def chapters(text: str) -> list[str]:
    """Chapters of a text, with the text before the first one as the first part; [text]
    if it has no headings.

    A heading is a short line after a blank one: a unit with a number (`Chapter IV`,
    `BOOK THE FIRST`, `Erstes Kapitel`, `第三回`), a Roman number alone, `Prologue` and
    similar words, or a Markdown heading. It starts a chapter if it is at least
    LEAST_CHAPTER characters after the previous heading and before the end.
    """
    headings = [start for start in _paragraph_starts(text) if _is_heading(text, start)]
    starts = [
        start
        for before, start in pairwise([-LEAST_CHAPTER, *headings])
        if start - before >= LEAST_CHAPTER
    ]
    return _cut(text, [start for start in starts if len(text) - start >= LEAST_CHAPTER])


def paragraph_runs(text: str, characters: int) -> list[str]:
    """Runs of complete paragraphs of at least `characters` each; a remainder of less
    than half is added to the last run.
    """
    begins = []
    begin = 0
    for start in _paragraph_starts(text):
        if start - begin >= characters:
            begins.append(start)
            begin = start
    if begins and len(text) - begins[-1] < characters // 2:
        begins.pop()
    return _cut(text, begins)


def heading_of(chapter: str) -> str | None:
    """Heading at the start of a chapter, stripped; None if there is none."""
    start = next(_paragraph_starts(chapter), None)
    return (
        _line(chapter, start)
        if start is not None and _is_heading(chapter, start)
        else None
    )


def _paragraph_starts(text: str) -> Iterator[int]:
    """Starts of the first line, and of lines after blank ones."""
    return (blank_lines.end() for blank_lines in _BLANK_LINES.finditer(text))


def _line(text: str, start: int) -> str:
    end = text.find("\n", start)
    return text[start : len(text) if end < 0 else end].strip()


def _is_heading(text: str, start: int) -> bool:
    line = _line(text, start)
    if not line or len(line) > LONGEST_HEADING:
        return False
    return any(form.fullmatch(line) for form in (_HEADING, _CAPITALS, _ROMAN))


def _cut(text: str, begins: Sequence[int]) -> list[str]:
    """Parts between the given starts; leading white space belongs to the first part."""
    first = len(text) - len(text.lstrip())
    places = [begin for begin in begins if begin > first]
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]
