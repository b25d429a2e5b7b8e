"""How many leaks of evaluation items are found, and how many clean documents are kept, on real items and texts.

Items of four kinds of evaluation sets (multiple choice, passages, code, mathematics) are planted in pages of real
books, each in disguises that real pages have. Clean documents are whole ones of many kinds: books, posts, proposals,
mathematics, speeches, reviews, web pages. Innocent besides are pages that quote what an item quotes too: famous
sentences, a licence, a formula, each in many documents or in few.

The peer drops a document for any 12-gram that it shares with an item, as datatrove's `NGramsDecontFilter` does. Rows
that name other n-grams and shares show what the defaults were chosen from.
"""

from __future__ import annotations

import json
import random
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.checkout import data_folder
from benchmarks.installed_texts import CORPUS, documentation
from gristmill.dataprep.passages.contamination import find_matches, is_over
from gristmill.dataprep.passages.evaluation_sets import forms, read_items
from gristmill.dataprep.passages.ngram_index import build_index, count_documents, find_ngrams
from gristmill.dataprep.reading.compression import read_lines
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
CLEAN_ARCHIVES = ("text/state_union.zip", "text/inaugural.zip", "text/movie_reviews.zip")
LEAKS_PER_DISGUISE = 100
"""Of each kind of evaluation set."""
FEWEST_WORDS = 9
"""Shorter items are not planted: 60 % of them say nothing."""
PAGE_CHARACTERS, LONG_PAGE_CHARACTERS = 3000, 40_000
INSTALLED_PIECES, BOOK_PIECES = 2400, 90
PEER_NGRAM = 12
CHOICES = ((13, 0.5), (10, 0.4), (8, 0.3), (8, 0.5), (7, 0.4), (6, 0.4), (5, 0.4))
"""Other n-grams and largest shares that are measured beside the defaults."""

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
}
"""What an evaluation item and an innocent page may both quote: public domain, and a licence's first sentence."""
LONG_QUESTION = (
    "Read the passage above once more and then name the year in which it was first published, the place where the "
    "author was born, and two later works in which somebody refers to it by its first five words alone; explain each "
    "of your choices in one or two complete sentences of your own, without repeating any part of it."
)
SHORT_QUESTION = "Who wrote the passage above, and when was it first read by others?"
QUOTATIONS = {
    "famous quotes": (40, 0, LONG_QUESTION),
    "rare quotes": (4, 5, LONG_QUESTION),
    "famous quotes, 70 % of an item": (40, 10, SHORT_QUESTION),
}
"""Kind -> innocent pages per quote (more than `max_document_frequency` of them, or fewer), by how many words the quote
is turned so that each kind has its own, and what the item asks about it."""


class Corpus(NamedTuple):
    """Texts, what each is (a disguise, `clean`, or a kind of quotation), of which kind of evaluation set a leak is
    (empty for others), and the items' texts, with the labels of their files."""

    texts: list[str]
    disguises: list[str]
    sets: list[str]
    items: list[str]


def rows() -> Iterator[dict[str, Any]]:
    """Measure: the recall of each disguise and kind of set, and the share of innocent documents that stay."""
    folder = data_folder()
    corpus = make_corpus(folder) if (folder / BOOKS).exists() else installed_corpus()
    section = Decontaminate(against=("nothing",))  # type: ignore[arg-type]
    ours, peer = judge(corpus, section), judge_any_ngram(corpus)
    disguises, sets = np.array(corpus.disguises), np.array(corpus.sets)
    for disguise in DISGUISES:
        for of_set in dict.fromkeys(filter(None, corpus.sets)):
            these = (disguises == disguise) & (sets == of_set)
            yield _row(f"leaks found, {of_set}: {disguise}", ours[these], peer[these])
    for kind in ("clean", *QUOTATIONS):
        yield _row(f"innocent kept: {kind}", ~ours[disguises == kind], ~peer[disguises == kind])
    leaked, clean = sets != "", disguises == "clean"
    yield _row("share of dropped documents that are leaks", leaked[ours], leaked[peer])
    yield _choice(section, ours, peer, leaked, clean)
    for ngram, share in CHOICES:
        other = section.model_copy(update={"ngram": ngram, "max_contamination": share})
        yield _choice(other, judge(corpus, other), peer, leaked, clean)


