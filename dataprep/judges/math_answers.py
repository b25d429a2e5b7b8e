"""Whether two mathematical answers are equal: read without running anything, compared by sympy's numbers.

What a model writes is no code: the text is parsed by Python's grammar, and of its tree only numbers, names, arithmetic
and a few functions are taken over. sympy's own parsers evaluate what they read, and its simplification may not end; so
values are compared at some points to many digits, which is decided in bounded time.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from gristmill.dataprep.seeds import content_key

MOST_CHARACTERS = 400
"""Of an expression; longer ones are not read."""
MOST_EXPONENT = 1000
"""And the most digits of a power: a tower of them would take all memory."""
DIGITS = 30
"""That values are computed to."""
CLOSE = 1e-12
"""Two values that differ by less, as a share of the larger, are the same."""
POINTS = 3
"""At which expressions are compared: variables are fractions between 0 and 2 that their names decide."""
FUNCTIONS = ("sqrt", "sin", "cos", "tan", "log", "exp")
NAMES = {"pi": "pi", "e": "E", "i": "I"}
REPLACED = (
    (r"\\left|\\right|\\[,;!: ]|\\\$|\$|\\displaystyle|\\(?:text|mathrm|mbox)\{[^{}]*\}", " "),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(?:cdot|times)", "*"),
    (r"\\div", "/"),
    (r"\\pi", " pi "),
    (r"\\ln|\bln\b", "log"),
    (r"\\(sin|cos|tan|log|exp)", r"\1"),
    (r"\\(?:%|percent)|%", "/100"),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
)
"""LaTeX, and a thousands separator, as Python's grammar has it."""


class NotMathError(ValueError):
    """A text that is no expression of the kinds read here."""


def final_answer(text: str) -> str:
    """What a text gives as its answer: the last `\\boxed{...}`, else what follows the last `####`, else its last line,
    up to the last equals sign's right side and without a full stop."""
    begin = text.rfind("\\boxed{")
    if begin >= 0:
        depth, start = 1, begin + len("\\boxed{")
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place]
    tail = text.rpartition("####")[2].strip()
    last = tail.splitlines()[-1] if tail else ""
    return re.split(r"=|\bis\b", last)[-1].strip().rstrip(".")


def same_answer(given: str, right: str) -> bool:
    """Whether the final answers of two texts have the same value; texts that are no mathematics must be the same."""
    ours, theirs = final_answer(given), final_answer(right)
    if ours.strip() == theirs.strip():
        return bool(ours.strip())
    try:
        return _equal(_values(ours), _values(theirs))
    except NotMathError:
        return False


def _equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(
        abs(one - other) <= CLOSE * max(1.0, abs(one), abs(other)) for one, other in zip(first, second, strict=True)
    )


@lru_cache(maxsize=4096)
def _values(text: str) -> tuple[complex, ...]:
    """The values of an expression, or of a tuple's parts, at each of the points.

    Raises:
        NotMathError: it is none that is read here, or has no finite value.
    """
    import sympy

    if len(text) > MOST_CHARACTERS:
        raise NotMathError(text)
    try:
        tree = ast.parse(_as_python(text), mode="eval").body
        parts = tree.elts if isinstance(tree, ast.Tuple) else [tree]
        made = [_built(part) for part in parts]
        names = sorted({symbol for one in made for symbol in one.free_symbols}, key=str)
        found = [
            complex(
                one.evalf(
                    DIGITS,
                    subs={name: sympy.Rational(content_key(point, str(name)) % 9973 + 1, 4999) for name in names},
                )
            )
            for point in range(POINTS)
            for one in made
        ]
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise NotMathError(text) from error
    if not all(abs(one) < float("inf") for one in found):
        raise NotMathError(text)
    return (complex(len(made)), *found)


def _as_python(text: str) -> str:
    for pattern, instead in REPLACED:
        text = re.sub(pattern, instead, text)
    for _ in range(text.count("\\frac") + text.count("\\sqrt")):  # from the inside out
        text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", text)
        text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"((\1)/(\2))", text)
        text = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)", text)
        text = re.sub(r"\\sqrt\s*(\d)", r"sqrt(\1)", text)
    text = text.replace("^", "**").replace("{", "(").replace("}", ")")
    # A number, or a closed bracket, before a name or a bracket is a product.
    text = re.sub(r"(\d|\))\s*(?=[A-Za-z(])", r"\1*", text)
    return text.strip()


def _built(node: ast.expr) -> Any:
    """The expression of a tree; nothing in it is called but FUNCTIONS."""
    import sympy

    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return sympy.Rational(str(value)) if isinstance(value, float) else sympy.Integer(value)
        case ast.Name(id=name):
            return getattr(sympy, NAMES[name]) if name in NAMES else sympy.Symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_built(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _built(inner)
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in FUNCTIONS:
            return getattr(sympy, name)(_built(inner))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _built(left), _built(right)
            size = abs(complex(exponent.evalf(5))) if exponent.is_number else math.inf
            digits = size * math.log10(abs(complex(base.evalf(5))) + 2.0) if base.is_number else 0.0
            if size > MOST_EXPONENT or digits > MOST_EXPONENT:
                raise ValueError("a power that is no small number")
            return base**exponent
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _built(left) + _built(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _built(left) - _built(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _built(left) * _built(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _built(left) / _built(right)
    raise ValueError("not arithmetic")
