"""Jinja for templates that are not trusted with the machine's time and memory.

Jinja's sandbox limits what a template may read and call, but not how much it computes:
nested or recursive loops count to 10^10, and a text that is doubled forty times fills
the memory. Here every operation is charged for its work, counted in units of about 50
ns, and a rendering may do MOST_WORK. The count depends on the template and its data
alone, never on a clock, so the same rendering ends or fails on every machine.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from string import Formatter
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Function = Callable[..., Any]
MOST_WORK = 50_000_000
"""Units of one rendering, some ten seconds: 1,001 messages with calls of tools take 0.2
million by the templates of Qwen3, Llama 3.1 and GLM-4.5, 8 million by gpt-oss's and 24
million by Gemma 4's, whose work is quadratic. A written character takes one.
"""
STEP = 32
"""Units of a turn of a loop, a call, an operator or a filter."""
ELEMENT = 4
"""Units of an element of a list or mapping that is read."""
CHARACTERS_PER_UNIT = 64
"""Characters that Python's strings copy, compare or search in 50 ns."""
NODES_PER_UNIT = 8
"""Nodes of a body's syntax tree and characters of its text, most of which are in
branches that are not taken.
"""
MOST_CHARACTERS = 1 << 26
"""Maximum number of characters or elements made by an operation."""
MOST_BITS = 1 << 16
"""Maximum size of a number."""
WIDE = re.compile(r"\d{6}|%[^%a-zA-Z]*\*")
"""Width in a format that is large, or that a value sets: `%999999d`, `%*d`."""
CONSTANT_TIME = frozenset(
    {"length", "count", "default", "d", "attr", "first", "int", "float", "abs", "items"}
)
"""Filters whose time does not depend on the size of their arguments."""
GROWING_METHODS = frozenset(
    {"replace", "join", "ljust", "rjust", "center", "zfill", "expandtabs"}
)
"""Methods whose result may be as long as the product of their arguments' lengths."""
COMPARISONS = (
    "in eq == equalto ne != lt < lessthan le <= gt > greaterthan ge >=".split()
)
"""Tests whose time depends on the size of their arguments."""
SIZED = (str, bytes, list, tuple)


