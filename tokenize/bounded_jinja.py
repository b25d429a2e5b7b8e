"""Jinja for templates that are not trusted with the machine's time and memory.

Jinja's sandbox limits what a template may read and call, but not how much it computes:
nested or recursive loops count to 10^10, and a text that is doubled forty times fills
the memory. Here every operation is charged for its work, counted in units of about 50
ns, and a rendering may do MOST_WORK. The count depends on the template and its data
alone, never on a clock, so the same rendering ends or fails on every machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_WORK = 50_000_000
"""Units of one rendering, some ten seconds: 1,001 messages with calls of tools take 0.2
million by the templates of Qwen3, Llama 3.1 and GLM-4.5, 8 million by gpt-oss's and 24
million by Gemma 4's, whose work is quadratic.
"""
STEP = 32
"""Units of a turn of a loop, a call, an operator or a filter."""
ELEMENT = 4
"""Units of an element of a list or mapping that is read."""
CHARACTERS_PER_UNIT = 64
"""Characters that Python's strings copy, compare or search in 50 ns."""
NODES_PER_UNIT = 8
"""Nodes of a body's syntax tree, most of which are in branches that are not taken."""
MOST_CHARACTERS = 1 << 26
"""Maximum number of characters written by an operation or by the whole rendering."""
MOST_DIGITS = 5
"""Maximum number of digits of a width, as in `%9999d`."""
MOST_BITS = 1 << 16
"""Maximum size of a number."""
ABSENT_GLOBALS = ("lipsum",)
"""Global function left out because it makes any amount of text."""
ABSENT_FILTERS = ("urlize",)
"""Filter left out because it takes quadratic time."""
CONSTANT_TIME = frozenset(
    {"length", "count", "default", "d", "attr", "first", "int", "float", "abs", "items"}
)
"""Filters whose time does not depend on the size of their arguments."""
GROWING_METHODS = frozenset(
    {
        "replace",
        "join",
        "ljust",
        "rjust",
        "center",
        "zfill",
        "expandtabs",
        "format",
        "format_map",
    }
)
"""Methods whose result may be as long as the product of their arguments' lengths."""
COMPARISONS = frozenset(
    {
        "in",
        "eq",
        "==",
        "equalto",
        "ne",
        "!=",
        "lt",
        "<",
        "lessthan",
        "le",
        "<=",
        "gt",
        ">",
        "greaterthan",
        "ge",
        ">=",
    }
)
"""Tests whose time depends on the size of their arguments."""


class _Budget(threading.local):
    """Remaining budget of this thread's rendering."""

    work = MOST_WORK
    characters = MOST_CHARACTERS


_budget = _Budget()


