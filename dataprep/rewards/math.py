"""Equality of mathematical answers: parsed without executing code, compared numerically
with sympy.

A model's output is not trusted as code: Python's grammar parses the text, and only
numbers, names, arithmetic and a few functions of the tree are converted. sympy's own
parsers evaluate their input, and its simplification may not terminate; values are
therefore compared at a few points to many digits, in bounded time.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from functools import lru_cache
from typing import Any

from gristmill.core.seeds import content_key

MOST_CHARACTERS = 400
"""Longest expression that is parsed."""
MOST_EXPONENT = 1000
"""Largest exponent, and most digits of a power: towers of powers would exhaust
memory.
"""
DIGITS = 30
"""Digits to which values are computed."""
CLOSE = 1e-12
"""Largest relative difference of equal values."""
POINTS = 3
"""Points at which expressions are compared: variables are fractions between 0 and 2,
derived from their names.
"""
FUNCTIONS = ("sqrt", "sin", "cos", "tan", "log", "exp")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
NAMES = {"pi": "pi", "e": "E", "i": "I"}
REPLACED = (
    (
        r"\\left|\\right|\\[,;!: ]|\\\$|\$|\\displaystyle|\\(?:text|mathrm|mbox)\{[^{}]*\}",
        " ",
    ),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(?:cdot|times)", "*"),
    (r"\\div", "/"),
    (r"\\pi", " pi "),
    (r"\\ln|\bln\b", "log"),
    (r"\\(sin|cos|tan|log|exp)", r"\1"),
    (r"\\(?:%|percent)|%", "/100"),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
)
"""Replacements that turn LaTeX and thousands separators into Python syntax."""


class NotMathError(ValueError):
    """A text that is not a supported expression."""


def final_answer(text: str) -> str:
    """Final answer of a text: the last `\\boxed{...}`, else the text after the last
    `####`, else the part of the last line after its last equals sign or `is`, without a
    full stop.
    """
    begin = text.rfind("\\boxed{")
    if begin >= 0:
        depth = 1
        start = begin + len("\\boxed{")
        for index in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start:index]
    tail = text.rpartition("####")[2].strip()
    last_line = tail.splitlines()[-1] if tail else ""
    return re.split(r"=|\bis\b", last_line)[-1].strip().rstrip(".")


def same_answer(given: str, right: str) -> bool:
    """Return True if the final answers of two texts have the same value; other texts
    must be equal.
    """
    answer = final_answer(given)
    reference = final_answer(right)
    if answer.strip() == reference.strip():
        return bool(answer.strip())
    try:
        first, second = _values(answer), _values(reference)
    except NotMathError:
        return False
    return len(first) == len(second) and all(
        abs(a - b) <= CLOSE * max(1.0, abs(a), abs(b))
        for a, b in zip(first, second, strict=True)
    )


@lru_cache(maxsize=4096)
def _values(text: str) -> tuple[complex, ...]:
    """Values of an expression, or of a tuple's elements, at all points.

    Raises:
        NotMathError: it is not supported, or has no finite value.
    """
    import sympy

    if len(text) > MOST_CHARACTERS:
        raise NotMathError(text)
    source = text
    for pattern, replacement in REPLACED:
        source = re.sub(pattern, replacement, source)
    for _ in range(source.count("\\frac") + source.count("\\sqrt")):  # innermost first
        source = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"((\1)/(\2))", source)
        source = re.sub(r"\\frac\s*(\d)\s*(\d)", r"((\1)/(\2))", source)
        source = re.sub(r"\\sqrt\s*\{([^{}]*)\}", r"sqrt(\1)", source)
        source = re.sub(r"\\sqrt\s*(\d)", r"sqrt(\1)", source)
    source = source.replace("^", "**").replace("{", "(").replace("}", ")")
    # A number, or a closed bracket, before a name or a bracket is a product.
    source = re.sub(r"(\d|\))\s*(?=[A-Za-z(])", r"\1*", source)
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        parts = tree.elts if isinstance(tree, ast.Tuple) else [tree]
        expressions = [_to_sympy(part) for part in parts]
        names = sorted(
            set().union(*(expression.free_symbols for expression in expressions)),
            key=str,
        )
        values = []
        for point in range(POINTS):
            subs = {
                name: sympy.Rational(content_key(point, str(name)) % 9973 + 1, 4999)
                for name in names
            }
            values += [complex(part.evalf(DIGITS, subs=subs)) for part in expressions]
    except (
        SyntaxError,
        ValueError,
        TypeError,
        ArithmeticError,
        RecursionError,
        MemoryError,
    ) as error:
        raise NotMathError(text) from error
    if not all(abs(value) < float("inf") for value in values):
        raise NotMathError(text)
    return (complex(len(expressions)), *values)


def _to_sympy(node: ast.expr) -> Any:
    """Convert a syntax tree to a sympy expression; only FUNCTIONS may be called."""
    import sympy

    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(
            value, bool
        ):
            return (
                sympy.Rational(str(value))
                if isinstance(value, float)
                else sympy.Integer(value)
            )
        case ast.Name(id=name):
            return getattr(sympy, NAMES[name]) if name in NAMES else sympy.Symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_to_sympy(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _to_sympy(inner)
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if (
            name in FUNCTIONS
        ):
            return getattr(sympy, name)(_to_sympy(inner))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base = _to_sympy(left)
            exponent = _to_sympy(right)
            size = abs(complex(exponent.evalf(5))) if exponent.is_number else math.inf
            digits = (
                size * math.log10(abs(complex(base.evalf(5))) + 2.0)
                if base.is_number
                else 0.0
            )
            if size > MOST_EXPONENT or digits > MOST_EXPONENT:
                raise ValueError("a power that is no small number")
            return base**exponent
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_to_sympy(left), _to_sympy(right))
    raise ValueError("not arithmetic")
