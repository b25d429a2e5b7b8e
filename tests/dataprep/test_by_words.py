"""BM25 search equals a plain loop, for any script and any shards."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from math import log1p
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.words import bm25_scan
from gristmill.dataprep.words.bm25_scan import (
    K1,
    B,
    count_terms,
    search_words,
    terms_of,
)

WORDS = [
    f"{a}{b}" for a in ("mill", "grain", "bread", "stone") for b in ("", "s", "er", "é")
]


@pytest.mark.parametrize(
    ("question", "terms"),
    [
        ("The MILL, the mill's stone", ["the", "mill", "s", "stone"]),
        ('sea "Grinds  grain" bread ""', ["grinds grain", "sea", "bread"]),
        (
            "\N{LATIN CAPITAL LETTER E WITH ACUTE}t\N{LATIN SMALL LETTER E WITH ACUTE} snake_case 42",
            [
                "\N{LATIN SMALL LETTER E WITH ACUTE}t\N{LATIN SMALL LETTER E WITH ACUTE}",
                "snake_case",
                "42",
            ],
        ),
        (
            "\u7c89\u3092\u633d\u304f mill\u7c89",
            ["\u7c89\u3092", "\u3092\u633d", "\u633d\u304f", "mill", "\u7c89"],
        ),
        ("?! ...", []),
    ],
)
def test_query_terms_are_words_quoted_passages_and_character_pairs(
    question: str, terms: list[str]
) -> None:
    assert terms_of(question) == terms


def test_term_matches_whole_words() -> None:
    texts = pa.chunked_array(
        [
            ["Mill mill MILL, mills; (mill)", "milling caf\u00e9"],
            ["", "the mill  grinds", "a\u7c89b"],
        ],
        pa.large_string(),
    )
    counts = count_terms(texts, ["mill", "caf", "caf\u00e9", "mill grinds", "\u7c89"])
    assert counts.tolist() == [
        [4, 0, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0],
        [1, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def plain_bm25(texts: Sequence[str], terms: Sequence[str]) -> list[float]:
    """Score of each text, one after another."""
    words = [Counter(re.findall(r"\w+", text.lower())) for text in texts]
    lengths = [len(text.encode()) for text in texts]
    mean = sum(lengths) / len(texts)
    scores = []
    for counts, length in zip(words, lengths, strict=True):
        score = 0.0
        for term in terms:
            document_frequency = sum(term in counter for counter in words)
            frequency = counts[term]
            score += (
                log1p(
                    (len(texts) - document_frequency + 0.5) / (document_frequency + 0.5)
                )
                * frequency
                * (K1 + 1)
                / (frequency + K1 * (1 - B + B * length / mean))
            )
        scores.append(score)
    return scores


@pytest.fixture
def corpus(write_ingest: Callable[..., Any]) -> Corpus:
    """300 texts in three shards."""
    draw = random.Random(4)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(0, 30))) for _ in range(300)]
    return Corpus(
        {
            "ingest": write_ingest(
                "ingest",
                [
                    [
                        ("web", f"{shard}-{number}", text)
                        for number, text in enumerate(
                            texts[100 * shard : 100 * shard + 100]
                        )
                    ]
                    for shard in range(3)
                ],
            )
        }
    )


def texts_of(corpus: Corpus) -> list[str]:
    return [
        text
        for shard in corpus.shards
        for text in corpus.read(shard, ["text"], None)["text"].to_pylist()
    ]


@pytest.mark.slow
def test_scores_equal_a_plain_loop_over_all_shards(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bm25_scan, "ROW_GROUP_ROWS", 7)
    terms = terms_of("mill graines breadé stone")
    terms[1] = "grains"
    search = search_words(corpus, terms, 20)
    expected = np.array(plain_bm25(texts_of(corpus), terms))
    places = [(shard, row) for shard in corpus.shards for row in range(100)]
    order = np.argsort(-expected, kind="stable")[:20]
    assert [(hit.shard, hit.row) for hit in search.hits] == [
        places[place] for place in order
    ]
    assert np.allclose([hit.bm25 for hit in search.hits], expected[order])
    assert (search.matching, search.documents, search.of) == (
        int((expected > 0).sum()),
        300,
        300,
    )


def test_small_candidate_batches_give_the_same_hits(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = search_words(corpus, ["mill", "stoner"], 5).hits
    monkeypatch.setattr(bm25_scan, "CANDIDATES", 60)
    monkeypatch.setattr(bm25_scan, "ROW_GROUP_ROWS", 20)
    assert search_words(corpus, ["mill", "stoner"], 5).hits == hits


def test_search_counts_the_scanned_texts(corpus: Corpus) -> None:
    part = search_words(corpus, ["mill"], 300, most_bytes=1)
    assert (part.documents, part.of) == (100, 300)
    assert {hit.shard for hit in part.hits} == {corpus.shards[0]}
    nothing = search_words(corpus, [], 5)
    assert (nothing.hits, nothing.matching, nothing.documents) == ([], 0, 300)