def _row(name: str, ours: np.ndarray, peer: np.ndarray) -> dict[str, Any]:
    mine, other = float(ours.mean()), float(peer.mean())
    return {
        "name": name,
        "ours": mine,
        "peer": other,
        "unit": "share",
        "ratio": mine / other if other else None,
        "note": f"{len(ours)} documents; peer: any {PEER_NGRAM}-gram drops",
    }


def _choice(
    section: Decontaminate, ours: np.ndarray, peer: np.ndarray, leaked: np.ndarray, clean: np.ndarray
) -> dict[str, Any]:
    """Recall over all leaks, and beside it the false positives among clean documents."""
    row = _row(f"leaks found, {section.ngram}-grams, over {section.max_contamination:.0%}", ours[leaked], peer[leaked])
    return {
        **row,
        "note": f"{int(leaked.sum())} leaks; clean documents dropped: {int(ours[clean].sum())} of "
        f"{int(clean.sum())}, by the peer {int(peer[clean].sum())}",
    }


def judge(corpus: Corpus, section: Decontaminate) -> np.ndarray:
    """Which documents the stage would drop (bool)."""
    looked_for = [form for item in corpus.items for _, form in forms("text", item)]
    index = build_index(pa.array(looked_for, pa.large_string()), section.ngram, section.min_words)
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
    """Plant the items of public evaluation sets among public clean documents; the same corpus in every run."""
    books = [text for text in read_documents(folder / BOOKS) if len(text) > 2 * LONG_PAGE_CHARACTERS]
    texts = [text for name in CLEAN for text in read_documents(folder / name)]
    texts += [text for name in CLEAN_ARCHIVES for text in read_archive(folder / name)]
    return planted_corpus(books, texts, {of_set: read(folder) for of_set, read in SETS.items()})


def installed_corpus() -> Corpus:
    """Plant paragraphs of installed packages' documentation in other documentation, where public data is not here."""
    pieces = documentation(INSTALLED_PIECES)
    items = [piece.split("\n")[0] for piece in pieces[::4]]
    clean = [piece for number, piece in enumerate(pieces) if number % 4]
    books = ["\n".join(clean[first : first + BOOK_PIECES]) for first in range(0, len(clean), BOOK_PIECES)]
    long_books = [book for book in books if len(book) > 2 * LONG_PAGE_CHARACTERS]
    return planted_corpus(long_books, clean, {CORPUS: items})


def planted_corpus(books: Sequence[str], clean: Sequence[str], items_of: Mapping[str, Sequence[str]]) -> Corpus:
    """Plant items of evaluation sets, and the quotations, in pages of books beside clean documents."""
    source, texts = random.Random(0), list(clean)
    disguises, sets, items = ["clean"] * len(texts), [""] * len(texts), list[str]()
    for of_set, every_item in items_of.items():
        found = [item for item in every_item if len(item.split()) >= FEWEST_WORDS]
        items += found
        for disguise, leak in DISGUISES.items():
            chosen = source.sample(found, min(LEAKS_PER_DISGUISE, len(found)))
            texts += [leak(bare(item), books, source) for item in chosen]
            disguises += [disguise] * len(chosen)
            sets += [of_set] * len(chosen)
    for kind, (number, turn, question) in QUOTATIONS.items():
        for quote in QUOTES.values():
            words = quote.split()
            version = " ".join(words[turn:] + words[:turn])
            items.append(f"{version}\n{question}")
            texts += [insert(page(books, source), version, source) for _ in range(number)]
            disguises += [kind] * number
            sets += [""] * number
    return Corpus(texts, disguises, sets, items)


