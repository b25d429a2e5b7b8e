"""Sentence counts against NLTK's Punkt, which C4 uses, and spaCy's sentencizer, which
datatrove uses.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.dataprep.rules_reference import sentences

DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "text"
MIN_SENTENCES = 3
"""Minimum number of sentences of C4's rule."""


@pytest.fixture(scope="module")
def punkt() -> Any:
    """Import in the tests, not at collection: NLTK takes a second."""
    return pytest.importorskip("nltk.tokenize.punkt")


@lru_cache
def paragraphs() -> tuple[str, ...]:
    """Read paragraphs of books and posts that end like sentences, each on one line."""
    chosen: list[str] = []
    for name, number in (("books", 12), ("18f_posts", 60)):
        path = DATA / f"{name}.jsonl.zst"
        if not path.exists():
            pytest.skip("no shared data beside the checkout")
        with pa.CompressedInputStream(str(path), "zstd") as stream:
            texts = [
                json.loads(line)["text"][:60_000]
                for line in stream.read().decode().splitlines()[:number]
            ]
        lines = (
            " ".join(part.split())
            for text in texts
            for part in re.split(r"\n\s*\n", text)
        )
        chosen += [line for line in lines if line.endswith((".", "?", "!", '"'))][:1200]
    return tuple(chosen)


def agreement(theirs: list[int]) -> tuple[float, float]:
    """Return the shares of paragraphs with the same number of sentences, and with the
    same verdict of C4's rule.
    """
    ours = [sentences(paragraph) for paragraph in paragraphs()]
    same = sum(a == b for a, b in zip(ours, theirs)) / len(ours)
    return same, sum(
        (a >= MIN_SENTENCES) == (b >= MIN_SENTENCES) for a, b in zip(ours, theirs)
    ) / len(ours)


def test_trained_punkt_agrees_on_95_percent_of_paragraphs(punkt: Any) -> None:
    trainer = punkt.PunktTrainer()
    trainer.INCLUDE_ALL_COLLOCS = True
    trainer.train(" ".join(paragraphs()))
    splitter = punkt.PunktSentenceTokenizer(trainer.get_params())
    agreed = agreement(
        [len(splitter.tokenize(paragraph)) for paragraph in paragraphs()]
    )
    assert agreed[0] > 0.95, agreed
    assert agreed[1] > 0.985, agreed


def test_untrained_punkt_agrees_on_82_percent_of_paragraphs(punkt: Any) -> None:
    splitter = punkt.PunktSentenceTokenizer()
    agreed = agreement(
        [len(splitter.tokenize(paragraph)) for paragraph in paragraphs()]
    )
    assert agreed[0] > 0.82, agreed
    assert agreed[1] > 0.95, agreed


def test_spacy_sentencizer_agrees_on_94_percent_of_paragraphs() -> None:
    spacy = pytest.importorskip("spacy")
    splitter = spacy.blank("en")
    splitter.add_pipe("sentencizer")
    agreed = agreement(
        [len(list(splitter(paragraph).sents)) for paragraph in paragraphs()]
    )
    assert agreed[0] > 0.94, agreed
    assert agreed[1] > 0.98, agreed
