"""Jinja that somebody else wrote, with bounds on what it may do: a template of a stranger's model ends.

The sandbox of Jinja keeps a template from reading and calling what it must not. It does not keep it from counting to
10^10 in nested loops, or from doubling a text forty times. Here every turn of a loop, every call and every filter is a
step, and nothing may make a text or list beyond a size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_STEPS = 200_000
"""Of one rendering, which take a second: a conversation of 1,000 messages takes some ten thousand."""
MOST_CHARACTERS = 1 << 26
"""That an operation may make; of a filter or method, the product of the sizes of what it is given."""
ABSENT_GLOBALS = ("lipsum",)
"""Makes any amount of text."""
_rendering = threading.local()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox for templates that are not trusted with the machine's time and memory."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self.filters |= {_COUNTED: _counted, _JOINED: _joined}
        for name in ABSENT_GLOBALS:
            self.globals.pop(name, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`, unless the result would be too large."""
        _spend(1)
        if operator == "**":
            _refuse_above(abs(right) if isinstance(right, int | float) else 0, 64, "an exponent")
        if operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
            _refuse_above(len(left) + len(right), MOST_CHARACTERS, "a text or list")
        if operator == "*" or (operator == "%" and isinstance(left, str)):
            _refuse_above(_product((left, right)), MOST_CHARACTERS if _is_sized(left, right) else 1 << 64, "a value")
        if operator == "%" and isinstance(left, str):
            _refuse_widths(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Call a function of the template, a macro or a method, unless it would make too much."""
        _spend(1)
        # The sandbox gives its own function for a text's `format`, around the method.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str | bytes | list | tuple | dict):
            _refuse_above(_product((owner, *args, *options.values())), MOST_CHARACTERS, "what a method is given")
            if getattr(function, "__name__", "") in ("format", "format_map"):
                _refuse_widths(str(owner))
        return super().call(context, function, *args, **options)


def render(template: jinja2.Template, **names: Any) -> str:
    """Render a template of a BoundedEnvironment.

    Raises:
        jinja2.TemplateError: the template refuses what it is given, or does more than it may.
    """
    _rendering.left = MOST_STEPS
    try:
        return template.render(**names)
    except (RecursionError, OverflowError, MemoryError) as error:
        raise SecurityError(f"the template does more than it may: {type(error).__name__}: {error}") from error
    finally:
        _rendering.left = MOST_STEPS


class _Bounds(NodeTransformer):
    """Counts the turns of loops, and looks at what `~` joins."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """`{% for x in y %}` goes over `y | counted`."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        """`a ~ b` is `[a, b] | joined`."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes, lineno=node.lineno), _JOINED, [], [], None, None, lineno=node.lineno)


_COUNTED, _JOINED = "counted by gristmill", "joined by gristmill"
"""Names that no template can write."""


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend(1)
        yield item


def _joined(parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    _refuse_above(sum(map(len, texts)), MOST_CHARACTERS, "a text")
    return "".join(texts)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that refuses to make too much."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own argument

    @wraps(function)
    def bounded(*args: Any, **options: Any) -> Any:
        given = (*args[skipped:], *options.values())
        _refuse_above(_product(given), MOST_CHARACTERS, "what a filter is given")
        _spend(1 + sum(len(one) for one in given if isinstance(one, list | tuple | dict | range)))
        if function.__name__ == "do_format":
            _refuse_widths(str(given[0]))
        return function(*args, **options)

    return bounded


def _product(values: Iterable[Any]) -> int:
    """How much could be made of values: their sizes and numbers multiplied."""
    product = 1
    for value in values:
        size = abs(value) if isinstance(value, int) else len(value) if hasattr(value, "__len__") else 1
        product *= max(size, 1)
    return product


def _is_sized(*values: Any) -> bool:
    return any(isinstance(value, str | bytes | list | tuple) for value in values)


def _refuse_widths(form: str) -> None:
    """Refuse `%999999999d`, which is as long as it says."""
    digits = "".join(letter if letter.isdigit() else " " for letter in form).split()
    _refuse_above(max((len(run) for run in digits), default=0), 5, "a width")


def _refuse_above(size: float, most: int, what: str) -> None:
    if size > most:
        raise SecurityError(f"the template does more than it may: {what} would be larger than {most:,}")


def _spend(steps: int) -> None:
    _rendering.left = getattr(_rendering, "left", MOST_STEPS) - steps
    if _rendering.left < 0:
        raise SecurityError(f"the template does more than it may: it takes over {MOST_STEPS:,} steps")