def bare(item: str) -> str:
    """An item without the labels of its file."""
    return list(forms("text", item))[-1][1]


def read_multiple_choice(folder: Path) -> list[str]:
    """Questions of ARC; and of MMLU, with their choices."""
    path = folder / "eval" / "arc_easy.jsonl.zst"
    prompts = json.loads((folder / "eval" / "mmlu_cot_prompts.json").read_text())
    return [item["query"] for item in read_items(path.name, path)] + [
        question for prompt in prompts.values() for question in re.findall(r"^(Q: .*?)^A: ", prompt, re.DOTALL | re.M)
    ]


def read_passages(folder: Path) -> list[str]:
    """Passages of LAMBADA, with the labels that reading comprehension has."""
    path = folder / "eval" / "lambada_openai.jsonl.zst"
    return [
        f"Passage: {item['context']}\nQuestion: which word comes next?\nAnswer:" for item in read_items(path.name, path)
    ]


def read_field(name: str, field: str, folder: Path) -> list[str]:
    """The field of every item of a set."""
    return [item[field] for item in read_items(name, folder / "eval" / name)]


SETS: Mapping[str, Callable[[Path], list[str]]] = {
    "multiple choice": read_multiple_choice,
    "passages": read_passages,
    "code": partial(read_field, "HumanEval.jsonl.gz", "prompt"),
    "mathematics": partial(read_field, "gsm8k_test.jsonl.zst", "question"),
}


def read_documents(path: Path) -> Iterator[str]:
    """The texts of a JSON-lines file."""
    for line in read_lines(path, path.suffix if path.suffix in (".zst", ".gz") else ""):
        if isinstance(line, bytes) and line.strip():
            yield json.loads(line)["text"]


def read_archive(path: Path) -> list[str]:
    """The text files of a zip archive."""
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        return [archive.read(name).decode("latin-1") for name in names]


def page(books: Sequence[str], source: random.Random, characters: int = PAGE_CHARACTERS) -> str:
    """A piece of a book."""
    book = source.choice(books)
    at = source.randrange(len(book) - characters)
    return book[at : at + characters]


def insert(text: str, passage: str, source: random.Random) -> str:
    """The text with a passage on its own lines at some space."""
    at = source.choice([match.start() for match in re.finditer(" ", text)])
    return f"{text[:at]}\n\n{passage}\n\n{text[at + 1 :]}"


def planted(
    disguise: Callable[[str, random.Random], str], item: str, books: Sequence[str], source: random.Random
) -> str:
    """A page that holds an item in a disguise."""
    return insert(page(books, source), disguise(item, source), source)


def _verbatim(item: str, _: random.Random) -> str:
    return item


def _recased(item: str, _: random.Random) -> str:
    return "  ".join(re.findall(r"\w+", item.upper()))


def _partial(item: str, _: random.Random) -> str:
    words = item.split()
    return " ".join(words[: -(-len(words) * 3 // 5)])


def _every(nth: int, item: str, _: random.Random) -> str:
    return " ".join("so" if at % nth == nth - 1 else word for at, word in enumerate(item.split()))


def _labelled(item: str, source: random.Random) -> str:
    return f"### Question {source.randrange(100)}\nProblem: {item}\nA) yes\nB) no\nC) none of these\n\nAnswer: C"


def _invisible(item: str, source: random.Random) -> str:
    """Soft hyphens, zero-width spaces and joiners within the longer words."""
    return re.sub(r"(\w{3})(?=\w\w)", lambda match: match[1] + source.choice("\u00ad\u200b\u200d\u2060"), item)


def _rejoined(item: str, source: random.Random) -> str:
    """Sentences and clauses joined in other words."""
    return re.sub(r"[.,;:?!]\s+", lambda _: source.choice([" and, moreover, ", ", while ", " so that then "]), item)


def _reworded(item: str, source: random.Random) -> str:
    """One word in fifteen, at some place, said otherwise."""
    return " ".join("rather" if source.random() < 1 / 15 else word for word in item.split())


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