class _Budget(threading.local):
    """Remaining units of this thread's rendering."""

    work = MOST_WORK


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
        super().__init__()
        for name, value in dict(*items, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(
                f"the template stores {name!r} in a namespace; names that begin with an "
                "underscore are Python's own: choose another"
            )
        super().__setitem__(name, value)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates have a budget of work; render them with `render`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # nothing is computed while a template is compiled
        super().__init__(optimized=False, finalize=_written, **options)
        del self.globals["lipsum"]  # makes any amount of text
        del self.filters["urlize"]  # takes quadratic time
        self.globals |= {"dict": _Dict(), "namespace": _Namespace}
        self.add_filters(self.filters)
        tests: dict[str, Any] = self.tests
        for name in COMPARISONS:
            tests[name] = _charging(tests[name])
        for function in (_turns, _read, _sliced, _spend):
            self.filters[_filter_name(function)] = function

    def add_filters(self, filters: Mapping[str, Function]) -> None:
        """Add filters that are charged for the size of their arguments."""
        for name, function in filters.items():
            is_cheap = name in CONSTANT_TIME
            self.filters[name] = function if is_cheap else _charging(function)

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        """Parse a template, and add charges for what Jinja does without asking the
        environment.
        """
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all(nodes.Node)):
            if isinstance(node, nodes.For):
                node.iter = _filter(node.iter, _turns, nodes.Const(_units_of(node)))
            elif isinstance(node, nodes.Macro | nodes.CallBlock):
                charge = _filter(nodes.Const(_units_of(node)), _spend)
                node.body.insert(0, nodes.ExprStmt(charge))
            elif isinstance(node, nodes.Compare):
                for operand in node.ops:
                    operand.expr = _filter(operand.expr, _read)
            elif isinstance(node, nodes.Concat):
                node.nodes = [_filter(part, _read) for part in node.nodes]
            elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
                node.node = _filter(node.node, _sliced)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`, unless the result would be too large."""
        _spend(STEP)
        if operator == "%" and isinstance(left, str | bytes):
            _spend_format(str(left), right)
        elif operator == "+" and isinstance(left, SIZED) and isinstance(right, SIZED):
            _spend_size(len(left) + len(right))
        elif isinstance(left, SIZED) or isinstance(right, SIZED):
            _spend_product((left, right))
        elif isinstance(left, int) and isinstance(right, int):
            is_power = operator == "**"
            bits = left.bit_length()
            bits = bits * right if is_power else bits + right.bit_length()
            _refuse_above(bits, MOST_BITS, "the bits of a number")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Call a function of the template, a macro or a method, unless it would do too
        much.
        """
        _spend(STEP)
        # The sandbox gives its own function for a text's `format`, around the method.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        name = getattr(function, "__name__", "")
        values = (*args, *options.values())
        if isinstance(function, LoopContext):
            args = tuple(_turns(items, STEP) for items in args)
        elif isinstance(function, Macro) or isinstance(owner, dict):
            pass
        elif not isinstance(owner, SIZED):
            _spend_product(values)
        elif name in ("format", "format_map"):
            _spend_format(str(owner), values)
            for _, _, form, _ in Formatter().parse(str(owner)):
                if "{" in (form or ""):
                    raise SecurityError(
                        "the template does more than it may: it writes with the width "
                        f"{form!r}"
                    )
        elif name == "translate":
            _spend_size(len(owner) * _weight(values) * CHARACTERS_PER_UNIT)
        elif name in GROWING_METHODS:
            _spend_product((owner, *values))
        else:
            _read((owner, *args))
        return super().call(context, function, *args, **options)


def render(template: jinja2.Template, **names: Any) -> str:
    """Render a template of a BoundedEnvironment.

    Raises:
        jinja2.TemplateError: the template refuses its values, or exceeds its budget.
    """
    _budget.work = MOST_WORK
    try:
        return template.render(**names)
    except (RecursionError, OverflowError, MemoryError) as error:
        raise SecurityError(
            f"the template does more than it may: {type(error).__name__}: {error}"
        ) from error


def _filter(node: nodes.Node, function: Function, *args: nodes.Expr) -> nodes.Filter:
    name = _filter_name(function)
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _filter_name(function: Function) -> str:
    """Name of a filter that the syntax tree is given; no template can write it."""
    return f"{function.__name__} by gristmill"


def _units_of(node: nodes.Node) -> int:
    """Units of one pass through a body, without the turns of the loops in it."""
    size = 0
    for part in node.find_all(nodes.Node):
        size += 1 + len(part.data if isinstance(part, nodes.TemplateData) else "")
    return STEP + size // NODES_PER_UNIT


def _turns(items: Iterable[Any], units: int) -> Iterator[Any]:
    for item in items:
        _spend(units)
        yield item


@jinja2.pass_context  # so that Jinja does not write constants while it compiles
def _written(context: Any, value: Any) -> Any:
    if isinstance(value, str):
        _spend(1 + len(value))
    else:
        _spend(_weight(value) * CHARACTERS_PER_UNIT)
    return value


def _read(value: Any) -> Any:
    _spend(_weight(value))
    return value


def _sliced(value: Any) -> Any:
    if isinstance(value, Sequence):
        _spend_size(len(value))
    return value


def _charging(function: Function) -> Function:
    """A filter or test that is charged for the size of its arguments."""

    @wraps(function)
    def charging(*args: Any, **options: Any) -> Any:
        if function.__name__ == "do_format":
            _spend_format(str(args[0]), (args, options))
        else:
            _spend_product((*args, *options.values()))
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
    _spend_size(product)
    for value in values:
        _read(value)


def _spend_format(form: str, values: Any) -> None:
    """Charge for a format, which may write all values as often as it is long."""
    refuse_widths(form)
    widths = sum(map(int, re.findall(r"\d+", form)))
    _spend_size(len(form) * _weight(values) * CHARACTERS_PER_UNIT + widths)


def _spend_size(size: int) -> None:
    _refuse_above(size, MOST_CHARACTERS, "the result of an operation")
    _spend(STEP + size // CHARACTERS_PER_UNIT)


def _weight(value: Any) -> int:
    """Units of reading all of a value once, or the rest of the budget if that is less.
    A shared part counts at each occurrence, as it is written each time.
    """
    units = 0
    stack = [value]
    while stack and units <= _budget.work:
        part = stack.pop()
        units += ELEMENT
        if isinstance(part, str | bytes):
            units += len(part) // CHARACTERS_PER_UNIT
        elif isinstance(part, range):
            units += ELEMENT * len(part)
        elif isinstance(part, dict):
            stack += [*part, *part.values()]
        elif isinstance(part, list | tuple | set):
            stack += part
        elif isinstance(part, Namespace):
            stack.append(object.__getattribute__(part, "__dict__"))
    return units


def refuse_widths(form: str) -> None:
    """Raise SecurityError for a format such as `%999999d` with a very long result."""
    if width := WIDE.search(form):
        raise SecurityError(
            f"the template does more than it may: it writes with the width {width[0]!r}"
        )


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
