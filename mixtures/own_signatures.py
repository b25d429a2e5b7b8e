"""What the source of a user's function says of it, without running it: its parameters, and the columns it returns."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gristmill.mixtures.user_code import Own, OwnFunction
from gristmill.mixtures.yaml_text import did_you_mean

BATCH_TYPES = ("RecordBatch", "Table")
"""Types of pyarrow, as the hint of a function's first parameter: it takes many documents at a time."""
PLAIN_TYPES = ("bool", "int", "float", "str")
"""As the hint of what a function returns: one value of a document, in a column called like the function."""
MAKES_COLUMNS = ("append_column", "add_column", "set_column")
"""Methods of a table of pyarrow, with the column's name among their arguments."""


@dataclass(frozen=True)
class Signature:
    """What a definition says of how its function is called.

    Attributes:
        line: where it stands in its file.
        kind: `function`, `async function`, `generator` or `class`.
        required: parameters without a default, in their order.
        optional: those with one.
        takes_any_name: whether there is a `**parameter`.
        batch: `RecordBatch` or `Table` where it takes many documents at a time.
    """

    line: int
    kind: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    takes_any_name: bool = False
    batch: str | None = None


def signature_of(own: OwnFunction) -> Signature | None:
    """The signature of a function, where its source is at hand and defines it by `def`, without decorators."""
    found = own.definition()
    if found is None or found.decorator_list:
        return None
    if isinstance(found, ast.ClassDef):
        return Signature(found.lineno, "class", ())
    arguments = found.args
    placed = [*arguments.posonlyargs, *arguments.args]
    split = len(placed) - len(arguments.defaults)
    named = list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    hint = placed[0].annotation if placed else None
    return Signature(
        found.lineno,
        _kind_of(found),
        tuple(one.arg for one in (*placed[:split], *(one for one, default in named if default is None))),
        tuple(one.arg for one in (*placed[split:], *(one for one, default in named if default is not None))),
        arguments.kwarg is not None,
        batch_type(None if hint is None else ast.unparse(hint)),
    )


def misfit(own: Own, given: int) -> str | None:
    """Why a function cannot be called with so many arguments by place and its options; None as far as its source shows."""
    found = signature_of(own.use)
    if found is None or found.kind == "class":
        return None
    parameters = [*found.required, *found.optional]
    unknown = next((name for name in own.options if name not in parameters), None)
    if unknown is not None and not found.takes_any_name:
        return f"{own.use.place}: {own.use.name} has no parameter {unknown!r}{did_you_mean(unknown, parameters)}"
    left = [name for name in found.required if name not in own.options]
    if len(left) > given:
        return f"{own.use.place}: {own.use.name} has the parameter {left[given]!r}, which `with` does not give"
    return None


def batch_type(hint: str | None) -> str | None:
    """`RecordBatch` or `Table` where a hint, as it is written, names that type of pyarrow."""
    last = (hint or "").strip("'\"").rpartition(".")[2]
    return last if last in BATCH_TYPES else None


def measured_columns(own: OwnFunction) -> list[str]:
    """The columns that a function is seen to return: by its type hint, or by its `return {...}`; none where its source
    does not say.
    """
    found = own.definition()
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    hinted = list(_hinted(found, ast.parse(own.source or "")))
    return hinted or list(dict.fromkeys(_returned(found)))


def _kind_of(found: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(found, ast.AsyncFunctionDef):
        return "async function"
    return "generator" if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(found)) else "function"


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function but those of functions and classes inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from _own_nodes(node)


def _hinted(function: ast.FunctionDef | ast.AsyncFunctionDef, file: ast.Module) -> Iterator[str]:
    """The fields of the class that a function says it returns; its own name where that is one plain value."""
    if function.returns is None:
        return
    hint = ast.unparse(function.returns).strip("'\"")
    if hint in PLAIN_TYPES:
        yield function.name
        return
    classes = {node.name: node for node in file.body if isinstance(node, ast.ClassDef)}
    yield from _fields(hint, classes)


def _fields(name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """The annotated names of a class (a TypedDict, NamedTuple or dataclass) and of those that it is made from."""
    if name not in classes:
        return
    others = {other: node for other, node in classes.items() if other != name}
    for base in classes[name].bases:
        yield from _fields(ast.unparse(base), others)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _returned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The keys of dictionaries that a function returns, or makes a table from, and the columns that it appends."""
    nodes = list(_own_nodes(function))
    names = {node.value.id for node in nodes if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Return) and node.value is not None:
            yield from _keys(node.value)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id in names:
                    yield from _keys(node.value)
                elif (
                    isinstance(target, ast.Subscript)
                    and isinstance(target.value, ast.Name)
                    and target.value.id in names
                ):
                    yield from _texts([target.slice])


def _keys(value: ast.expr) -> Iterator[str]:
    """The names in `{"a": ...}`, `dict(a=...)`, `pa.table({"a": ...})`, `batch.append_column("a", ...)` and
    `pa.table([...], names=["a"])`.
    """
    if isinstance(value, ast.Dict):
        yield from _texts(value.keys)
    elif isinstance(value, ast.IfExp):
        yield from _keys(value.body)
        yield from _keys(value.orelse)
    elif isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else ast.unparse(value.func)
        for keyword in value.keywords:
            if called == "dict" and keyword.arg:
                yield keyword.arg
            elif keyword.arg == "names" and isinstance(keyword.value, ast.List):
                yield from _texts(keyword.value.elts)
        if called in MAKES_COLUMNS:
            assert isinstance(value.func, ast.Attribute)
            yield from _keys(value.func.value)
            yield from _texts(value.args)
        elif value.args:
            yield from _keys(value.args[0])


def _texts(nodes: Sequence[ast.expr | None]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
