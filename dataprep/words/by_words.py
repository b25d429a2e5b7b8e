"""Which documents have the words of a question: BM25 over the stored texts, read part by part, without an index.

BM25 as Robertson and Zaragoza (2009) give it, with Lucene's idf, which is never negative, and its k1 and b. The length
of a document is that of its text in bytes, in units of the mean. Every text is looked at once, by Arrow's kernels; how
rare a word is, is known at the end, so until then the counts of the best CANDIDATES are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.corpus import TEXT, Corpus
from gristmill.dataprep.documents import ROW_GROUP_ROWS, open_table
from gristmill.dataprep.row_groups import read_document_rows
from gristmill.mixtures.sources import INGEST

K1, B = 1.2, 0.75
MOST_TERMS = 32
"""Terms of a question that are looked for."""
CANDIDATES = 100_000
"""Documents that are kept between parts, the best by what is known by then: 24 bytes of each, and 8 for each term. With
as many hits or fewer nothing is let go of."""
OF_WORD, NOT_OF_WORD = r"[\pL\pM\pN_]", r"[^\pL\pM\pN_]"
QUOTED = re.compile(r'"([^"]*)"')
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+")
"""Scripts that put no space between words: Thai, Lao, Burmese, Khmer, kana, Han. Pairs of characters are looked for, as
Lucene's CJKAnalyzer does."""


@dataclass(frozen=True)
class WordHit:
    """A document that has some of the words: its shard and row, and its score."""

    shard: str
    row: int
    bm25: float


@dataclass(frozen=True)
class WordSearch:
    """What a search by words has found.

    Attributes:
        hits: the largest scores first.
        matching: documents that have a term.
        documents: that were looked at, of `of`.
    """

    hits: list[WordHit]
    matching: int
    documents: int
    of: int


def terms_of(question: str) -> list[str]:
    """What is looked for, in small letters, each once: words, what stands between quotes as it is (its words one after
    another), and of scripts without spaces pairs of characters."""
    quoted = [_as_words(one) for one in QUOTED.findall(question)]
    found = [one for one in quoted if one] + all_terms(QUOTED.sub(" ", question))
    return list(dict.fromkeys(found))[:MOST_TERMS]


def all_terms(text: str) -> list[str]:
    """Every word of a text in small letters, and of scripts without spaces every pair of characters."""
    found: list[str] = []
    for word in _as_words(text).split():
        at = 0
        for run in UNSPACED.finditer(word):
            found += [word[at : run.start()], *_pairs(run[0])]
            at = run.end()
        found.append(word[at:])
    return [one for one in found if one]


def _as_words(text: str) -> str:
    spaced: str = pc.replace_substring_regex(pc.utf8_lower(pa.scalar(text)), f"{NOT_OF_WORD}+", " ").as_py()
    return spaced.strip()


def _pairs(run: str) -> list[str]:
    return [run] if len(run) == 1 else [run[at : at + 2] for at in range(len(run) - 1)]


def search_words(corpus: Corpus, terms: Sequence[str], most: int, most_bytes: int | None = None) -> WordSearch:
    """The documents with the largest scores, whether they were kept or not; equal ones in the order of the corpus.

    Args:
        corpus: the documents; their texts have the edits of all steps.
        terms: see `terms_of`.
        most: documents.
        most_bytes: of texts that are looked at; all if absent.
    """
    sizes = [_rows_of(corpus, shard) for shard in corpus.shards]
    counts = np.zeros(len(terms), np.int64)
    kept = np.zeros((0, 3 + len(terms)), np.int64)
    """Number of the shard, row, bytes, and how often each term comes."""
    documents = bytes_ = matching = 0
    for number, row, texts in _parts(corpus, sizes):
        lengths = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        often = count_terms(texts, terms)
        documents, bytes_ = documents + len(texts), bytes_ + int(lengths.sum())
        counts += (often > 0).sum(axis=0)
        rows = np.flatnonzero(often.any(axis=1))
        matching += len(rows)
        kept = np.concatenate(
            [kept, np.column_stack([np.full(len(rows), number), row + rows, lengths[rows], often[rows]])]
        )
        if len(kept) > CANDIDATES:
            kept = kept[_best(_scores(kept, counts, documents, bytes_), CANDIDATES)]
        if most_bytes is not None and bytes_ >= most_bytes:
            break
    scores = _scores(kept, counts, documents, bytes_)
    hits = [
        WordHit(corpus.shards[kept[one, 0]], int(kept[one, 1]), float(scores[one]))
        for one in _best(scores, most).tolist()
    ]
    return WordSearch(hits, matching, documents, sum(sizes))


