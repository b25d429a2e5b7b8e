"""The reference of the Python interface, written from what its names say of themselves: `make api`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

MODULES = ("gristmill", "gristmill.losses", "gristmill.training")
TITLE = """\
# The Python interface

Written by `make api`. What stands here is public; every other name and module of gristmill is private and may change
without notice. [python.md](python.md) is a tour.
"""
SECTIONS = {"Args": "Arguments", "Attributes": "Attributes", "Returns": "Returns", "Raises": "Raises"}
ENTRY = re.compile(r"^(?P<names>[\w.*]+(, [\w.*]+)*): (?P<text>.*)$", re.DOTALL)


def reference() -> str:
    """The whole page."""
    return "\n".join([TITLE, *(part for module in MODULES for part in _module(import_module(module)))])


def public_objects() -> Iterator[tuple[str, Any]]:
    """Every function and class of the interface with its name, then the public members of the classes."""
    for module in map(import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                yield from ((f"{module.__name__}.{name}.{member}", one) for member, one in _members(value))


def _module(module: ModuleType) -> Iterator[str]:
    values = [(name, getattr(module, name)) for name in module.__all__]
    yield f"## {module.__name__}\n"
    if module.__name__ != MODULES[0]:
        yield _prose(module.__doc__)
    functions = [one for one in values if inspect.isfunction(one[1])]
    classes = [one for one in values if inspect.isclass(one[1])]
    errors = [one for one in classes if issubclass(one[1], Exception)]
    for name, function in functions:
        yield from _function(f"{module.__name__}.{name}", function, "###")
    for name, kind in classes:
        if (name, kind) not in errors:
            yield from _class(module.__name__, name, kind)
    for name, value in values:
        if isinstance(value, int | str):
            # A version would make the page out of date with every release.
            yield f"### `{module.__name__}.{name}`" + ("\n" if name == "__version__" else f" = `{value!r}`\n")
    for name, kind in errors:
        yield f"### `{module.__name__}.{name}`\n\n{_prose(kind.__doc__)}"


def _class(module: str, name: str, kind: type) -> Iterator[str]:
    public = {one for _, one in public_objects()}
    bases = [base.__name__ for base in kind.__bases__ if base in public]
    yield f"### `{module}.{name}`{f' ({bases[0]})' if bases else ''}\n"
    made = kind.__dict__.get("__init__")
    if made is not None and made.__doc__ and not dataclasses.is_dataclass(kind):
        yield f"```python\n{name}{_signature(made)}\n```\n"
        yield _prose(kind.__doc__)
        yield _prose(made.__doc__)
    else:
        types = (
            {one.name: _annotation(one.type) for one in dataclasses.fields(kind)}
            if dataclasses.is_dataclass(kind)
            else {}
        )
        yield _prose(kind.__doc__, types)
    for attribute, annotation, text in _attributes(kind):
        yield f"#### `{attribute}: {annotation}`\n\n{text}\n"
    for member, value in _members(kind):
        yield from _function(member, value, "####")


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """What a class itself defines for all: methods and properties."""
    for name, value in kind.__dict__.items():
        if not name.startswith("_") and (
            callable(value) or isinstance(value, classmethod | staticmethod | property) or hasattr(value, "func")
        ):
            yield name, value


def _attributes(kind: type) -> Iterator[tuple[str, str, str]]:
    """The attributes of a class that have a text beneath them."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    for one, behind in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
            yield ast.unparse(one.target), ast.unparse(one.annotation), inspect.cleandoc(str(behind.value.value))


def _function(name: str, value: Any, level: str) -> Iterator[str]:
    function = function_of(value)
    short = name.rpartition(".")[2]
    if function is not value and not isinstance(value, classmethod | staticmethod):
        yield f"{level} `{short}: {_annotation(inspect.signature(function).return_annotation)}`\n"
    else:
        yield f"{level} `{name}`\n\n```python\n{short}{_signature(function)}\n```\n"
    yield _prose(function.__doc__)


def function_of(value: Any) -> Any:
    """The function behind a method or a property; a class, or a function, as it is."""
    for name in ("fget", "func", "__func__"):
        if hasattr(value, name):
            return getattr(value, name)
    return value


def _signature(function: Any) -> str:
    """It as it is written, on several lines where one has no room; without what is given by the call itself."""
    signature = inspect.signature(function)
    parts, stars = [], False
    for name, one in signature.parameters.items():
        if name in ("self", "cls"):
            continue
        if one.kind is one.KEYWORD_ONLY and not stars:
            stars = True
            parts.append("*")
        stars = stars or one.kind is one.VAR_POSITIONAL
        mark = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        text = f"{mark}{name}: {_annotation(one.annotation)}"
        default = one.default.__name__ if inspect.isfunction(one.default) else repr(one.default)
        parts.append(text if one.default is one.empty else f"{text} = {default}")
        if one.kind is one.POSITIONAL_ONLY:
            parts.append("/")
    returns = _annotation(signature.return_annotation)
    behind = "" if function.__name__ == "__init__" else f" -> {returns}"
    line = f"({', '.join(parts)}){behind}"
    inner = "".join(f"    {part},\n" for part in parts)
    return line if len(line) <= 90 else f"(\n{inner}){behind}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _prose(docstring: str | None, types: Mapping[str, str] | None = None) -> str:
    """A docstring as Markdown: its sections are lists.

    Args:
        docstring: as it is written.
        types: of the attributes that it lists.
    """
    found: list[str] = []
    for block in inspect.cleandoc(docstring or "").split("\n\n"):
        head, _, rest = block.partition("\n")
        title = SECTIONS.get(head.removesuffix(":")) if head.endswith(":") else None
        if title is None:
            found.append(block)
            continue
        entries = re.split(r"\n(?=\S)", textwrap.dedent(rest))
        found.append(f"{title}:\n\n" + "\n".join(f"- {_entry(entry, types or {})}" for entry in entries))
    return "\n\n".join(found) + "\n"


def _entry(text: str, types: Mapping[str, str]) -> str:
    whole = " ".join(text.split())
    named = ENTRY.match(whole)
    if named is None:
        return whole
    names = ", ".join(
        f"`{name}: {types[name]}`" if name in types else f"`{name}`" for name in named["names"].split(", ")
    )
    return f"{names}: {named['text']}"


if __name__ == "__main__":
    print(reference(), end="")
