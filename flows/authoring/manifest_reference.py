"""The reference of every key that a manifest may have, written from the schema itself."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import gristmill.flows.stages.registry  # noqa: F401 - lets the steps of `prepare` stand in the schema
from gristmill.mixtures.base import OutsidePath, docstrings
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.prepare import Step, step_fields
from gristmill.mixtures.user_code import OwnFunction

INDEX = "README.md"
TITLE = """\
# Every key of the manifest

A page for each section, written by `gristmill schema --markdown docs/manifest`. Every key may be replaced on the
command line: `--set pretrain.steps=50`, `--set filter.gopher_quality.min_words=40`. A relative path is relative to the
manifest's folder.
"""
STEPS = "prepare"
"""The section whose steps have a page each."""


def pages() -> dict[str, str]:
    """The reference: name of a page -> its text. The index comes first, then the sections in their order."""
    homes = _homes()
    parts: dict[str, list[str]] = {INDEX: []}
    for at, lines in _sections(Manifest, "", homes):
        parts.setdefault(page_of(at), []).append("\n".join(lines))
    texts = {name: f"{_title(name)}{''.join(text)}" for name, text in parts.items()}
    texts[INDEX] += _list_of_pages(texts)
    return {name: f"{text.rstrip()}\n" for name, text in texts.items()}


def page_of(at: str) -> str:
    """The page of a section that stands at a place: `pretrain.md`, `prepare-filter.md`, the index for the whole."""
    first, *inner = at.replace("[]", "").split(".")
    if first == STEPS and inner:
        return f"{first}-{inner[0]}.md"
    return f"{first}.md" if first else INDEX


def write_pages(folder: Path) -> None:
    """Write the pages into a folder, and delete those of sections that are no more."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = pages()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for path in folder.glob("*.md"):
        if path.name not in texts:
            path.unlink()


def _title(name: str) -> str:
    if name == INDEX:
        return TITLE
    section, _, step = name.removesuffix(".md").partition("-")
    key = f"{section}[].{step}" if step else section
    return f"# The section `{key}`\n\nWritten by `gristmill schema --markdown`; [all sections]({INDEX}).\n"


def _list_of_pages(texts: Mapping[str, str]) -> str:
    """The sections of every page, each with a link to it."""
    lines = ["\n## All sections\n"]
    for name, text in texts.items():
        if name != INDEX:
            first, *inner = dict.fromkeys(re.findall(r"^## (.*)$", text, re.MULTILINE))
            section = first.split("`")[1]
            links = [f"[{heading.replace(section, '', 1)}]({name}#{anchor_of(heading)})" for heading in inner]
            lines.append(f"- [`{section}`]({name}){': ' if links else ''}{', '.join(links)}")
    return "\n".join(lines)


def anchor_of(heading: str) -> str:
    """The anchor that a forge gives a heading: in lower case, without punctuation, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


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


def _sections(model: type[BaseModel], at: str, homes: Mapping[type[BaseModel], str]) -> Iterator[tuple[str, list[str]]]:
    """A section's place and the lines of its table, then those of the sections inside it.

    One that is described elsewhere is only referred to.
    """
    same = next((base for base in model.__mro__ if homes.get(base, at) != at and _keys(base) == _keys(model)), None)
    own = _fields(model) if same is None else _own_defaults(model, same)
    lines = ["", f"## {_heading(model, at)}\n"]
    if same is None:
        lines.append(f"{_prose(model.__doc__)}\n")
    else:
        link = f"[`{homes[same]}`]({page_of(homes[same])}#{anchor_of(_heading(same, homes[same]))})"
        lines.append(f"The keys of {link}{', with other defaults:' if own else '.'}\n")
    if own:
        lines += _table(model, own, at)
    yield at, lines
    for inner, place in _inside(own, at):
        yield from _sections(inner, place, homes)


def _heading(model: type[BaseModel], at: str) -> str:
    return f"{f'`{at}`' if at else 'The sections'}{_variant(model)}"


def _table(model: type[BaseModel], fields: Mapping[str, FieldInfo], at: str) -> list[str]:
    lines = ["| key | value | default | |", "| --- | --- | --- | --- |"]
    for name, field in fields.items():
        meaning = _meaning(field, docstrings(model).get(name))
        cells = (_key(name, field, at), _kind(field.annotation), _default(field), meaning)
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return [*lines, ""]


def _key(name: str, field: FieldInfo, at: str) -> str:
    """A key; a section of the manifest, or a step, with a link to its page."""
    has_page = at in ("", f"{STEPS}[]") and any(_models(field.annotation))
    return f"[`{name}`]({page_of(f'{at}.{name}'.strip('.'))})" if has_page else f"`{name}`"


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