class _Dict:
    """`dict` in a template: without the methods of the class, which could change the
    messages (`dict.update(messages[0], ...)`); as in transformers.
    """

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """A dictionary with the same value for all keys."""
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` in a template: refuses the names of Python's internals; as in
    transformers.
    """

    def __init__(self, /, *items: Any, **named: Any) -> None:
        attributes = dict(*items, **named)
        for name in attributes:
            _refuse_internal(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_internal(name)
        super().__setitem__(name, value)


def _refuse_internal(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"the template stores {name!r} in a namespace; names that begin with an "
            "underscore are Python's own: choose another"
        )


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates have a budget of work; render them with `render`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ABSENT_GLOBALS:
            self.globals.pop(name, None)
        self.globals |= {"dict": _Dict(), "namespace": _Namespace}
        self.filters = {
            name: function
            for name, function in self.filters.items()
            if name not in ABSENT_FILTERS
        }
        self.add_filters(self.filters)
        tests: dict[str, Any] = self.tests
        self.tests = {
            name: _charging(test) if name in COMPARISONS else test
            for name, test in tests.items()
        }
        for function in (_counted, _written, _compared, _sliced, _joined, _charged):
            self.filters[_filter_name(function)] = function

    def add_filters(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        """Add filters that are charged for the size of their arguments."""
        self.filters |= {
            name: function if name in CONSTANT_TIME else _charging(function)
            for name, function in filters.items()
        }

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        tree: nodes.Template = _Charges().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`, unless the result would be too large."""
        is_format = operator == "%" and isinstance(left, str)
        is_sized = any(
            isinstance(value, str | bytes | list | tuple) for value in (left, right)
        )
        _spend(STEP)
        if operator == "**":
            exponent = abs(right) if isinstance(right, int) else 1
            _refuse_above(_bits(left) * exponent, MOST_BITS, "the bits of a number")
        elif operator == "*" and not is_sized:
            _refuse_above(_bits(left) + _bits(right), MOST_BITS, "the bits of a number")
        elif operator == "*" or is_format:
            _spend_product((left, right))
        elif isinstance(left, Sequence) and isinstance(right, Sequence):
            _refuse_above(len(left) + len(right), MOST_CHARACTERS, "a text or list")
            _spend((len(left) + len(right)) // CHARACTERS_PER_UNIT)
        if is_format:
            refuse_widths(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Call a function of the template, a macro or a method, unless it would do too
        much.
        """
        _spend(STEP)
        if isinstance(function, LoopContext):
            counted = [_counted(items, STEP) for items in args]
            return super().call(context, function, *counted, **options)
        # The sandbox gives its own function for a text's `format`, around the method.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        name = getattr(function, "__name__", "")
        values = (*args, *options.values())
        if isinstance(owner, str | bytes | list | tuple):
            if name in GROWING_METHODS:
                _spend_product((owner, *values))
            else:
                _spend(_weight((owner, *args)))
            if name in ("format", "format_map"):
                refuse_widths(str(owner))
        elif not isinstance(function, Macro) and not isinstance(owner, dict):
            _spend_product(values)
        return super().call(context, function, *args, **options)


def render(template: jinja2.Template, **names: Any) -> str:
    """Render a template of a BoundedEnvironment.

    Raises:
        jinja2.TemplateError: the template refuses its values, or exceeds its budget.
    """
    _budget.work = MOST_WORK
    _budget.characters = MOST_CHARACTERS
    try:
        return template.render(**names)
    except (RecursionError, OverflowError, MemoryError) as error:
        raise SecurityError(
            f"the template does more than it may: {type(error).__name__}: {error}"
        ) from error
    finally:
        _budget.work = MOST_WORK
        _budget.characters = MOST_CHARACTERS


