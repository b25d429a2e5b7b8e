"""Word search: BM25 over the stored texts, read in parts, without an index.

BM25 of Robertson and Zaragoza (2009), with Lucene's non-negative idf, k1 and b. The
length of a document is that of its text in bytes, relative to the mean. Each text is
read once, by Arrow's kernels. The idf is known at the end only, so until then the
counts of the best CANDIDATES are kept.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.arrays import Column
from gristmill.dataprep.corpus import TEXT, Corpus
from gristmill.dataprep.documents import ROW_GROUP_ROWS, open_table
from gristmill.dataprep.row_groups import read_document_rows
from gristmill.mixtures.schema.sources import INGEST

K1, B = 1.2, 0.75
MOST_TERMS = 32
"""Largest number of search terms of a question."""
CANDIDATES = 100_000
"""Documents kept between parts, the best by the counts so far: 24 bytes each, and 8 per
term. With as many hits or fewer the result is exact.
"""
OF_WORD, NOT_OF_WORD = r"[\pL\pM\pN_]", r"[^\pL\pM\pN_]"
QUOTED = re.compile(r'"([^"]*)"')
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+"
)
"""Scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana, Han. Searched
by pairs of characters, like Lucene's CJKAnalyzer.
"""


@dataclass(frozen=True)
class WordHit:
    """A document that has some of the words: shard, row and score."""

    shard: str
    row: int
    bm25: float


@dataclass(frozen=True)
class WordSearch:
    """Result of a word search.

    Attributes:
        hits: sorted by descending score.
        matching: number of documents that have a term.
        documents: number of documents searched, of `of`.
    """

    hits: list[WordHit]
    matching: int
    documents: int
    of: int


def terms_of(question: str) -> list[str]:
    """Distinct lower-case search terms: words, quoted phrases, and pairs of characters
    for scripts without spaces.
    """
    phrases = [_normalize(phrase) for phrase in QUOTED.findall(question)]
    terms = [phrase for phrase in phrases if phrase] + all_terms(
        QUOTED.sub(" ", question)
    )
    return list(dict.fromkeys(terms))[:MOST_TERMS]


def all_terms(text: str) -> list[str]:
    """All words of a text in lower case, and all pairs of characters for scripts
    without spaces.
    """
    terms: list[str] = []
    for word in _normalize(text).split():
        begin = 0
        for run in UNSPACED.finditer(word):
            terms.append(word[begin : run.start()])
            begin = run.end()
            pairs = range(run.start(), max(run.end() - 1, run.start() + 1))
            terms += [word[place : min(place + 2, begin)] for place in pairs]
        terms.append(word[begin:])
    return [term for term in terms if term]


def _normalize(text: str) -> str:
    spaced: str = pc.replace_substring_regex(
        pc.utf8_lower(pa.scalar(text)), f"{NOT_OF_WORD}+", " "
    ).as_py()
    return spaced.strip()


def search_words(
    corpus: Corpus, terms: Sequence[str], most: int, most_bytes: int | None = None
) -> WordSearch:
    """Documents with the largest scores, kept or dropped; ties are in the order of the
    corpus.

    Args:
        corpus: documents, searched with the edits of all steps.
        terms: see `terms_of`.
        most: number of documents.
        most_bytes: bytes of text to search; all if None.
    """
    parts: list[tuple[int, range]] = []
    total = 0
    for number, shard in enumerate(corpus.shards):
        with open_table(corpus.inputs[INGEST] / shard) as file:
            size = int(file.metadata.num_rows)
        total += size
        parts += [
            (number, range(first, min(first + ROW_GROUP_ROWS, size)))
            for first in range(0, size, ROW_GROUP_ROWS)
        ]
    counts = np.zeros(len(terms), np.int64)
    kept = np.zeros((0, 3 + len(terms)), np.int64)
    """Number of the shard, row, bytes, and count of each term."""
    documents = bytes_ = matching = 0
    for number, part in parts:
        shard = corpus.shards[number]
        texts = read_document_rows(corpus.inputs, shard, part, [TEXT])[TEXT]
        lengths = (
            pc.fill_null(pc.binary_length(texts), 0)
            .to_numpy(zero_copy_only=False)
            .astype(np.int64)
        )
        frequencies = count_terms(texts, terms)
        documents = documents + len(texts)
        bytes_ = bytes_ + int(lengths.sum())
        counts += (frequencies > 0).sum(axis=0)
        rows = np.flatnonzero(frequencies.any(axis=1))
        matching += len(rows)
        numbers = np.full(len(rows), number)
        columns = [numbers, part.start + rows, lengths[rows], frequencies[rows]]
        kept = np.concatenate([kept, np.column_stack(columns)])
        if len(kept) > CANDIDATES:
            kept = kept[_best(_scores(kept, counts, documents, bytes_), CANDIDATES)]
        if most_bytes is not None and bytes_ >= most_bytes:
            break
    scores = _scores(kept, counts, documents, bytes_)
    hits = [
        WordHit(
            corpus.shards[kept[place, 0]], int(kept[place, 1]), float(scores[place])
        )
        for place in _best(scores, most).tolist()
    ]
    return WordSearch(hits, matching, documents, total)


def _best(scores: np.ndarray, most: int) -> np.ndarray:
    """Positions of the largest scores, largest first."""
    return np.argsort(-scores, kind="stable")[:most]


def _scores(
    kept: np.ndarray, counts: np.ndarray, documents: int, bytes_: int
) -> np.ndarray:
    """BM25 scores: float64 of shape (n,)."""
    lengths = kept[:, 2] / max(bytes_ / max(documents, 1), 1.0)
    frequencies = kept[:, 3:].astype(np.float64)
    idf = np.log1p((documents - counts + 0.5) / (counts + 0.5))
    saturation = frequencies + K1 * (1 - B + B * lengths[:, None])
    return (idf * frequencies * (K1 + 1) / saturation).sum(1)


def count_terms(texts: Column, terms: Sequence[str]) -> np.ndarray:
    """Count k terms in n texts, ignoring case: int64 of shape (n, k).

    A term matches between characters that are not letters, marks, numbers or
    underscores; a term of a script without spaces matches anywhere.
    """
    counts = np.zeros((len(texts), len(terms)), np.int64)
    lowered = pc.utf8_lower(texts)
    for place, term in enumerate(terms):
        anywhere = UNSPACED.fullmatch(term) is not None
        # A cheap substring match of the first word rules out most texts.
        rows = np.flatnonzero(
            pc.match_substring(lowered, term.split(" ")[0]).to_numpy(
                zero_copy_only=False
            )
        )
        candidates = lowered.take(rows)
        if not anywhere and " " not in term:
            # Prefix matches minus those in longer words, so that no match consumes the
            # boundary of the next.
            begins = f"(?:^|{NOT_OF_WORD}){re.escape(term)}"
            counts[rows, place] = _count(candidates, begins) - _count(
                candidates, begins + OF_WORD
            )
            continue
        if not anywhere:
            # Two spaces between words, so that each has its own on both sides.
            candidates = pc.replace_substring_regex(candidates, f"{NOT_OF_WORD}+", "  ")
            candidates = pc.binary_join_element_wise(
                pa.scalar("", candidates.type),
                candidates,
                pa.scalar("", candidates.type),
                pa.scalar(" ", candidates.type),
            )
            term = " " + term.replace(" ", "  ") + " "
        counts[rows, place] = pc.count_substring(candidates, term).to_numpy(
            zero_copy_only=False
        )
    return counts


def _count(texts: Column, pattern: str) -> np.ndarray:
    return pc.count_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)
