"""Calculator: arithmetic with Python's numbers and operators, and a few functions."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

MOST_CHARACTERS = 1000
MOST_DIGITS = 1000
"""Largest number of digits of an intermediate integer; a power with more is an
error.
"""
MOST_BITS = MOST_DIGITS * math.log2(10)
MOST_ROUNDED = 15
"""Largest precision of `round`; a double has no more digits."""
SIGNS = (("^", "**"), ("\u00d7", "*"), ("\u00f7", "/"), ("\u2212", "-"))
OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def _rounded(value: Any, digits: int = 0) -> Any:
    if not -MOST_ROUNDED <= digits <= MOST_ROUNDED:
        raise ValueError(f"round takes at most {MOST_ROUNDED} digits")
    return round(value, digits)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": math.sqrt,
    "abs": abs,
    "round": _rounded,
    "min": min,
    "max": max,
}


class CalculatorError(ValueError):
    """An expression that is invalid or cannot be evaluated."""


def calculate(expression: str) -> str:
    """Evaluate an expression: `84`, `0.333333333333`.

    Raises:
        CalculatorError: the expression is invalid, too long, or has no finite value.

    >>> calculate("12 * (3 + 4)"), calculate("1 / 3"), calculate("2^10")
    ('84', '0.333333333333', '1024')
    """
    if len(expression) > MOST_CHARACTERS:
        raise CalculatorError(
            f"the expression has more than {MOST_CHARACTERS} characters"
        )
    # Common notation; commas separate arguments, so thousands have none.
    source = expression.strip()
    for sign, operator_ in SIGNS:
        source = source.replace(sign, operator_)
    try:
        value = _value(ast.parse(source, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise CalculatorError(f"{expression!r} is no expression") from error
    except OverflowError as error:
        raise CalculatorError("the value is too large") from error
    except (ArithmeticError, ValueError, TypeError) as error:
        raise CalculatorError(str(error)) from error
    if isinstance(value, complex) or not math.isfinite(value):
        raise CalculatorError("the value is no finite number")
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.12g}"
    return (
        str(int(value))
        if abs(value) < 10**15 or isinstance(value, int)
        else f"{value:.12g}"
    )


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(
            number, bool
        ):
            return number
        case ast.UnaryOp(op=op, operand=inner) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(inner))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            first, second = _value(left), _value(right)
            if (
                isinstance(op, ast.Pow)
                and isinstance(first, int)
                and isinstance(second, int)
                and second > 0
                and second * max(abs(first), 1).bit_length() > MOST_BITS
            ):
                raise CalculatorError(f"a power with more than {MOST_DIGITS} digits")
            result = OPERATORS[type(op)](first, second)
            if isinstance(result, int) and result.bit_length() > MOST_BITS:
                raise CalculatorError(f"a number with more than {MOST_DIGITS} digits")
            return result
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if (
            name in FUNCTIONS
        ):
            return FUNCTIONS[name](*map(_value, arguments))
    raise CalculatorError(
        f"only numbers, + - * / // % **, parentheses and {', '.join(FUNCTIONS)} can "
        "be worked out"
    )