class _Charges(NodeTransformer):
    """Adds to a syntax tree the filters that charge for what Jinja does without asking
    the environment.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:
        """`{% for x in y %}` goes over `y | counted(units of a turn)`."""
        units = STEP + _units_of(node.body)
        self.generic_visit(node)
        node.iter = _filter(node.iter, _counted, nodes.Const(units, lineno=node.lineno))
        return node

    def visit_Macro(self, node: Any) -> Any:
        """The body of a macro, and of a call block, begins with a charge for its
        content.
        """
        units = nodes.Const(_units_of(node.body), lineno=node.lineno)
        self.generic_visit(node)
        charge = nodes.ExprStmt(_filter(units, _charged), lineno=node.lineno)
        node.body.insert(0, charge)
        return node

    visit_CallBlock = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        """`{{ x }}` is `{{ x | written }}`."""
        self.generic_visit(node)
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else _filter(part, _written)
            for part in node.nodes
        ]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """`a in b` is `a in (b | compared)`; the smaller side bounds the time of the
        other operators.
        """
        self.generic_visit(node)
        for operand in node.ops:
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = _filter(operand.expr, _compared)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        """`a[b:c]` is `(a | sliced)[b:c]`."""
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter(node.node, _sliced)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        """`a ~ b` is `[a, b] | joined`."""
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _joined)


def _filter(
    node: nodes.Node, function: Callable[..., Any], *args: nodes.Expr
) -> nodes.Filter:
    name = _filter_name(function)
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _filter_name(function: Callable[..., Any]) -> str:
    """Name of a filter that the syntax tree is given; no template can write it."""
    return f"{function.__name__} by gristmill"


def _units_of(body: Sequence[nodes.Node]) -> int:
    """Units of one pass through a body, without the turns of the loops in it."""
    parts = [part for node in body for part in (node, *node.find_all(nodes.Node))]
    characters = sum(
        len(part.data) for part in parts if isinstance(part, nodes.TemplateData)
    )
    return len(parts) // NODES_PER_UNIT + characters // CHARACTERS_PER_UNIT


@jinja2.pass_context  # so that the optimizer does not compute it beforehand
def _charged(context: Any, units: int) -> None:
    _spend(units)


def _counted(items: Iterable[Any], units: int) -> Iterator[Any]:
    for item in items:
        _spend(units)
        yield item


def _written(value: Any) -> Any:
    if isinstance(value, str):
        _budget.characters -= len(value)
        _spend(1 + len(value) // CHARACTERS_PER_UNIT)
    else:
        units = _weight(value)
        _budget.characters -= units * CHARACTERS_PER_UNIT
        _spend(units)
    written = MOST_CHARACTERS - _budget.characters
    _refuse_above(written, MOST_CHARACTERS, "the text that it writes")
    return value


def _compared(value: Any) -> Any:
    _spend(_weight(value))
    return value


def _sliced(value: Any) -> Any:
    if isinstance(value, Sequence):
        _spend(STEP + len(value) // CHARACTERS_PER_UNIT)
    return value


def _joined(parts: Sequence[Any]) -> str:
    _spend(_weight(parts))
    texts = [str(part) for part in parts]
    _refuse_above(sum(map(len, texts)), MOST_CHARACTERS, "a text")
    return "".join(texts)


def _charging(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that is charged for the size of its arguments."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own argument

    @wraps(function)
    def charging(*args: Any, **options: Any) -> Any:
        values = (*args[skipped:], *options.values())
        _spend(STEP)
        _spend_product(values)
        if function.__name__ == "do_format":
            refuse_widths(str(values[0]))
        return function(*args, **options)

    return charging


def _spend_product(values: Sequence[Any]) -> None:
    """Charge for values, each of which may be repeated as often as the length or the
    value of the others.
    """
    product = 1
    for value in values:
        if isinstance(value, int):
            product *= max(abs(value), 1)
        elif hasattr(value, "__len__"):
            product *= max(len(value), 1)
    _refuse_above(product, MOST_CHARACTERS, "the result of an operation")
    _spend(product // CHARACTERS_PER_UNIT)
    for value in values:
        _spend(_weight(value))


def _weight(value: Any) -> int:
    """Units of reading all of a value once. A shared part counts at each occurrence, as
    it is written each time.

    Raises:
        SecurityError: there are more than the rendering may still spend.
    """
    units = 0
    stack = [value]
    while stack:
        part = stack.pop()
        units += ELEMENT
        if isinstance(part, str | bytes):
            units += len(part) // CHARACTERS_PER_UNIT
        elif isinstance(part, list | tuple | set):
            stack.extend(part)
        elif isinstance(part, dict):
            stack.extend(part)
            stack.extend(part.values())
        elif isinstance(part, range):
            units += ELEMENT * len(part)
        elif isinstance(part, Namespace):
            stack.append(object.__getattribute__(part, "__dict__"))
        if units > _budget.work:
            _spend(units)
    return units


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 1


def refuse_widths(form: str) -> None:
    """Raise SecurityError for formats such as `%999999999d` with a very long result."""
    digits = "".join(letter if letter.isdigit() else " " for letter in form).split()
    longest = max(map(len, digits), default=0)
    _refuse_above(longest, MOST_DIGITS, "the digits of a width")


def _refuse_above(size: float, most: int, name: str) -> None:
    if size > most:
        raise SecurityError(
            f"the template does more than it may: {name} would be more than {most:,}"
        )


def _spend(units: int) -> None:
    _budget.work -= units
    if _budget.work < 0:
        raise SecurityError(
            "the template does more than it may: its loops, calls and texts take "
            f"over {MOST_WORK:,} units of work"
        )
