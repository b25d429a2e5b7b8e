"""Real, distinct text that every checkout has: the docstrings in the modules of installed packages.

A paragraph is taken once, wherever it stands first, so that no two pieces share one. What there is depends on what is
installed.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

DOCSTRING = re.compile(r'(?:\A(?:#[^\n]*\n|\s)*|:[ \t]*\n\s*)[rRuU]?"""(.*?)"""', re.DOTALL)
"""After the head of a function or class, or at the beginning of a module."""
BLANK_LINES = re.compile(r"\n\s*\n")
SHORTEST, LONGEST = 80, 1500
"""Characters of a paragraph."""
PIECE_CHARACTERS = 1500
CORPUS = "documentation of installed packages"
"""Its name in notes."""


def documentation(pieces: int) -> list[str]:
    """The first pieces of documentation, in the order of the files' names: some paragraphs each, of one module.

    Raises:
        ValueError: the installed packages have fewer.
    """
    texts = list(islice(_documentation(), pieces))
    if len(texts) < pieces:
        raise ValueError(f"the packages installed here have {len(texts)} pieces of documentation, not {pieces}")
    return texts


def modules() -> Iterator[str]:
    """The source of each module, in the order of the files' names; the standard library's first."""
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(folder).rglob("*.py")):
            try:
                yield path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue  # some packages ship modules in other encodings to test with


def _documentation() -> Iterator[str]:
    known: set[int] = set()
    for module in modules():
        paragraphs, size = list[str](), 0
        for docstring in DOCSTRING.findall(module):
            for paragraph in map(_one_line, BLANK_LINES.split(docstring)):
                if not SHORTEST <= len(paragraph) <= LONGEST or hash(paragraph) in known:
                    continue
                known.add(hash(paragraph))
                paragraphs.append(paragraph)
                size += len(paragraph)
                if size >= PIECE_CHARACTERS:
                    yield "\n".join(paragraphs)
                    paragraphs, size = [], 0
        if size >= PIECE_CHARACTERS // 4:
            yield "\n".join(paragraphs)


def _one_line(paragraph: str) -> str:
    return " ".join(paragraph.split())
