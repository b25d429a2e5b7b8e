"""Pages of JSONL for whole chains: real paragraphs put together by seeds, with what a crawl has besides good prose.

Page k is a function of k alone. Most are prose of the public-domain books beside the repository (without them: of
sentences made up of words); a tenth are near copies of an earlier page, some are equal to one, and of every rule and
language there are some that it drops.
"""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.checkout import data_folder
from benchmarks.dataprep.rules import prose_texts

FILE_DOCUMENTS = 5000
"""Pages of a file: 15 MB."""
MEDIAN_BYTES = 2400
"""Of prose: 20,000 pages have about 61 MB."""
SHORTEST, LONGEST = 80, 1500
"""Characters of a paragraph."""
MADE_UP_TEXTS = 4000
MOST_EDITS = 6
"""Words that are replaced in a near copy."""
KINDS = {
    "prose": 0.78,
    "near copy": 0.1,
    "copy": 0.02,
    "list": 0.03,
    "repeated": 0.02,
    "code": 0.02,
    "placeholder": 0.01,
    "other language": 0.02,
}
"""Kind of page -> its share."""
OTHER_LANGUAGES = (
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt und "
    "sollen einander im Geiste der Brüderlichkeit begegnen. ",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
    "conscience et doivent agir les uns envers les autres dans un esprit de fraternité. ",
    "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón y "
    "conciencia, deben comportarse fraternalmente los unos con los otros. ",
)
"""The first article of the Universal Declaration of Human Rights."""


@dataclass(frozen=True)
class Corpus:
    """Files of pages.

    Attributes:
        folder: where they lie, and nothing else.
        documents: how many.
        text_bytes: of their texts (UTF-8).
    """

    folder: Path
    documents: int
    text_bytes: int


def write_corpus(folder: Path, documents: int) -> Corpus:
    """Write pages 0 to documents - 1, unless they are there."""
    done = folder.with_suffix(".json")
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pages, text_bytes = Pages(), 0
        for first in range(0, documents, FILE_DOCUMENTS):
            with open(folder / f"{first // FILE_DOCUMENTS:05d}.jsonl", "w", encoding="utf-8") as sink:
                for number in range(first, min(first + FILE_DOCUMENTS, documents)):
                    text = pages.text(number)
                    text_bytes += len(text.encode())
                    sink.write(json.dumps({"id": str(number), "text": text}, ensure_ascii=False) + "\n")
        done.write_text(json.dumps({"documents": documents, "text_bytes": text_bytes}))
    return Corpus(folder, **json.loads(done.read_text()))


def remove_corpus(corpus: Corpus) -> None:
    """Make room."""
    shutil.rmtree(corpus.folder)
    corpus.folder.with_suffix(".json").unlink()


class Pages:
    """Makes pages."""

    def __init__(self) -> None:
        self._paragraphs = paragraphs()

    def text(self, number: int) -> str:
        """The text of a page."""
        kind, source = kind_of(number), random.Random(number)
        if kind in ("near copy", "copy"):
            original = self.text(source.randrange(number))
            return edited(original, source) if kind == "near copy" else original
        if kind == "list":
            return "\n".join(" ".join(self._words(source)[:3]) for _ in range(source.randint(10, 60)))
        if kind == "repeated":
            return "\n".join([source.choice(self._paragraphs)] * source.randint(3, 12))
        if kind == "other language":
            return source.choice(OTHER_LANGUAGES) * source.randint(3, 12)
        body = self._prose(source, number)
        if kind == "code":
            return f"{body}\nfunction run() {{ return {number}; }}"
        return f"{body}\nLorem ipsum dolor sit amet." if kind == "placeholder" else body

    def _prose(self, source: random.Random, number: int) -> str:
        """Some paragraphs, and a line with names and numbers that no other page has."""
        wanted, found = source.lognormvariate(0, 0.6) * MEDIAN_BYTES, list[str]()
        while sum(map(len, found)) < wanted:
            found.append(source.choice(self._paragraphs))
        name = "".join(source.choices("abcdefghijklmnopqrstuvwxyz", k=8)).capitalize()
        found.insert(
            source.randint(0, len(found)),
            f"Written by {name}, and read {source.randrange(10**6)} times "
            f"since number {number} of this collection came out.",
        )
        return "\n".join(found)

    def _words(self, source: random.Random) -> Sequence[str]:
        return source.choice(self._paragraphs).split()


def kind_of(number: int) -> str:
    """What kind a page is of; the first is prose."""
    (kind,) = random.Random(f"kind of {number}").choices(list(KINDS), list(KINDS.values())) if number else ("prose",)
    return kind


def edited(text: str, source: random.Random) -> str:
    """A near copy: some words are others."""
    lines = [line.split(" ") for line in text.split("\n")]
    for _ in range(source.randint(1, MOST_EDITS)):
        line = source.choice(lines)
        line[source.randrange(len(line))] = f"word{source.randrange(1000)}"
    return "\n".join(map(" ".join, lines))


def paragraphs() -> list[str]:
    """What pages are made of."""
    books = data_folder() / "text" / "books.jsonl.zst"
    if not books.exists():
        return [line for text in prose_texts(MADE_UP_TEXTS) for line in text.split("\n")]
    import zstandard

    found = []
    with books.open("rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8"):
            pieces = (" ".join(piece.split()) for piece in re.split(r"\n\s*\n", json.loads(line)["text"]))
            found += [piece for piece in pieces if SHORTEST <= len(piece) <= LONGEST]
    return found
