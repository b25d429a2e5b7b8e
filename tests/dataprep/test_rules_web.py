"""Web rule sets: statistics derived by hand, and verdicts at the thresholds."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.dataprep.filters.rule_sets import measure
from gristmill.dataprep.thresholds import failures, first_failures
from gristmill.mixtures.steps.rules import Rules
from tests.dataprep import rules_reference

PIECES = [
    "lorem ipsum",
    "Lorem Ipsum",
    "LOREM\nIPSUM",
    "{",
    "}",
    "One.",
    "two?",
    "the same line.\n",
    "\n",
    "\n\n",
    " \n",
    " ",
    "\t",
    "\r",
    "\u2028",
    "\u3000",
    "東京。",
    "é",
    "😀",
    "word",
    "a" * 31,
    "b" * 40,
    "...",
    '"',
    "\u200b",
    "http",
    "https",
    "://",
    "h",
    "%4F",
    "%",
    "/x",
    "x.y",
    "Terms of Use",
    "use cookies",
    "PRIVACY & cookies policy",
    "Any cookies that may not be particularly necessary for the website to function",
    "9",
    "⟨",
    "]",
    "\b",
    "!",
    "'",
]
any_text = st.text(st.characters(codec="utf-8"))
pieced_text = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


def measured(rules: dict[str, Any], texts: list[str]) -> list[dict[str, float]]:
    columns = measure(
        pa.table({"text": pa.array(texts, pa.large_string())}),
        Rules.model_validate(rules),
    )
    return [
        {name: values[row].item() for name, values in columns.items()}
        for row in range(len(texts))
    ]


def reasons(rules: dict[str, Any], texts: list[str]) -> list[str | None]:
    """Reason for which each text is dropped, or None."""
    section = Rules.model_validate(rules)
    columns = measure(pa.table({"text": pa.array(texts, pa.large_string())}), section)
    return first_failures(failures(columns, section.sets), len(texts))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(any_text, pieced_text), max_size=4))
def test_kernels_agree_exactly_with_the_plain_definitions(texts: list[str]) -> None:
    rules = {
        "c4": {},
        "mc4": {"paragraph_characters": 20},
        "fineweb": {"short_line_characters": 12},
        "curator": {},
    }
    expected = [
        {
            **rules_reference.c4(text),
            **rules_reference.mc4(text, 20),
            **rules_reference.fineweb(text, 12),
            **rules_reference.curator(text),
        }
        for text in texts
    ]
    assert measured(rules, texts) == expected


def test_c4_statistics_counted_by_hand() -> None:
    text = (
        "Mr. Ünal wrote {this}. It went: Lorem Ipsum, LOREM ipsum!\nlorem  ipsum "
        "lorem\nipsum"
    )
    assert measured({"c4": {}}, [text]) == [
        {
            "document_characters": len(text),
            "sentences": 4,
            "lorem_ipsum": 2,
            "curly_brackets": 1,
        }
    ]


def test_fineweb_measures_a_shard_without_documents() -> None:
    assert measured({"fineweb": {"words": "language"}}, []) == []


def test_fineweb_statistics_counted_by_hand() -> None:
    text = (
        "A line that ends.\n\nThe same line\nThe same line\n \nThe same "
        "line\nThis one is over thirty characters?\n"
    )
    # 5 filled lines, 2 of them with an end; 7 newlines; 17 + 3 * 13 + 1 + 35 code
    # points. Words: A line that ends . | The same line, three times | This one is over
    # thirty characters ?
    assert measured({"fineweb": {}}, [text]) == [
        {
            "filled_lines": 5,
            "terminal_line_ratio": 2 / 5,
            "short_line_ratio": 4 / 5,
            "repeated_line_char_ratio": 26 / 92,
            "newline_word_ratio": 7 / 21,
        }
    ]


def test_curator_statistics_counted_by_hand() -> None:
    text = "See https://a.org/x (12 ⟩\n\nOur TERMS of use.\n \nétait"
    # 52 code points; paragraphs: See ..., Our ...; lines: See ..., Our ..., était.
    assert measured({"curator": {}}, [text]) == [
        {
            "non_alphanumeric_ratio": 14 / 52,  # seven spaces, : / / / ( ⟩ and é
            "digit_ratio": 2 / 52,
            "url_char_ratio": len("https://a.org") / 52,
            "whitespace_ratio": 11 / 52,
            "bracket_ratio": 2 / 52,
            "boilerplate_paragraph_ratio": 1 / 2,
            "unended_line_ratio": 2 / 3,
            "longest_word_characters": len("https://a.org/x"),
        }
    ]
    assert set(measured({"curator": {}}, [""])[0].values()) == {1.0, 0.0}
    assert (
        measured({"curator": {}}, ["One.\n\nLorem ipsum."])[0][
            "boilerplate_paragraph_ratio"
        ]
        == 1.0
    )


@pytest.mark.parametrize(
    ("rules", "passing", "failing", "reason"),
    [
        ({"curator": {}}, "ab-.", "a-.", "curator/max_non_alphanumeric_ratio"),
        (
            {"curator": {}},
            "a" * 16 + "333.",
            "a" * 15 + "333.",
            "curator/max_digit_ratio",
        ),
        (
            {"curator": {}},
            "http://abc " + "a" * 38 + ".",
            "http://abc " + "a" * 37 + ".",
            "curator/max_url_char_ratio",
        ),
        ({"curator": {}}, "aaaaa.\n\n", "aaaa.\n\n", "curator/max_whitespace_ratio"),
        ({"curator": {}}, "a" * 8 + "(.", "a" * 7 + "(.", "curator/max_bracket_ratio"),
        (
            {"curator": {}},
            "\n\n".join(["use cookies."] * 2 + ["fine."] * 3),
            "\n\n".join(["use cookies."] * 2 + ["fine."] * 2),
            "curator/max_boilerplate_paragraph_ratio",
        ),
        (
            {"curator": {}},
            "\n".join(["word"] * 17 + ["end."] * 3),
            "\n".join(["word"] * 18 + ["end."] * 3),
            "curator/max_unended_line_ratio",
        ),
        (
            {"curator": {}},
            "a" * 999 + ".",
            "a" * 1000 + ".",
            "curator/max_longest_word_characters",
        ),
        (
            {"c4": {}},
            "He ran. " * 23_750,
            "He ran. " * 23_750 + ".",
            "c4/max_document_characters",
        ),
        (
            {"c4": {}},
            "One. Two. Lorem-ipsum.",
            "One. Two. Lorem ipsum.",
            "c4/max_lorem_ipsum",
        ),
        ({"c4": {}}, "One. Two. (3).", "One. Two. {3}.", "c4/max_curly_brackets"),
        ({"c4": {}}, "One. Two. Three.", "One. Mr. Two, etc.", "c4/min_sentences"),
        (
            {"c4": {"constants": "paper"}},
            "1! 2! 3! 4! 5!",
            "1! 2! 3! 4!",
            "c4/min_sentences",
        ),
        (
            {"mc4": {}},
            "\n".join(["é" * 200] * 3),
            "\n".join(["é" * 200] * 2 + ["é" * 199] * 9),
            "mc4/min_long_paragraphs",
        ),
        ({"fineweb": {}}, "x" * 31 + ".", " \n\t\n", "fineweb/min_filled_lines"),
        (
            {"fineweb": {"max_newline_word_ratio": 9}},
            lines := "\n".join(
                "x" * 31 + str(row) + "." * (row < 3) for row in range(25)
            ),
            lines.replace(".", "", 1),
            "fineweb/min_terminal_line_ratio",
        ),  # 3 of 25 are 0.12
        (
            {"fineweb": {}},
            "\n".join(
                [f"{row} " + "and so on " * 3 + "." for row in range(33)]
                + [f"{row} and so on it goes." for row in range(67)]
            ),
            "\n".join(
                [f"{row} " + "and so on " * 3 + "." for row in range(32)]
                + [f"{row} and so on it goes." for row in range(68)]
            ),
            "fineweb/max_short_line_ratio",
        ),
        (
            {"fineweb": {}},
            "x x " * 82 + "\n" + "y y " * 10 + ".\n" + "y y " * 10 + ".",
            "x x " * 81 + "xxx" + "\n" + "y y " * 10 + ".\n" + "y y " * 10 + ".",
            "fineweb/max_repeated_line_char_ratio",
        ),
        (
            {"fineweb": {"max_short_line_ratio": 1}},
            "a a a.\nb b b b.\n\nc",
            "a a a.\nb b b.\n\nc",
            "fineweb/max_newline_word_ratio",
        ),
    ],
)
def test_bound_passes_and_the_next_value_fails(
    rules: dict[str, Any], passing: str, failing: str, reason: str
) -> None:
    assert reasons(rules, [passing, failing]) == [None, reason]


def test_alias_sets_the_constants_of_one_source() -> None:
    def values(rules: dict[str, Any]) -> tuple[int, float]:
        section = Rules.model_validate(rules)
        assert Rules.model_validate(section.model_dump()) == section
        chosen = section.sets
        return chosen["c4"].min_sentences, chosen[
            "fineweb"
        ].max_repeated_line_char_ratio

    assert values({"c4": {}, "fineweb": {}}) == (3, 0.1)
    assert values(
        {"c4": {"constants": "paper"}, "fineweb": {"constants": "datatrove"}}
    ) == (5, 0.01)
    assert values(
        {"c4": {"constants": "paper", "min_sentences": 4}, "fineweb": {}}
    ) == (4, 0.1)
