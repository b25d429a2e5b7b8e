"""FineWeb's, C4's and mC4's rules against datatrove's own filters on the same texts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from gristmill.dataprep.filters.rule_sets import measure
from gristmill.dataprep.thresholds import failures, first_failures
from gristmill.mixtures.steps.rules import Rules
from tests.dataprep import rules_reference

pytest.importorskip("datatrove")
DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "text"

FINEWEB_REASONS = {
    "empty": "fineweb/min_filled_lines",
    "line_punct_ratio": "fineweb/min_terminal_line_ratio",
    "short_line_ratio": "fineweb/max_short_line_ratio",
    "char_dup_ratio": "fineweb/max_repeated_line_char_ratio",
    "list_ratio": "fineweb/max_newline_word_ratio",
}
C4_REASONS = {
    "lorem_ipsum": "c4/max_lorem_ipsum",
    "curly_bracket": "c4/max_curly_brackets",
    "too_few_sentences": "c4/min_sentences",
}


def generated_texts(number: int) -> list[str]:
    """Generate texts on both sides of every threshold, the same in every run."""
    source = random.Random(11)
    pieces = [
        "It is so",
        "a longer line of some words that goes on",
        "the end",
        "same line",
        "東京です",
        "d'été",
        "{",
        "}",
        "Lorem ipsum",
        "Mr. Smith",
        "e.g. this",
        "well",
        "42",
        "-----",
        "",
    ]
    ends = [".", ".", "?", "!", "…", "...", "。", '."', ".'", ",", "", " ", "؟", "।"]
    lines = [
        source.choice(pieces[: source.randint(3, 15)]) + source.choice(ends)
        for _ in range(400)
    ]
    return [
        source.choice(["\n", "\n", " ", "\n\n"]).join(
            source.choices(lines, k=source.randint(0, 12))
        )
        for _ in range(number)
    ]


def real_texts(number: int) -> list[str]:
    """Read the beginnings of posts and documents with lists, tables and code, if the
    shared corpora exist.
    """
    return [
        text for name in ("18f_posts", "peps") for text in list(corpus(name))[:number]
    ]


def corpus(name: str) -> Iterator[str]:
    path = DATA / f"{name}.jsonl.zst"
    if path.exists():
        with pa.CompressedInputStream(str(path), "zstd") as stream:
            yield from (
                json.loads(line)["text"][:20_000]
                for line in stream.read().decode().splitlines()
            )


def our_reasons(rules: dict[str, Any], texts: list[str]) -> list[str | None]:
    section = Rules.model_validate(rules)
    columns = measure(pa.table({"text": pa.array(texts, pa.large_string())}), section)
    return first_failures(failures(columns, section.sets), len(texts))


def their_reasons(
    judge: Any, texts: list[str], names: dict[str, str]
) -> list[str | None]:
    from datatrove.data import Document

    verdicts = [
        judge.filter(Document(text, str(row))) for row, text in enumerate(texts)
    ]
    return [None if verdict is True else names[verdict[1]] for verdict in verdicts]


@pytest.fixture
def our_words_and_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let datatrove count words and sentences as we do, so that only the rules are
    compared.
    """
    from datatrove.pipeline.filters import c4_filters, fineweb_quality_filter

    monkeypatch.setattr(
        fineweb_quality_filter,
        "split_into_words",
        lambda text, language: [""] * words(text),
    )
    monkeypatch.setattr(
        c4_filters,
        "split_into_sentences",
        lambda text, language: [""] * sentences(text),
    )


words, sentences = rules_reference.words, rules_reference.sentences


def test_terminal_marks_equal_those_of_datatrove() -> None:
    from datatrove.utils.text import TERMINAL_PUNCTUATION

    assert rules_reference.TERMINAL_MARKS == TERMINAL_PUNCTUATION


@pytest.mark.parametrize(("constants", "ratio"), [("datatrove", 0.01), ("paper", 0.1)])
def test_fineweb_verdicts_equal_those_of_datatrove_given_equal_words(
    constants: str, ratio: float, our_words_and_sentences: None
) -> None:
    from datatrove.pipeline.filters import FineWebQualityFilter

    texts = generated_texts(3000) + real_texts(60)
    theirs = their_reasons(
        FineWebQualityFilter(char_duplicates_ratio=ratio), texts, FINEWEB_REASONS
    )
    assert our_reasons({"fineweb": {"constants": constants}}, texts) == theirs
    assert set(theirs) == {None, *FINEWEB_REASONS.values()}


@pytest.mark.parametrize(("constants", "min_sentences"), [("code", 3), ("paper", 5)])
def test_c4_verdicts_equal_those_of_datatrove_given_equal_sentences(
    constants: str, min_sentences: int, our_words_and_sentences: None
) -> None:
    from datatrove.pipeline.filters import C4QualityFilter

    judge = C4QualityFilter(
        min_num_sentences=min_sentences,
        remove_citations=False,
        filter_no_terminal_punct=False,
        min_words_per_line=-1,
        max_word_length=-1,
        filter_javascript=False,
        filter_policy=False,
    )
    # datatrove names the first line's reason where a text has both a curly bracket and
    # the placeholder.
    texts = [
        text
        for text in generated_texts(3000)
        if "{" not in text or "lorem" not in text.lower()
    ] + real_texts(60)
    theirs = their_reasons(judge, texts, C4_REASONS)
    ours = our_reasons({"c4": {"constants": constants}}, texts)
    assert list(zip(texts, ours)) == list(zip(texts, theirs))
    assert set(theirs) == {None, *C4_REASONS.values()}


def test_mc4_verdicts_equal_those_of_datatrove() -> None:
    from datatrove.pipeline.filters.c4_filters import C4ParagraphFilter

    source = random.Random(5)
    sizes = [
        [source.choice([0, 199, 200, 201]) for _ in range(source.randint(0, 7))]
        for _ in range(400)
    ]
    texts = ["\n".join("é" * size for size in of_text) for of_text in sizes]
    theirs = their_reasons(
        C4ParagraphFilter(), texts, {"< 3 paragraphs": "mc4/min_long_paragraphs"}
    )
    assert our_reasons({"mc4": {}}, texts) == theirs
    assert 50 < theirs.count(None) < 350


def test_fast_words_change_few_fineweb_verdicts_on_real_text() -> None:
    """Compares with spaCy's tokens."""
    pytest.importorskip("spacy")
    from datatrove.pipeline.filters import FineWebQualityFilter
    from datatrove.utils.text import split_into_words

    texts = real_texts(25)
    if not texts:
        pytest.skip("no shared data beside the checkout")
    theirs = their_reasons(
        FineWebQualityFilter(char_duplicates_ratio=0.1), texts, FINEWEB_REASONS
    )
    ours = our_reasons({"fineweb": {}}, texts)
    ratio = sum(map(words, texts)) / sum(len(split_into_words(text)) for text in texts)
    assert 0.97 < ratio < 1.03, f"we count {ratio:.3f} words for each of spaCy's tokens"
    different = [(a, b) for a, b in zip(ours, theirs) if a != b]
    assert len(different) <= 0.01 * len(texts), different
