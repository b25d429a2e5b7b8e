"""Word and sentence counts: kernels agree with the plain definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.filters.lines_and_sentences import (
    BREAK,
    SPACE,
    TERMINAL,
    WORD,
    count_sentences,
    count_words,
    text_classes,
)
from gristmill.dataprep.text.unicode_tables import CODE_POINTS
from tests.dataprep import rules_reference

PIECES = [
    "the",
    "The",
    "Mr.",
    "I.",
    "J.",
    "É.",
    "a.m.",
    "e.g",
    "U.S.",
    "Etc.",
    "(etc.)",
    "...",
    "…",
    "!",
    "?",
    ".",
    "。",
    "？",
    "」",
    '"',
    "'",
    "’",
    "“",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\x85",
    "\u2028",
    "\x1c",
    "東京",
    "ไทย",
    "क्ष",
    "é",
    "\u0301",
    "\u200b",
    "\ufeff",
    "-",
    "--",
    "*",
    "_",
    "(",
    ")",
    "A",
    "b",
    "3.14",
    "it's",
    ",",
    "ⅷ",
    "😀",
    "؟",
    "।",
    "\u00a0",
]
any_text = st.text(st.characters(codec="utf-8"))
pieced_text = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


def words(text: str) -> int:
    data = np.frombuffer(text.encode(), np.uint8)
    return count_words(data, 0, len(data), text_classes())


def sentences(text: str) -> int:
    data = np.frombuffer(text.encode(), np.uint8)
    return count_sentences(data, 0, len(data), text_classes())


@settings(max_examples=400, deadline=None)
@given(st.one_of(any_text, pieced_text))
def test_kernels_agree_exactly_with_the_plain_definitions(text: str) -> None:
    assert (words(text), sentences(text)) == (
        rules_reference.words(text),
        rules_reference.sentences(text),
    )


@pytest.mark.slow
def test_code_points_are_classified_like_python() -> None:
    classes = text_classes()
    for code in range(CODE_POINTS):
        character = chr(code)
        assert bool(classes[code] & SPACE) == character.isspace()
        assert bool(classes[code] & BREAK) == (len(f"a{character}b".splitlines()) == 2)
        assert bool(classes[code] & TERMINAL) == (
            character in rules_reference.TERMINAL_MARKS
        )
        assert not character.isalnum() or classes[code] & WORD


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 0),
        (" \n ", 0),
        ("one two", 2),
        ("it's 3.14, e.g. this", 6),
        ("don’t--stop", 3),
        ("a ---- b", 3),
        ("?!", 2),
        ("x = y_1;", 4),
        ("東京の", 3),
        ("क्षत्रिय", 1),
        ("naïve cafe\u0301", 2),
        ("\ufeffword\u200bs", 1),
    ],
)
def test_words_counted_by_hand(text: str, number: int) -> None:
    assert words(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 0),
        (" \n\n ", 0),
        ("no end", 1),
        ("One. Two! Three? Four", 4),
        ("One.Two", 1),
        ("It is 3.5 m.", 1),
        ('He said "Stop." Then he left.', 2),
        ("(One.) Two.", 2),
        ("Mr. Smith met Dr. J. R. Jones at 5 p.m. in the U.S. office.", 1),
        ("So am I. You too.", 2),
        ("Wait... what? Wait... What?", 3),
        ("Is it…? Yes.", 2),
        ("Two lines\nof one text", 2),
        ("etc.\nNext", 2),
        ("今日は。明日は？はい！", 3),
        ("彼は「はい。」と言った。", 2),
        ("यह एक वाक्य है। यह दूसरा है।", 2),
        ("هل هذا سؤال؟ نعم.", 2),
    ],
)
def test_sentences_counted_by_hand(text: str, number: int) -> None:
    assert sentences(text) == number


def test_million_marks_take_one_pass() -> None:
    assert sentences(". " * 500_000) == 500_000
    assert sentences("." * 1_000_000) == 1
    assert sentences("a.") == sentences("a." * 500_000) == 1
