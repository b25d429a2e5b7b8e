"""Share of leaked evaluation items that are found, and of clean documents that are
kept, on real items and texts.

Items of four kinds of evaluation sets (multiple choice, passages, code, mathematics)
are planted in pages of real books, each in disguises that real pages have. Clean
documents are whole ones of many kinds: books, posts, proposals, mathematics, speeches,
reviews, web pages. Innocent, too, are pages that quote the same text as an item: famous
sentences, a licence, a formula, each in many documents or in few.

The peer drops a document for any 12-gram that it shares with an item, as datatrove's
`NGramsDecontFilter` does. Rows that name other n-grams and shares show the candidates
for the defaults.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.checkout import data_folder
from benchmarks.dataprep.texts import word_ngrams
from benchmarks.installed_texts import CORPUS, documentation
from benchmarks.measuring import Row, row
from benchmarks.public_data import read_archive, read_records
from gristmill.dataprep.decontamination.contamination import find_matches, is_over
from gristmill.dataprep.decontamination.evaluation_sets import forms, read_items
from gristmill.dataprep.decontamination.ngram import (
    build_index,
    count_documents,
    find_ngrams,
)
from gristmill.mixtures.steps.decontaminate import Decontaminate

BOOKS = "text/books.jsonl.zst"
CLEAN = (
    BOOKS,
    "text/peps.jsonl.zst",
    "text/18f_posts.jsonl.zst",
    "text/openlogic_tex.jsonl.zst",
    "quality/dclm_human_quality.jsonl.zst",
    "quality/dolma/multiple_files_cc_en_head-0091.jsonl.gz",
    "quality/dolma/multiple_files_cc_en_head-0174.jsonl.gz",
    "text/mixture/redpajama-c4-refined.jsonl",
    "text/mixture/redpajama-cc-2023-06-refined.jsonl",
    "text/mixture/redpajama-pile-stackexchange-refined.jsonl",
    "text/mixture/the-pile-nih-refined.jsonl",
    "text/mixture/the-pile-uspto-refined.jsonl",
)
CLEAN_ARCHIVES = (
    "text/state_union.zip",
    "text/inaugural.zip",
    "text/movie_reviews.zip",
)
LEAKS_PER_DISGUISE = 100
"""Of each kind of evaluation set."""
FEWEST_WORDS = 9
"""Shorter items are not planted: 60 % of one is too little to recognise."""
PAGE_CHARACTERS, LONG_PAGE_CHARACTERS = 3000, 40_000
INSTALLED_PIECES, BOOK_PIECES = 2400, 90
PEER_NGRAM = 12
CHOICES = ((13, 0.5), (10, 0.4), (8, 0.3), (8, 0.5), (7, 0.4), (6, 0.4), (5, 0.4))
"""Other n-grams and largest shares that are measured beside the defaults."""
QUOTES = {
    "declaration": "We hold these truths to be self-evident, that all men are "
    "created equal, that they are endowed by "
    "their Creator with certain unalienable Rights, that among these are Life, "
    "Liberty and the pursuit "
    "of Happiness.",
    "hamlet": "To be, or not to be, that is the question: Whether 'tis nobler in the "
    "mind to suffer the slings and "
    "arrows of outrageous fortune, or to take arms against a sea of troubles and by "
    "opposing end them.",
    "gettysburg": "Four score and seven years ago our fathers brought forth on this "
    "continent, a new nation, conceived "
    "in Liberty, and dedicated to the proposition that all men are created equal.",
    "licence": "Permission is hereby granted, free of charge, to any person "
    "obtaining a copy of this software and "
    "associated documentation files, to deal in the Software without restriction.",
    "formula": r"\int_a^b f(x)\,dx = \lim_{n \to \infty} \sum_{i=1}^{n} f(x_i) \Delta x, \quad "
    r"\Delta x = \frac{b-a}{n}, \quad x_i = a + i \Delta x",
}
"""Quotations that evaluation items and innocent pages share: public domain, and a
licence's first sentence.
"""
LONG_QUESTION = (
    "Read the passage above once more and then name the year in which it was first "
    "published, the place where the author was born, and two later works in which "
    "somebody refers to it by its first five words alone; explain each of your choices "
    "in one or two complete sentences of your own, without repeating any part of it."
)
SHORT_QUESTION = "Who wrote the passage above, and when was it first read by others?"
QUOTATIONS = {
    "famous quotes": (40, 0, LONG_QUESTION),
    "rare quotes": (4, 5, LONG_QUESTION),
    "famous quotes, 70 % of an item": (40, 10, SHORT_QUESTION),
}
"""Kind -> innocent pages per quote (more than `max_document_frequency` of them, or
fewer), by how many words the quote is rotated so that each kind has its own, and the
item's question about it.
"""


class Corpus(NamedTuple):
    """Documents with planted items.

    Attributes:
        texts: of the documents.
        disguises: of each document: its disguise, `clean`, or its kind of quotation.
        sets: kind of evaluation set of each leak; empty for other documents.
        items: texts of the items, with the labels of their files.
    """

    texts: list[str]
    disguises: list[str]
    sets: list[str]
    items: list[str]


def rows() -> Iterator[Row]:
    """Measure recall by disguise and kind of set, and the share of innocent documents
    that are kept.
    """
    folder = data_folder()
    corpus = make_corpus(folder) if (folder / BOOKS).exists() else installed_corpus()
    section = Decontaminate(against=("nothing",))  # type: ignore[arg-type]
    ours, peer = judge(corpus, section), judge_any_ngram(corpus)
    disguises, sets = np.array(corpus.disguises), np.array(corpus.sets)
    for disguise in DISGUISES:
        for set_name in dict.fromkeys(filter(None, corpus.sets)):
            leaks = (disguises == disguise) & (sets == set_name)
            yield share_row(
                f"leaks found, {set_name}: {disguise}", ours[leaks], peer[leaks]
            )
    for kind in ("clean", *QUOTATIONS):
        yield share_row(
            f"innocent kept: {kind}", ~ours[disguises == kind], ~peer[disguises == kind]
        )
    is_leak, is_clean = sets != "", disguises == "clean"
    yield share_row(
        "share of dropped documents that are leaks", is_leak[ours], is_leak[peer]
    )
    yield candidate_row(section, ours, peer, is_leak, is_clean)
    for ngram, share in CHOICES:
        candidate = section.model_copy(
            update={"ngram": ngram, "max_contamination": share}
        )
        yield candidate_row(
            candidate, judge(corpus, candidate), peer, is_leak, is_clean
        )


def share_row(name: str, ours: np.ndarray, peer: np.ndarray) -> Row:
    """Return the shares of marked documents."""
    note = f"{len(ours)} documents; peer: any {PEER_NGRAM}-gram drops"
    return row(name, float(ours.mean()), float(peer.mean()), "share", note)


def candidate_row(
    section: Decontaminate,
    ours: np.ndarray,
    peer: np.ndarray,
    is_leak: np.ndarray,
    is_clean: np.ndarray,
) -> Row:
    """Measure recall over all leaks; the note has the false positives among clean
    documents.
    """
    name = f"leaks found, {section.ngram}-grams, over {section.max_contamination:.0%}"
    note = (
        f"{int(is_leak.sum())} leaks; clean documents dropped: "
        f"{int(ours[is_clean].sum())} of "
        f"{int(is_clean.sum())}, by the peer {int(peer[is_clean].sum())}"
    )
    return replace(share_row(name, ours[is_leak], peer[is_leak]), note=note)


def judge(corpus: Corpus, section: Decontaminate) -> np.ndarray:
    """Mark documents that the stage would drop: bool, (documents,)."""
    item_forms = [form for item in corpus.items for _, form in forms("text", item)]
    index = build_index(
        pa.array(item_forms, pa.large_string()), section.ngram, section.min_words
    )
    hits = find_ngrams(pa.array(corpus.texts, pa.large_string()), index)
    frequent = np.zeros(index.num_ngrams, bool)
    ngrams, documents = count_documents(hits)
    frequent[ngrams] = documents > section.max_document_frequency
    matches, _ = find_matches(hits, index, frequent, section.certain_coverage)
    dropped = np.zeros(len(corpus.texts), bool)
    dropped[matches.text[is_over(matches, section)]] = True
    return dropped


def judge_any_ngram(corpus: Corpus) -> np.ndarray:
    """Mark documents that share any n-gram with an item: bool, (documents,)."""
    leaked = {ngram for item in corpus.items for ngram in word_ngrams(item, PEER_NGRAM)}
    return np.array(
        [not leaked.isdisjoint(word_ngrams(text, PEER_NGRAM)) for text in corpus.texts]
    )


def make_corpus(folder: Path) -> Corpus:
    """Plant items of public evaluation sets among public clean documents; the same
    corpus in every run.
    """
    books = [
        text
        for text in read_documents(folder / BOOKS)
        if len(text) > 2 * LONG_PAGE_CHARACTERS
    ]
    texts = [text for name in CLEAN for text in read_documents(folder / name)]
    texts += [
        text
        for name in CLEAN_ARCHIVES
        for text in read_archive(folder / name, "latin-1").values()
    ]
    return planted_corpus(
        books, texts, {set_name: read(folder) for set_name, read in SETS.items()}
    )


def installed_corpus() -> Corpus:
    """Plant paragraphs of installed packages' documentation in other documentation, for
    machines without public data.
    """
    pieces = documentation(INSTALLED_PIECES)
    items = [piece.split("\n")[0] for piece in pieces[::4]]
    clean = [piece for number, piece in enumerate(pieces) if number % 4]
    books = [
        "\n".join(clean[first : first + BOOK_PIECES])
        for first in range(0, len(clean), BOOK_PIECES)
    ]
    long_books = [book for book in books if len(book) > 2 * LONG_PAGE_CHARACTERS]
    return planted_corpus(long_books, clean, {CORPUS: items})


def planted_corpus(
    books: Sequence[str], clean: Sequence[str], set_items: Mapping[str, Sequence[str]]
) -> Corpus:
    """Plant items of evaluation sets, and the quotations, in pages of books beside
    clean documents.
    """
    source, texts = random.Random(0), list(clean)
    disguises, sets, items = ["clean"] * len(texts), [""] * len(texts), list[str]()
    for set_name, every_item in set_items.items():
        long_items = [item for item in every_item if len(item.split()) >= FEWEST_WORDS]
        items += long_items
        for disguise, leak in DISGUISES.items():
            chosen = source.sample(long_items, min(LEAKS_PER_DISGUISE, len(long_items)))
            texts += [leak(bare(item), books, source) for item in chosen]
            disguises += [disguise] * len(chosen)
            sets += [set_name] * len(chosen)
    for kind, (number, rotation, question) in QUOTATIONS.items():
        for quote in QUOTES.values():
            words = quote.split()
            version = " ".join(words[rotation:] + words[:rotation])
            items.append(f"{version}\n{question}")
            texts += [
                insert(page(books, source), version, source) for _ in range(number)
            ]
            disguises += [kind] * number
            sets += [""] * number
    return Corpus(texts, disguises, sets, items)


def bare(item: str) -> str:
    """Return an item without the labels of its file."""
    return list(forms("text", item))[-1][1]


def read_multiple_choice(folder: Path) -> list[str]:
    """Read questions of ARC; and of MMLU, with their choices."""
    path = folder / "eval" / "arc_easy.jsonl.zst"
    prompts = json.loads((folder / "eval" / "mmlu_cot_prompts.json").read_text())
    questions = [item["query"] for item in read_items(path.name, path)]
    for prompt in prompts.values():
        questions += re.findall(r"^(Q: .*?)^A: ", prompt, re.DOTALL | re.MULTILINE)
    return questions


def read_passages(folder: Path) -> list[str]:
    """Read passages of LAMBADA, with the labels of reading comprehension."""
    path = folder / "eval" / "lambada_openai.jsonl.zst"
    return [
        f"Passage: {item['context']}\nQuestion: which word comes next?\nAnswer:"
        for item in read_items(path.name, path)
    ]


def read_field(name: str, field: str, folder: Path) -> list[str]:
    """Read a field of every item of a set."""
    return [item[field] for item in read_items(name, folder / "eval" / name)]


SETS: Mapping[str, Callable[[Path], list[str]]] = {
    "multiple choice": read_multiple_choice,
    "passages": read_passages,
    "code": partial(read_field, "HumanEval.jsonl.gz", "prompt"),
    "mathematics": partial(read_field, "gsm8k_test.jsonl.zst", "question"),
}


def read_documents(path: Path) -> Iterator[str]:
    """Read the texts of a JSON-lines file."""
    return (record["text"] for record in read_records(path))


def page(
    books: Sequence[str], source: random.Random, characters: int = PAGE_CHARACTERS
) -> str:
    """Cut a piece out of a book."""
    book = source.choice(books)
    at = source.randrange(len(book) - characters)
    return book[at : at + characters]


def insert(text: str, passage: str, source: random.Random) -> str:
    """Insert a passage on lines of its own at some space."""
    at = source.choice([match.start() for match in re.finditer(" ", text)])
    return f"{text[:at]}\n\n{passage}\n\n{text[at + 1 :]}"


def planted(
    disguise: Callable[[str, random.Random], str],
    item: str,
    books: Sequence[str],
    source: random.Random,
) -> str:
    """Return a page with an item in a disguise."""
    return insert(page(books, source), disguise(item, source), source)


def _verbatim(item: str, _: random.Random) -> str:
    return item


def _recased(item: str, _: random.Random) -> str:
    return "  ".join(re.findall(r"\w+", item.upper()))


def _partial(item: str, _: random.Random) -> str:
    words = item.split()
    return " ".join(words[: -(-len(words) * 3 // 5)])


def _every(nth: int, item: str, _: random.Random) -> str:
    return " ".join(
        "so" if at % nth == nth - 1 else word for at, word in enumerate(item.split())
    )


def _labelled(item: str, source: random.Random) -> str:
    return (
        f"### Question {source.randrange(100)}\nProblem: {item}\nA) yes\nB) "
        "no\nC) none of these\n\nAnswer: C"
    )


def _invisible(item: str, source: random.Random) -> str:
    """Put soft hyphens, zero-width spaces and joiners into the longer words."""
    return re.sub(
        r"(\w{3})(?=\w\w)",
        lambda match: match[1] + source.choice("\u00ad\u200b\u200d\u2060"),
        item,
    )


def _rejoined(item: str, source: random.Random) -> str:
    """Join sentences and clauses in other words."""
    return re.sub(
        r"[.,;:?!]\s+",
        lambda _: source.choice([" and, moreover, ", ", while ", " so that then "]),
        item,
    )


def _reworded(item: str, source: random.Random) -> str:
    """Replace one word in fifteen, at random."""
    return " ".join(
        "rather" if source.random() < 1 / 15 else word for word in item.split()
    )


def _embedded(item: str, books: Sequence[str], source: random.Random) -> str:
    return insert(page(books, source, LONG_PAGE_CHARACTERS), item, source)


DISGUISES: Mapping[str, Callable[[str, Sequence[str], random.Random], str]] = {
    "verbatim": partial(planted, _verbatim),
    "re-cased, no punctuation": partial(planted, _recased),
    "inside a long document": _embedded,
    "the first 60 %": partial(planted, _partial),
    "every 20th word replaced": partial(planted, partial(_every, 20)),
    "every 12th word replaced": partial(planted, partial(_every, 12)),
    "one word in 15 replaced": partial(planted, _reworded),
    "clauses joined otherwise": partial(planted, _rejoined),
    "other labels and choices": partial(planted, _labelled),
    "soft hyphens and the like": partial(planted, _invisible),
}
