"""How many leaks of evaluation items are found, and how many innocent documents are kept, on real items and prose.

Items of real evaluation sets are planted in pages of real books: as they are, re-cased and without punctuation, in
the middle of a long document, only the first 60 % of them, and with every 20th word replaced. Innocent documents are
the pages themselves and pages that quote what an item quotes too: famous sentences, a licence, a formula, each in
many documents or in few.

The peer drops a document for any 12-gram that it shares with an item, as datatrove's `NGramsDecontFilter` does.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.benchmarks.public_data import data_folder
from gristmill.dataprep.passages.contamination import find_matches, is_over
from gristmill.dataprep.passages.evaluation_sets import read_parts
from gristmill.dataprep.passages.ngram_index import build_index, count_documents, find_ngrams
from gristmill.dataprep.reading.compression import read_lines
from gristmill.mixtures.decontaminate import Decontaminate

SETS = (("gsm8k_test.jsonl.zst", "question"), ("HumanEval.jsonl.gz", "prompt"), ("lambada_openai.jsonl.zst", "context"),
        ("arc_easy.jsonl.zst", "query"))  # fmt: skip
BOOKS = "text/books.jsonl.zst"
LEAKS_PER_KIND = 200
FEWEST_WORDS = 20
"""Shorter items are not planted: 60 % of them would be less than one n-gram."""
PAGE_CHARACTERS, LONG_PAGE_CHARACTERS = 3000, 40_000
PAGES = 1500
PEER_NGRAM = 12

QUOTES = {
    "declaration": "We hold these truths to be self-evident, that all men are created equal, that they are endowed by "
                   "their Creator with certain unalienable Rights, that among these are Life, Liberty and the pursuit "
                   "of Happiness.",
    "hamlet": "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer the slings and "
              "arrows of outrageous fortune, or to take arms against a sea of troubles and by opposing end them.",
    "gettysburg": "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived "
                  "in Liberty, and dedicated to the proposition that all men are created equal.",
    "licence": "Permission is hereby granted, free of charge, to any person obtaining a copy of this software and "
               "associated documentation files, to deal in the Software without restriction.",
    "formula": r"\int_a^b f(x)\,dx = \lim_{n \to \infty} \sum_{i=1}^{n} f(x_i) \Delta x, \quad "
               r"\Delta x = \frac{b-a}{n}, \quad x_i = a + i \Delta x",
}  # fmt: skip
"""What an evaluation item and an innocent page may both quote: public domain, and a licence's first sentence."""
LONG_QUESTION = (
    "Read the passage above once more and then name the year in which it was first published, the place where the "
    "author was born, and two later works in which somebody refers to it by its first five words alone; explain each "
    "of your choices in one or two complete sentences of your own, without repeating any part of it."
)
SHORT_QUESTION = "Who wrote the passage above, and when was it first read by others?"
QUOTATIONS = {
    "famous quotes": (40, 0, LONG_QUESTION), "rare quotes": (4, 5, LONG_QUESTION),
    "famous quotes, 70 % of an item": (40, 10, SHORT_QUESTION),
}  # fmt: skip
"""Kind -> innocent pages per quote (more than `max_document_frequency` of them, or fewer), by how many words the quote
is turned so that each kind has its own, and what the item asks about it."""


class Corpus(NamedTuple):
    """Texts, what each is (`prose`, a kind of leak or a kind of quotation), and the items' texts."""

    texts: list[str]
    kinds: list[str]
    items: list[str]


def rows() -> Iterator[dict[str, Any]]:
    """Measure: the recall of each kind of leak, and the share of innocent documents that stay."""
    folder = data_folder()
    if not (folder / BOOKS).exists():
        yield {"name": "decontamination", "ours": None, "peer": None, "unit": "", "ratio": None,
               "note": f"{folder} has no evaluation sets and books"}  # fmt: skip
        return
    corpus = make_corpus(folder)
    section = Decontaminate(against=("nothing",))  # type: ignore[arg-type]
    ours, peer = judge(corpus, section), judge_any_ngram(corpus)
    kinds = np.array(corpus.kinds)
    for kind in LEAKS:
        yield _row(f"leaks found: {kind}", ours[kinds == kind], peer[kinds == kind])
    for kind in ("prose", *QUOTATIONS):
        yield _row(f"innocent kept: {kind}", ~ours[kinds == kind], ~peer[kinds == kind])
    leaked = np.isin(kinds, list(LEAKS))
    yield _row("share of dropped documents that are leaks", leaked[ours], leaked[peer])


def _row(name: str, ours: np.ndarray, peer: np.ndarray) -> dict[str, Any]:
    mine, other = float(ours.mean()), float(peer.mean())
    return {"name": name, "ours": mine, "peer": other, "unit": "share", "ratio": mine / other if other else None,
            "note": f"{len(ours)} documents; peer: any {PEER_NGRAM}-gram drops"}  # fmt: skip


