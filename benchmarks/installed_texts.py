"""Real, distinct text that every checkout has: the documentation of installed packages.

A paragraph is taken once, at its first occurrence, so that no two pieces share one. The
amount of text depends on the installed packages.
"""

from __future__ import annotations

import os
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import chain, count, islice
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
DEBIAN_DOCUMENTATION = "/usr/share/doc"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
PARAGRAPH_SENTENCES = 5
CORPUS = "documentation of installed packages"
"""Name in notes of `documentation` and `paragraphs`."""
PAGE_CHARACTERS = 2500


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


def pages(number: int, first_texts: Iterable[str] = ()) -> list[str]:
    """Return the first pieces of some texts, and then of documentation, in the order of
    the files' names; after the last one, pages of the same sentences, shuffled across
    all files by seeds.
    """
    return _first(_pages(first_texts), number)


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


def _pages(first_texts: Iterable[str]) -> Iterator[str]:
    seen: set[int] = set()
    sentences: list[str] = []
    packages = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    files = _files((*packages, DEBIAN_DOCUMENTATION), SUFFIXES)
    for suffix, text in chain((("", text) for text in first_texts), files):
        texts = [TAGS.sub("", text) if suffix == ".html" else text]
        prose = _prose(DOCSTRING.findall(text) if suffix == ".py" else texts)
        for page in _pieces(prose, seen, PAGE_CHARACTERS):
            yield page
            sentences.extend(SENTENCE_END.split(page))
    for seed in count():
        random.Random(seed).shuffle(sentences)
        places = range(0, len(sentences), PARAGRAPH_SENTENCES)
        shuffled = (
            " ".join(sentences[place : place + PARAGRAPH_SENTENCES]) for place in places
        )
        yield from _pieces(shuffled, set(), PAGE_CHARACTERS)


def _prose(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for paragraph in BLANK_LINES.split(text):
            yield " ".join(paragraph.split())


def _pieces(
    all_paragraphs: Iterable[str], seen: set[int], characters: int = PIECE_CHARACTERS
) -> Iterator[str]:
    """Join new paragraphs to pieces; the last one may be shorter."""
    piece, size = list[str](), 0
    for paragraph in all_paragraphs:
        if not SHORTEST <= len(paragraph) <= LONGEST or hash(paragraph) in seen:
            continue
        seen.add(hash(paragraph))
        piece.append(paragraph)
        size += len(paragraph)
        if size >= characters:
            yield "\n".join(piece)
            piece, size = [], 0
    if size >= characters // 4:
        yield "\n".join(piece)
