"""The reference of every key that a manifest may have, written from the schema itself."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import gristmill.flows.stages.registry  # noqa: F401 - lets the steps of `prepare` stand in the schema
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.own_code import OwnFunction
from gristmill.mixtures.prepare import Step, step_fields
from gristmill.mixtures.section import OutsidePath, docstrings

TITLE = """\
# The manifest, key by key

Written by `gristmill schema --markdown`. Every key may be replaced on the command line: `--set pretrain.steps=50`,
`--set filter.gopher_quality.min_words=40`. A relative path is relative to the manifest's folder.
"""


def markdown() -> str:
    """The whole reference."""
    return "\n".join([TITLE, *_section(Manifest, "", _homes())])


def _homes() -> dict[type[BaseModel], str]:
    """Where each section is described: where it stands least deep."""
    homes: dict[type[BaseModel], str] = {}
    waiting: list[tuple[type[BaseModel], str]] = [(Manifest, "")]
    for model, at in waiting:  # which grows meanwhile
        if model not in homes:
            homes[model] = at
            waiting += _inside(_fields(model), at)
    return homes


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return step_fields() if model is Step else dict(model.model_fields)


def _inside(fields: Mapping[str, FieldInfo], at: str) -> list[tuple[type[BaseModel], str]]:
    """The sections in some keys of one, and where they stand."""
    return [
        (inner, _path(at, name, field.annotation))
        for name, field in fields.items()
        for inner in _models(field.annotation)
    ]


def _section(model: type[BaseModel], at: str, homes: Mapping[type[BaseModel], str]) -> Iterator[str]:
    """A section's own table, then the sections inside it; one that is described elsewhere is only referred to."""
    yield f"## {f'`{at}`' if at else 'The whole'}{_variant(model)}\n"
    same = next((base for base in model.__mro__ if homes.get(base, at) != at and _keys(base) == _keys(model)), None)
    if same is not None:
        own = _own_defaults(model, same)
        yield f"The keys of `{homes[same]}`{', with other defaults:' if own else '.'}\n"
        if not own:
            return
    else:
        yield f"{_prose(model.__doc__)}\n"
        own = _fields(model)
    yield "| key | value | default | |"
    yield "| --- | --- | --- | --- |"
    for name, field in own.items():
        cells = (f"`{name}`", _kind(field.annotation), _default(field), _meaning(field, docstrings(model).get(name)))
        yield f"| {' | '.join(_cell(cell) for cell in cells)} |"
    yield ""
    for inner, place in _inside(own, at):
        yield from _section(inner, place, homes)


def _keys(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def _own_defaults(model: type[BaseModel], other: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a section whose defaults are not those of another with the same keys."""
    return {
        name: field
        for name, field in model.model_fields.items()
        if field.get_default(call_default_factory=True)
        != other.model_fields[name].get_default(call_default_factory=True)
    }


def _variant(model: type[BaseModel]) -> str:
    """What tells a section from the others that may stand in its place: `, kind: regex`."""
    kind = model.model_fields.get("kind")
    values = get_args(kind.annotation) if kind is not None and get_origin(kind.annotation) is Literal else ()
    return f", `kind: {values[0]}`" if len(values) == 1 else ""


def _path(at: str, name: str, annotation: Any) -> str:
    """Where a section stands: `sources.<name>`, `prepare[].filter`, `pretrain.model`."""
    here = f"{at}.{name}" if at else name
    kinds = {get_origin(part) for part in alternatives(annotation)}
    if dict in kinds:
        return f"{here}.<name>"
    return f"{here}[]" if tuple in kinds or list in kinds else here


def alternatives(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type, and what lies within Annotated."""
    if get_origin(annotation) is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from alternatives(part)
    else:
        yield annotation


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    for part in alternatives(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield part
        else:
            for inner in get_args(part):
                if inner is not Ellipsis and not isinstance(inner, str):
                    yield from _models(inner)


def _kind(annotation: Any) -> str:
    return " or ".join(dict.fromkeys(kind for part in alternatives(annotation) if (kind := _one_kind(part))))


def _one_kind(part: Any) -> str:
    if part is type(None):
        return ""
    if get_origin(part) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(part))
    if get_origin(part) in (tuple, list):
        return f"list of {_kind(get_args(part)[0])}"
    if get_origin(part) is dict:
        return f"mapping of names to {_kind(get_args(part)[1])}"
    if isinstance(part, type) and issubclass(part, BaseModel):
        return "section"
    names = {
        OutsidePath: "path",
        OwnFunction: "function",
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true or false",
        Any: "any",
    }
    return names.get(part, str(part))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}, []):
        return "none"
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _meaning(field: FieldInfo, said: str | None) -> str:
    """A key's own docstring, or what the section behind it says about itself."""
    if said:
        return _prose(said)
    inner = [_prose(model.__doc__).split("\n\n")[0] for model in _models(field.annotation)]
    return " ".join(inner)


def _prose(text: str | None) -> str:
    """A docstring without the breaks of its lines; paragraphs stay."""
    paragraphs = (text or "").strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _cell(text: str) -> str:
    return text.replace("\n\n", "<br>").replace("|", "\\|")
