"""The rule set `gneissweb`: statistics by hand and as textstat computes them, and votes
at the limits.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from gristmill.dataprep.filters.rule_sets import measure
from gristmill.dataprep.thresholds import failures, first_failures
from gristmill.mixtures.steps.rules import Rules

PIECES = [
    "mill",
    "the",
    "a",
    "It's",
    "don't",
    "'tis",
    "they're",
    "'re",
    "we'll",
    "o'clock",
    "'",
    "'s",
    "’",
    "_",
    "é",
    "東京",
    "3.14",
    "?!",
    "...",
    ".",
    "。",
    "-",
    '"',
    " ",
    "\n",
    "\u3000",
]


def measured(texts: list[str], languages: Any = "en", **settings: Any) -> pa.Table:
    rows = pa.table(
        {
            "text": pa.array(texts, pa.large_string()),
            "language": pa.array([languages] * len(texts), pa.string()),
        }
    )
    columns = measure(rows, Rules.model_validate({"gneissweb": settings}))
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def without_punctuation(text: str) -> str:
    """textstat's `remove_punctuation`."""
    text = re.sub(r"\'(?![tsd]\b|ve\b|ll\b|re\b)", '"', text)
    return re.sub(r"[^\w\s\']", "", text)


def eflaw(text: str) -> float:
    """textstat's `mcalpine_eflaw`."""
    words = without_punctuation(text).split()
    sentences = [
        sentence
        for sentence in re.findall(r"\b[^.!?]+[.!?]*", text)
        if len(without_punctuation(sentence).split()) > 2
    ]
    mini_words = sum(len(word) <= 3 for word in words)
    return (
        math.floor((len(words) + mini_words) / max(len(sentences), 1) * 10 + 0.5) / 10
    )


def test_readability_counted_by_hand() -> None:
    """15 words, of which `The by the and Yes it is old` are short, in two sentences:
    `Indeed.` is too short to count.
    """
    text = (
        "The mill by the river grinds corn, and it's well-known. Indeed. Yes, it "
        "is old."
    )
    assert measured([text, ""])["readability"].to_pylist() == [(15 + 8) / 2, 0.0]


@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text())
def test_readability_is_that_of_textstat(text: str) -> None:
    assert measured([text])["readability"].to_pylist() == [eflaw(text)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A tokenizer whose tokens are words between spaces."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_tokens_per_character_are_those_of_the_tokenizer(tokenizer: str) -> None:
    columns = measured(["a bb ccc", "äöü", ""], tokenizer=tokenizer)
    density = columns["tokens_per_character"].to_numpy()
    assert density[:2].tolist() == [3 / 8, 1 / 3]
    assert np.isnan(density[2])
    assert np.isnan(measured(["a"])["tokens_per_character"].to_numpy()).all()


def test_one_vote_keeps_a_document(tokenizer: str) -> None:
    """Without terminal marks a text is one sentence, whose score is words and short
    words: 31 long words have 31, 29 have 29; one word of 3 characters and a space is a
    quarter of a token per character.
    """
    texts = ["wordy " * 31, "wordy " * 29, "abc " * 40, "abcdefghij " * 40]
    rules = Rules.model_validate({"gneissweb": {"tokenizer": tokenizer}})
    rows = pa.table({"text": texts, "language": pa.nulls(4, pa.string())})
    columns = measure(rows, rules)
    assert columns["readability"].tolist() == [31.0, 29.0, 80.0, 40.0]
    assert columns["gneissweb_votes"].tolist() == [0.0, 1.0, 1.0, 0.0]
    reasons = first_failures(failures(columns, rules.sets), 4)
    rule = "gneissweb/min_gneissweb_votes"
    assert reasons == [rule, None, None, rule]


@pytest.mark.parametrize(("words", "votes"), [(29, 1.0), (30, 0.0)])
def test_readability_has_to_be_below_its_limit(words: int, votes: float) -> None:
    assert measured(["wordy " * words])["gneissweb_votes"].to_pylist() == [votes]


def test_text_in_a_category_has_wider_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gristmill.dataprep.filters import gneissweb

    class Labels:
        """Gives label 0 to the first text and label 1 to the second."""

        labels = ("__label__cc", "__label__science")

        def tops(self, lines: object) -> tuple[np.ndarray, np.ndarray]:
            return np.array([0, 1], np.int32), np.ones(2)

    monkeypatch.setattr(gneissweb, "model_at", lambda path: Labels())
    columns = measured(["wordy " * 69] * 2, categories=["science.bin"])
    assert columns["gneissweb_votes"].to_pylist() == [0.0, 1.0]


def test_other_languages_are_not_judged() -> None:
    columns = measured(["wordy " * 99], languages="de")
    assert all(math.isnan(values[0].as_py()) for values in columns.columns)


def test_english_rows_keep_their_places_among_others() -> None:
    texts = ["The mill grinds corn all day. It stops at night.", "", "Nur ein Satz."]
    rows = pa.table(
        {
            "text": pa.array(texts * 2, pa.large_string()),
            "language": pa.array(["de", "en", None, "en", "fr", "en"], pa.string()),
        }
    )
    columns = measure(rows, Rules.model_validate({"gneissweb": {}}))
    alone = [measured([text])["readability"][0].as_py() for text in texts]
    np.testing.assert_array_equal(
        columns["readability"],
        [np.nan, alone[1], alone[2], alone[0], np.nan, alone[2]],
    )
