"""Parameters and returned columns of a user's function, read from its source without
running it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gristmill.mixtures.user_code import OwnFunction, stated_signature

BATCH_TYPES = ("RecordBatch", "Table")
"""pyarrow types as the hint of a function's first parameter: the function takes many
documents at a time.
"""
PLAIN_TYPES = ("bool", "int", "float", "str")
"""Types as the hint of a return value: one value per document, in a column named after
the function.
"""
MAKES_COLUMNS = ("append_column", "add_column", "set_column")
"""Methods of a pyarrow table that have the column's name among their arguments."""


@dataclass(frozen=True)
class Signature:
    """Calling convention of a function, from its definition.

    Attributes:
        kind: `function`, `async function`, `generator` or `class`.
        required: parameters without a default, in order.
        optional: parameters with a default.
        takes_any_name: True if there is a `**parameter`.
        batch: `RecordBatch` or `Table` if the function takes many documents at a time.
    """

    kind: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    takes_any_name: bool = False
    batch: str | None = None


def signature_of(own: OwnFunction) -> Signature | None:
    """Return the signature of a function; None if its source is not available, or not
    an undecorated `def` or class.
    """
    definition = own.definition()
    if definition is None or definition.decorator_list:
        return None
    if isinstance(definition, ast.ClassDef):
        return Signature("class")
    stated = stated_signature(own)
    if stated is None:
        return Signature("async function")
    is_generator = any(
        isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(definition)
    )
    parameters = [
        parameter
        for parameter in stated.parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    arguments = definition.args
    first = [*arguments.posonlyargs, *arguments.args][:1]
    hint = first[0].annotation if first else None
    return Signature(
        "generator" if is_generator else "function",
        tuple(each.name for each in parameters if each.default is each.empty),
        tuple(each.name for each in parameters if each.default is not each.empty),
        arguments.kwarg is not None,
        batch_type(None if hint is None else ast.unparse(hint)),
    )


def batch_type(hint: str | None) -> str | None:
    """Return `RecordBatch` or `Table` if a hint, as written, names that pyarrow
    type.
    """
    last = (hint or "").strip("'\"").rpartition(".")[2]
    return last if last in BATCH_TYPES else None


def measured_columns(own: OwnFunction) -> list[str]:
    """Return the columns that a function evidently returns; may be empty.

    They are the fields of the class in its type hint, or the function's name if the
    hint is a plain type; else the keys of dictionaries that it returns or makes a table
    from, and the columns that it appends.
    """
    definition = own.definition()
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    columns: list[str] = []
    if definition.returns is not None:
        hint = ast.unparse(definition.returns).strip("'\"")
        if hint in PLAIN_TYPES:
            return [definition.name]
        classes = {
            node.name: node
            for node in ast.parse(own.source or "").body
            if isinstance(node, ast.ClassDef)
        }
        columns += _fields(hint, classes)
    if columns:
        return columns
    nodes = list(_own_nodes(definition))
    names = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.Return) and node.value is not None:
            columns += _keys(node.value)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id in names:
                    columns += _keys(node.value)
                elif (
                    isinstance(target, ast.Subscript)
                    and isinstance(target.value, ast.Name)
                    and target.value.id in names
                ):
                    columns += _texts([target.slice])
    return list(dict.fromkeys(columns))


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of a function except those of nested functions and classes."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
        ):
            yield node
            yield from _own_nodes(node)


def _fields(name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the annotated names of a class (a TypedDict, NamedTuple or dataclass) and
    of its bases.
    """
    if name not in classes:
        return
    other_classes = {
        class_name: node for class_name, node in classes.items() if class_name != name
    }
    for base in classes[name].bases:
        yield from _fields(ast.unparse(base), other_classes)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _keys(value: ast.expr) -> Iterator[str]:
    """Yield the names in `{"a": ...}`, `dict(a=...)`, `pa.table({"a": ...})`,
    `batch.append_column("a", ...)` and `pa.table([...], names=["a"])`.
    """
    if isinstance(value, ast.Dict):
        yield from _texts(value.keys)
    elif isinstance(value, ast.IfExp):
        yield from _keys(value.body)
        yield from _keys(value.orelse)
    elif isinstance(value, ast.Call):
        function_name = (
            value.func.attr
            if isinstance(value.func, ast.Attribute)
            else ast.unparse(value.func)
        )
        for keyword in value.keywords:
            if function_name == "dict" and keyword.arg:
                yield keyword.arg
            elif keyword.arg == "names" and isinstance(keyword.value, ast.List):
                yield from _texts(keyword.value.elts)
        if function_name in MAKES_COLUMNS:
            assert isinstance(value.func, ast.Attribute)
            yield from _keys(value.func.value)
            yield from _texts(value.args)
        elif value.args:
            yield from _keys(value.args[0])


def _texts(nodes: Sequence[ast.expr | None]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