def judge(corpus: Corpus, section: Decontaminate) -> np.ndarray:
    """Which documents the stage would drop (bool)."""
    index = build_index(pa.array(corpus.items, pa.large_string()), section.ngram, section.min_words)
    hits = find_ngrams(pa.array(corpus.texts, pa.large_string()), index)
    frequent = np.zeros(index.num_ngrams, bool)
    ngrams, documents = count_documents(hits)
    frequent[ngrams] = documents > section.max_document_frequency
    matches, _ = find_matches(hits, index, frequent, section.certain_coverage)
    dropped = np.zeros(len(corpus.texts), bool)
    dropped[matches.text[is_over(matches, section)]] = True
    return dropped


def judge_any_ngram(corpus: Corpus) -> np.ndarray:
    """Which documents share any n-gram with an item (bool)."""
    wanted = {ngram for item in corpus.items for ngram in ngrams(item)}
    return np.array([any(ngram in wanted for ngram in ngrams(text)) for text in corpus.texts])


def ngrams(text: str) -> Iterator[tuple[str, ...]]:
    """The n-grams of the peer."""
    words = re.findall(r"\w+", text.lower())
    return (tuple(words[at : at + PEER_NGRAM]) for at in range(len(words) - PEER_NGRAM + 1))


def make_corpus(folder: Path) -> Corpus:
    """Plant the leaks and the quotations; the same corpus in every run."""
    source = random.Random(0)
    items = [item for item in read_items(folder) if len(item.split()) >= FEWEST_WORDS]
    source.shuffle(items)
    books = list(read_books(folder))
    texts, kinds = [page(books, source) for _ in range(PAGES)], ["prose"] * PAGES
    planted = iter(items)
    for kind, leak in LEAKS.items():
        texts += [leak(next(planted), books, source) for _ in range(LEAKS_PER_KIND)]
        kinds += [kind] * LEAKS_PER_KIND
    for kind, (number, turn, question) in QUOTATIONS.items():
        for quote in QUOTES.values():
            words = quote.split()
            version = " ".join(words[turn:] + words[:turn])
            items.append(f"{version}\n{question}")
            texts += [insert(page(books, source), version, source) for _ in range(number)]
            kinds += [kind] * number
    return Corpus(texts, kinds, items)


def read_items(folder: Path) -> list[str]:
    """The questions of the sets."""
    against = tuple({"path": str(folder / "eval" / name), "text_fields": [field]} for name, field in SETS)
    parts, _ = read_parts(Decontaminate.model_validate({"against": against}).against)
    return [part.text for part in parts]


def read_books(folder: Path) -> Iterator[str]:
    """The books that are long enough to cut pages from."""
    for line in read_lines(folder / BOOKS, ".zst"):
        if isinstance(line, bytes):
            text = json.loads(line)["text"]
            if len(text) > 2 * LONG_PAGE_CHARACTERS:
                yield text


def page(books: Sequence[str], source: random.Random, characters: int = PAGE_CHARACTERS) -> str:
    """A piece of a book."""
    book = source.choice(books)
    at = source.randrange(len(book) - characters)
    return book[at : at + characters]


def insert(text: str, passage: str, source: random.Random) -> str:
    """The text with a passage on its own lines at some space."""
    at = source.choice([match.start() for match in re.finditer(" ", text)])
    return f"{text[:at]}\n\n{passage}\n\n{text[at + 1 :]}"


def _verbatim(item: str, books: Sequence[str], source: random.Random) -> str:
    return insert(page(books, source), item, source)


def _recased(item: str, books: Sequence[str], source: random.Random) -> str:
    words = re.findall(r"\w+", item.upper())
    return insert(page(books, source), "  ".join(words), source)


def _embedded(item: str, books: Sequence[str], source: random.Random) -> str:
    return insert(page(books, source, LONG_PAGE_CHARACTERS), item, source)


def _partial(item: str, books: Sequence[str], source: random.Random) -> str:
    words = item.split()
    return insert(page(books, source), " ".join(words[: -(-len(words) * 3 // 5)]), source)


def _edited(item: str, books: Sequence[str], source: random.Random) -> str:
    words = ["so" if at % 20 == 19 else word for at, word in enumerate(item.split())]
    return insert(page(books, source), " ".join(words), source)


LEAKS: Mapping[str, Callable[[str, Sequence[str], random.Random], str]] = {
    "verbatim": _verbatim,
    "re-cased, no punctuation": _recased,
    "inside a long document": _embedded,
    "the first 60 %": _partial,
    "every 20th word replaced": _edited,
}
