"""Similarity of prompts, and new prompts in an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.dataprep.examples.new_prompts import (
    Likeness,
    common_subsequence,
    read_numbered,
    rouge_l,
    words_of,
)

WORDS = st.lists(st.sampled_from("abcd"), max_size=9)


def by_table(left: list[str], right: list[str]) -> int:
    """Length of the longest common subsequence by the textbook table."""
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for row, word in enumerate(left):
        for column, right_word in enumerate(right):
            table[row + 1][column + 1] = (
                table[row][column] + 1
                if word == right_word
                else max(table[row][column + 1], table[row + 1][column])
            )
    return table[-1][-1]


@given(WORDS, WORDS)
def test_common_subsequence_equals_the_textbook_table(
    left: list[str], right: list[str]
) -> None:
    assert common_subsequence(left, right) == by_table(left, right)


@given(WORDS, WORDS)
def test_rouge_l_equals_rouge_score(left: list[str], right: list[str]) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    expected = scorer.score(" ".join(left), " ".join(right))["rougeL"].fmeasure
    assert rouge_l(left, right) == pytest.approx(expected)


@given(st.lists(WORDS, max_size=6), WORDS, st.sampled_from([0.3, 0.5, 0.7, 1.0]))
def test_likeness_is_rouge_l_at_the_threshold(
    texts: list[list[str]], words: list[str], threshold: float
) -> None:
    pool = Likeness(threshold)
    for held_words in texts:
        pool.add(" ".join(held_words))
    assert pool.has_like(" ".join(words)) == any(
        words and rouge_l(words, held_words) >= threshold for held_words in texts
    )


def test_words_are_compared_without_case_and_punctuation() -> None:
    assert words_of("Name THREE rivers, please!") == [
        "name",
        "three",
        "rivers",
        "please",
    ]
    assert words_of("Größe der Stadt") == ["größe", "der", "stadt"]
    assert rouge_l(words_of("a b c d"), words_of("a x c d")) == 0.75


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("1. One\n2. Two", ["One", "Two"]),
        (
            "Of course!\n\n9) First task\nover two lines\n\n10) Second",
            ["First task\nover two lines", "Second"],
        ),
        (
            "Task 3: Name 3. It has 2 parts\n Task 4: Go",
            ["Name 3. It has 2 parts", "Go"],
        ),
        ("1.\n2. Two", ["Two"]),
        ("No list at all", []),
    ],
)
def test_numbered_list_is_read(text: str, entries: list[str]) -> None:
    assert read_numbered(text) == entries
    assert read_numbered(text, was_cut=True) == entries[:-1]
