"""Built-in checks of answers, case by case."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from gristmill.dataprep.rewards.answer_checks import Answer, last_number, verifier_of
from gristmill.mixtures.schema.rl import AnyReward, wants_answer

SECTION: TypeAdapter[Any] = TypeAdapter(AnyReward)


def reward(
    section: dict[str, Any], text: str, right: str | None = None, tokens: int = 0
) -> float:
    return verifier_of(SECTION.validate_python(section))(Answer(text, tokens, right))


@pytest.mark.parametrize(
    ("section", "text", "right", "expected"),
    [
        ({"kind": "exact"}, " Paris\n", "Paris", 1.0),
        ({"kind": "exact"}, "paris", "Paris", 0.0),
        ({"kind": "exact", "ignore_case": True}, "PARIS", "Paris", 1.0),
        ({"kind": "exact"}, "Paris.", "Paris", 0.0),
        ({"kind": "contains"}, "It is Paris, of course.", "Paris", 1.0),
        ({"kind": "contains"}, "It is Rome.", "Paris", 0.0),
        ({"kind": "contains", "text": "course"}, "It is Paris, of course.", None, 1.0),
        (
            {"kind": "contains", "text": "COURSE", "ignore_case": True},
            "of course",
            None,
            1.0,
        ),
        ({"kind": "number"}, "6 times 7 is 42.", "#### 42", 1.0),
        ({"kind": "number"}, "42, or rather 43", "42", 0.0),
        ({"kind": "number"}, "$1,234.50", "1234.5", 1.0),
        ({"kind": "number"}, "no number", "42", 0.0),
        ({"kind": "number"}, "3.14", "3.1416", 0.0),
        ({"kind": "number", "tolerance": 0.01}, "3.14", "3.1416", 1.0),
        ({"kind": "number"}, "-7", "7", 0.0),
        ({"kind": "regex", "pattern": r"^\d+$"}, "123", None, 1.0),
        ({"kind": "regex", "pattern": r"^\d+$"}, "a 123", None, 0.0),
        (
            {"kind": "regex", "pattern": r"answer is (\w+)", "captures_answer": True},
            "the answer is no, the answer is yes",
            "yes",
            1.0,
        ),
        (
            {"kind": "regex", "pattern": r"answer is (\w+)", "captures_answer": True},
            "the answer is no",
            "yes",
            0.0,
        ),
        (
            {"kind": "regex", "pattern": r"x(y)?", "captures_answer": True},
            "x",
            "y",
            0.0,
        ),
        ({"kind": "format"}, "<think>\nhm\n</think>\n<answer>4</answer>\n", None, 1.0),
        ({"kind": "format"}, "So: <think>hm</think><answer>4</answer>", None, 0.0),
        ({"kind": "format"}, "<answer>4</answer><think>hm</think>", None, 0.0),
        ({"kind": "format"}, "<think>hm</think><answer> </answer>", None, 0.0),
        (
            {"kind": "format"},
            "<think>a</think><think>b</think><answer>4</answer>",
            None,
            0.0,
        ),
        ({"kind": "format", "tags": ["plan"]}, "<plan>x</plan>", None, 1.0),
    ],
)
def test_reward_of_each_check(
    section: dict[str, Any], text: str, right: str | None, expected: float
) -> None:
    assert reward(section, text, right) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(0, 0.0), (5, 0.5), (10, 1.0), (15, 0.5), (20, 0.0), (99, 0.0)],
)
def test_length_reward_falls_linearly_with_the_distance_from_the_target(
    tokens: int, expected: float
) -> None:
    assert (
        reward({"kind": "length", "target_tokens": 10}, "", tokens=tokens) == expected
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("between 3-5", 5.0),
        ("it is -5", -5.0),
        ("\u22125 degrees", -5.0),
        ("1,000,000", 1e6),
        ("1,2", 2.0),
        (".5", 0.5),
        ("x2", 2.0),
        ("2.", 2.0),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text(text: str, expected: float | None) -> None:
    assert last_number(text) == expected


def test_checks_that_compare_need_an_answer() -> None:
    for kind in ("exact", "number", "contains"):
        assert wants_answer(SECTION.validate_python({"kind": kind}))
    assert not wants_answer(SECTION.validate_python({"kind": "contains", "text": "x"}))
    assert not wants_answer(SECTION.validate_python({"kind": "regex", "pattern": "x"}))
    assert wants_answer(
        SECTION.validate_python(
            {"kind": "regex", "pattern": "(x)", "captures_answer": True}
        )
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kind": "regex", "pattern": "("}, "not a regular expression"),
        ({"kind": "regex", "pattern": "x", "captures_answer": True}, "needs a group"),
        ({"kind": "python", "code": "1"}, "does not match any of the expected tags"),
        ({"kind": "format", "tags": ["a b"]}, "pattern"),
    ],
)
def test_invalid_check_is_rejected(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SECTION.validate_python(section)
