"""Pages of JSONL for whole chains: real prose, and the rejects of a crawl.

Page k is a function of k, the public test data and the installed packages: the prose of
the former comes first where it is present, then the documentation of the latter, and
beyond it the same sentences in another order; a tenth are near copies of an earlier
page, some equal one, and every rule and the language step drop some.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from benchmarks import installed_texts, public_data
from benchmarks.dataprep.reading import make_pages, make_warc

FILE_DOCUMENTS = 5000
"""Pages of a file, of 14 MB."""
CORPUS = "public prose and documentation of installed packages, some in another order"
"""Name in notes."""
ARCHIVE_DOCUMENTS = 500
"""Pages of a web archive, of 20 MB of HTML."""
MOST_EDITS = 6
"""Most words that are replaced in a near copy."""
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
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit "
    "Vernunft und Gewissen begabt und "
    "sollen einander im Geiste der Brüderlichkeit begegnen. ",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont "
    "doués de raison et de conscience et doivent agir les uns envers les autres dans "
    "un esprit de fraternité. ",
    "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, "
    "dotados como están de razón y "
    "conciencia, deben comportarse fraternalmente los unos con los otros. ",
)
"""The first article of the Universal Declaration of Human Rights."""


@dataclass(frozen=True)
class Corpus:
    """Files of pages.

    Attributes:
        folder: of the files alone.
        documents: number of pages.
        text_bytes: of their texts (UTF-8).
    """

    folder: Path
    documents: int
    text_bytes: int


def write_corpus(folder: Path, documents: int) -> Corpus:
    """Write pages 0 to documents - 1, unless they exist."""
    record = folder.with_suffix(".json")
    if not record.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pages, text_bytes = Pages(documents), 0
        for first in range(0, documents, FILE_DOCUMENTS):
            with open(
                folder / f"{first // FILE_DOCUMENTS:05d}.jsonl", "w", encoding="utf-8"
            ) as sink:
                for number in range(first, min(first + FILE_DOCUMENTS, documents)):
                    text = pages.text(number)
                    text_bytes += len(text.encode())
                    sink.write(
                        json.dumps(
                            {"id": str(number), "text": text}, ensure_ascii=False
                        )
                        + "\n"
                    )
        record.write_text(
            json.dumps({"documents": documents, "text_bytes": text_bytes})
        )
    return Corpus(folder, **json.loads(record.read_text()))


def write_archives(folder: Path, documents: int) -> tuple[Corpus, int]:
    """Write pages 0 to documents - 1 as HTML in compressed web archives.

    Returns:
        the corpus, and the bytes of its HTML.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pages, text_bytes, html_bytes = Pages(documents), 0, 0
    for first in range(0, documents, ARCHIVE_DOCUMENTS):
        last = min(first + ARCHIVE_DOCUMENTS, documents)
        texts = [pages.text(number) for number in range(first, last)]
        html = make_pages(texts)
        text_bytes += sum(len(text.encode()) for text in texts)
        html_bytes += sum(map(len, html))
        (folder / f"{first:07d}.warc.gz").write_bytes(make_warc(html))
    return Corpus(folder, documents, text_bytes), html_bytes


def remove_corpus(corpus: Corpus) -> None:
    """Remove a corpus."""
    shutil.rmtree(corpus.folder)
    corpus.folder.with_suffix(".json").unlink()


class Pages:
    """Pages 0 to documents - 1."""

    def __init__(self, documents: int) -> None:
        self._pieces = installed_texts.pages(documents, public_data.prose())

    def text(self, number: int) -> str:
        """Return the text of a page."""
        kind, source = kind_of(number), random.Random(number)
        if kind in ("near copy", "copy"):
            original = self.text(source.randrange(number))
            return edited(original, source) if kind == "near copy" else original
        if kind == "list":
            words = self._pieces[number].split()
            return "\n".join(
                " ".join(words[start : start + 3]) for start in range(0, len(words), 3)
            )
        if kind == "repeated":
            return "\n".join(
                [self._pieces[number].split("\n")[0]] * source.randint(3, 12)
            )
        if kind == "other language":
            return source.choice(OTHER_LANGUAGES) * source.randint(3, 12)
        body = self._pieces[number]
        if kind == "code":
            return f"{body}\nfunction run() {{ return {number}; }}"
        return f"{body}\nLorem ipsum dolor sit amet." if kind == "placeholder" else body


def kind_of(number: int) -> str:
    """Return the kind of a page; the first is prose."""
    if number == 0:
        return "prose"
    return random.Random(f"kind of {number}").choices(
        list(KINDS), list(KINDS.values())
    )[0]


def edited(text: str, source: random.Random) -> str:
    """Return a near copy: some words are replaced."""
    lines = [line.split(" ") for line in text.split("\n")]
    for _ in range(source.randint(1, MOST_EDITS)):
        line = source.choice(lines)
        line[source.randrange(len(line))] = f"word{source.randrange(1000)}"
    return "\n".join(map(" ".join, lines))
