"""Real, distinct text that every checkout has: documentation and sources of installed
packages.

A paragraph is taken once, at its first occurrence, so that no two pieces share one. The
amount of text depends on the installed packages.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

DOCSTRING = re.compile(
    r'(?:\A(?:#[^\n]*\n|\s)*|:[ \t]*\n\s*)[rRuU]?"""(.*?)"""', re.DOTALL
)
"""Docstring after the head of a function or class, or at the beginning of a module."""
BLANK_LINES = re.compile(r"\n\s*\n")
TAGS = re.compile(r"<(script|style)\b.*?</\1>|<[^<>]*>", re.DOTALL)
SHORTEST, LONGEST = 80, 1500
"""Characters of a paragraph."""
PIECE_CHARACTERS = 1500
SUFFIXES = (".py", ".rst", ".md", ".txt", ".html")
SOURCE_SUFFIXES = (
    ".py",
    ".pyi",
    ".h",
    ".hpp",
    ".c",
    ".cc",
    ".cpp",
    ".cu",
    ".cuh",
    ".go",
    ".java",
    ".js",
    ".ts",
    ".pl",
    ".pm",
    ".tcl",
    ".vim",
)
DEBIAN_DOCUMENTATION = "/usr/share/doc"
SYSTEM_SOURCES = ("/usr/include", "/usr/share", "/usr/lib")
GO_MODULES = "~/go/pkg/mod"
"""Default folder of Go's modules."""
CORPUS = "documentation of installed packages"
"""Name in notes of `documentation` and `paragraphs`."""
PAGES_CORPUS = "documentation and sources of installed packages"
"""Name in notes of `pages`."""


def documentation(pieces: int) -> list[str]:
    """Return the first pieces of docstrings, in the order of the files' names: some
    paragraphs each, of one module.

    Raises:
        ValueError: the installed packages have fewer.
    """
    return _first(_documentation(), pieces)


def paragraphs(number: int, words_each: int) -> list[str]:
    """Return the first paragraphs of docstrings with at least `words_each` words, cut
    to these.

    Raises:
        ValueError: the installed packages have fewer.
    """
    lines = (line.split() for piece in _documentation() for line in piece.split("\n"))
    return _first(
        (" ".join(words[:words_each]) for words in lines if len(words) >= words_each),
        number,
    )


def pages(number: int) -> list[str]:
    """Return the first pieces of documentation and of sources, in the order of the
    files' names.

    Raises:
        ValueError: the installed packages have fewer.
    """
    return _first(_pages(), number)


def modules() -> Iterator[str]:
    """Return the source of each module, in the order of the files' names; the standard
    library's first.
    """
    folders = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    return (text for _, text in _files(folders, (".py",)))


def _files(
    folders: Iterable[str], suffixes: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Return the suffix and the text of each file."""
    for top in folders:
        for folder, subfolders, names in os.walk(top):
            subfolders.sort()
            for path in (
                Path(folder, name) for name in sorted(names) if name.endswith(suffixes)
            ):
                try:
                    yield path.suffix, path.read_text(encoding="utf-8")
                except (UnicodeDecodeError, OSError):
                    continue  # some packages ship files in other encodings to test with


def _first(texts: Iterator[str], number: int) -> list[str]:
    first = list(islice(texts, number))
    if len(first) < number:
        raise ValueError(
            f"the packages installed here have {len(first)} such texts, not {number}"
        )
    return first


def _documentation() -> Iterator[str]:
    seen: set[int] = set()
    for module in modules():
        yield from _pieces(_prose(DOCSTRING.findall(module)), seen)


def _pages() -> Iterator[str]:
    """Return the documentation of each file, and as many pieces of source and one
    more; then all other sources.
    """
    seen: set[int] = set()
    packages = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    for suffix, text in _files((*packages, DEBIAN_DOCUMENTATION), SUFFIXES):
        if suffix != ".py":
            yield from _pieces(
                _prose([TAGS.sub("", text) if suffix == ".html" else text]), seen
            )
            continue
        prose = list(_pieces(_prose(DOCSTRING.findall(text)), seen))
        yield from prose
        yield from islice(
            _pieces(BLANK_LINES.split(DOCSTRING.sub("", text)), seen), len(prose) + 1
        )
    others = (*packages, *SYSTEM_SOURCES, str(Path(GO_MODULES).expanduser()))
    for _, text in _files(others, SOURCE_SUFFIXES):
        yield from _pieces(BLANK_LINES.split(text), seen)


def _prose(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for paragraph in BLANK_LINES.split(text):
            yield " ".join(paragraph.split())


def _pieces(all_paragraphs: Iterable[str], seen: set[int]) -> Iterator[str]:
    """Join new paragraphs to pieces; the last one may be shorter."""
    piece, size = list[str](), 0
    for paragraph in all_paragraphs:
        if not SHORTEST <= len(paragraph) <= LONGEST or hash(paragraph) in seen:
            continue
        seen.add(hash(paragraph))
        piece.append(paragraph)
        size += len(paragraph)
        if size >= PIECE_CHARACTERS:
            yield "\n".join(piece)
            piece, size = [], 0
    if size >= PIECE_CHARACTERS // 4:
        yield "\n".join(piece)
