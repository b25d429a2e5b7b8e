"""How alike two prompts are, and what of an answer is a new one."""

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


def by_table(one: list[str], other: list[str]) -> int:
    """The length of the longest common subsequence as textbooks have it."""
    table = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for row, word in enumerate(one):
        for column, met in enumerate(other):
            table[row + 1][column + 1] = (
                table[row][column] + 1 if word == met else max(table[row][column + 1], table[row + 1][column])
            )
    return table[-1][-1]


@given(WORDS, WORDS)
def test_the_common_subsequence_is_as_long_as_the_table_says(one: list[str], other: list[str]) -> None:
    assert common_subsequence(one, other) == by_table(one, other)


@given(WORDS, WORDS)
def test_rouge_l_is_that_of_its_authors_package(one: list[str], other: list[str]) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    found = scorer.score(" ".join(one), " ".join(other))["rougeL"].fmeasure
    assert rouge_l(one, other) == pytest.approx(found)


@given(st.lists(WORDS, max_size=6), WORDS, st.sampled_from([0.3, 0.5, 0.7, 1.0]))
def test_a_text_is_like_another_where_their_rouge_l_reaches_the_threshold(
    held: list[list[str]], one: list[str], threshold: float
) -> None:
    pool = Likeness(threshold)
    for text in held:
        pool.add(" ".join(text))
    assert pool.has_like(" ".join(one)) == any(one and rouge_l(one, other) >= threshold for other in held)


def test_words_are_compared_without_case_and_punctuation() -> None:
    assert words_of("Name THREE rivers, please!") == ["name", "three", "rivers", "please"]
    assert words_of("Größe der Stadt") == ["größe", "der", "stadt"]
    assert rouge_l(words_of("a b c d"), words_of("a x c d")) == 0.75


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("1. One\n2. Two", ["One", "Two"]),
        ("Of course!\n\n9) First task\nover two lines\n\n10) Second", ["First task\nover two lines", "Second"]),
        ("Task 3: Name 3. It has 2 parts\n Task 4: Go", ["Name 3. It has 2 parts", "Go"]),
        ("1.\n2. Two", ["Two"]),
        ("No list at all", []),
    ],
)
def test_the_entries_of_a_numbered_list_are_read(text: str, entries: list[str]) -> None:
    assert read_numbered(text) == entries
    assert read_numbered(text, was_cut=True) == entries[:-1]
