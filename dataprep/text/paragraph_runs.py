"""Splitting of a text that is too long for one document into runs of paragraphs.

Splits are before lines and lossless: the joined parts of a text are the text.
"""

from __future__ import annotations

import re
from itertools import pairwise

_BLANK_LINES = re.compile(r"(?:[ \t]*\r?\n){2,}[ \t]*(?=\S)|\A\s*(?=\S)")


def paragraph_runs(text: str, characters: int) -> list[str]:
    """Runs of complete paragraphs of at least `characters` each; a remainder of less
    than half is added to the last run.
    """
    begins = []
    begin = 0
    for blank_lines in _BLANK_LINES.finditer(text):
        if blank_lines.end() - begin >= characters:
            begin = blank_lines.end()
            begins.append(begin)
    if begins and len(text) - begins[-1] < characters // 2:
        begins.pop()
    # leading white space belongs to the first part
    first = len(text) - len(text.lstrip())
    places = [begin for begin in begins if begin > first]
    return [text[start:end] for start, end in pairwise([0, *places, len(text)])]