def _best(scores: np.ndarray, most: int) -> np.ndarray:
    """The places of the largest scores, the largest first."""
    return np.argsort(-scores, kind="stable")[:most]


def _scores(kept: np.ndarray, counts: np.ndarray, documents: int, bytes_: int) -> np.ndarray:
    """BM25 of some documents: float64 of shape (n,)."""
    idf = np.log1p((documents - counts + 0.5) / (counts + 0.5))
    often = kept[:, 3:].astype(np.float64)
    length = kept[:, 2] / max(bytes_ / max(documents, 1), 1.0)
    found: np.ndarray = (idf * often * (K1 + 1) / (often + K1 * (1 - B + B * length)[:, None])).sum(axis=1)
    return found


def count_terms(texts: pa.Array | pa.ChunkedArray, terms: Sequence[str]) -> np.ndarray:
    """How often each of k terms comes in each of n texts, in capitals or not: int64 of shape (n, k).

    A term is found between what is no letter, mark, number or underscore; one of a script without spaces anywhere.
    """
    found = np.zeros((len(texts), len(terms)), np.int64)
    lowered = pc.utf8_lower(texts)
    for place, term in enumerate(terms):
        anywhere = UNSPACED.fullmatch(term) is not None
        # What has the letters of the first word at all is few of the texts, and cheaply known.
        rows = np.flatnonzero(pc.match_substring(lowered, term.split(" ")[0]).to_numpy(zero_copy_only=False))
        some = lowered.take(pa.array(rows))
        if not anywhere and " " not in term:
            # Where a word begins like it, less where that word goes on: no match takes the border that the next needs.
            begins = f"(?:^|{NOT_OF_WORD}){re.escape(term)}"
            found[rows, place] = _count(some, begins) - _count(some, begins + OF_WORD)
            continue
        if not anywhere:
            # Two blanks between words, so that each has its own on either side.
            some = pc.replace_substring_regex(some, f"{NOT_OF_WORD}+", "  ")
            some = pc.binary_join_element_wise(
                pa.scalar("", some.type), some, pa.scalar("", some.type), pa.scalar(" ", some.type)
            )
            term = " " + term.replace(" ", "  ") + " "
        found[rows, place] = pc.count_substring(some, term).to_numpy(zero_copy_only=False)
    return found


def _count(texts: pa.Array | pa.ChunkedArray, pattern: str) -> np.ndarray:
    found: np.ndarray = pc.count_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)
    return found


def _rows_of(corpus: Corpus, shard: str) -> int:
    with open_table(corpus.inputs[INGEST] / shard) as file:
        return int(file.metadata.num_rows)


def _parts(corpus: Corpus, sizes: Sequence[int]) -> Iterator[tuple[int, int, pa.ChunkedArray]]:
    """The texts of all documents: number of the shard, row of the first, and those of a row group."""
    for number, (shard, size) in enumerate(zip(corpus.shards, sizes, strict=True)):
        for row in range(0, size, ROW_GROUP_ROWS):
            rows = range(row, min(row + ROW_GROUP_ROWS, size))
            yield number, row, read_document_rows(corpus.inputs, shard, rows, [TEXT])[TEXT]
