"""The reward `math`: equal values in any notation, and bounded evaluation."""

from __future__ import annotations

import pytest

from gristmill.dataprep.rewards.answer_checks import Answer, verifier_of
from gristmill.dataprep.rewards.math import final_answer, same_answer
from gristmill.mixtures.schema.rl import Mathematics, wants_answer

pytest.importorskip("sympy", reason="sympy comes with torch")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{\frac{1}{2}} or \boxed{x^{2}}.", "x^{2}"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("it is\nx = 12.", "12"),
        ("The answer is 5.", "5"),
        ("", ""),
        (r"\boxed{never closed", r"\boxed{never closed"),
        ("1 + 1 = 1 * 2 = 2", "2"),
    ],
)
def test_final_answer_is_boxed_marked_or_on_the_last_line(
    text: str, answer: str
) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\frac12", "1/2"),
        ("2(x+1)", "2x + 2"),
        (r"$\sqrt{8}$", r"2\sqrt{2}"),
        ("1,234.50", "1234.5"),
        (r"\left( 1, \frac{6}{3} \right)", "(1, 2)"),
        ("(x-1)(x+1)", "x^2 - 1"),
        ("50\\%", "1/2"),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
        (r"2\pi", "2*pi"),
        (r"\sin(x)^2 + \cos(x)^2", "1"),
        (r"\ln(e^3)", "3"),
        (r"\dfrac{x^2+x}{x}", "x+1"),
        ("x = -3", "-3"),
        (r"12\text{ cm}", "12"),
        ("blue", "blue"),
        ("2^{10}", "1024"),
        ("(2i)^2", "-4"),
    ],
)
def test_answers_of_equal_value_are_the_same(answer: str, reference: str) -> None:
    assert same_answer(answer, reference)
    assert same_answer(reference, answer)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("0.3333", "1/3"),
        ("2x + 1", "2x + 2"),
        ("(1, 2)", "(2, 1)"),
        ("1", "(1, 1)"),
        ("", ""),
        ("blue", "red"),
        ("x", "y"),
        ("1/0", "5"),
        (r"\sqrt{2}", "1.41421356"),
        ("100000000000000001", "100000000000000002 * 2"),
        ("True", "1"),
        ("x^2", "x"),
    ],
)
def test_answers_of_different_value_differ(answer: str, reference: str) -> None:
    assert not same_answer(answer, reference)


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9**9",
        "((9**900)**900)**900",
        "9" * 500,
        "(" * 300,
        "x**x**x",
        "[1] * 10**9",
        "'a' * 10**9",
        "1e999999999",
        "__import__('os').getpid()",
        "sqrt.__class__",
        "(lambda: 1)()",
        "-" * 390 + "1",
        "sqrt(" * 60 + "2" + ")" * 60,
        "f(2)",
        "x if x else 1",
    ],
)
def test_hostile_answers_are_neither_run_nor_evaluated_without_bounds(
    answer: str,
) -> None:
    assert not same_answer(f"\\boxed{{{answer}}}", "123456789")


def test_math_reward_compares_with_the_prompts_answer() -> None:
    reward = Mathematics(kind="math")
    assert wants_answer(reward)
    check = verifier_of(reward)
    assert [
        check(Answer(text, 5, r"\frac{3}{4}"))
        for text in ("so it is 0.75", "so it is 0.7")
    ] == [1.0, 0.0]
