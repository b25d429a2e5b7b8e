"""The keys that a manifest may have at each place, and the names that they had in earlier versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.prepare import STEP_SECTIONS, Step

Location = tuple[str | int, ...]


class RenamedKeyWarning(UserWarning):
    """A key of a manifest, or of a setting, is given under its former name."""


@dataclass(frozen=True)
class FormerName:
    """A key that was given under its former name.

    Attributes:
        old: where it was given.
        new: the same place with today's name.
        is_twice: whether it was given under both names.
    """

    old: Location
    new: Location
    is_twice: bool

    def __str__(self) -> str:
        name = dotted(self.new)
        return (f"is the former name of {name}, which is given too; keep {name}" if self.is_twice else
                f"is now called {name}; the next version does not read the former name")


def take_current_names(value: Any, at: Location = ()) -> Iterator[FormerName]:
    """Put today's names in place of former ones in what was read of a manifest, and yield each that was replaced."""
    if isinstance(value, dict):
        renamed = {old: new for model in _models_at(at) for old, new in model.renamed.items() if old in value}
        for old, new in renamed.items():
            found = FormerName((*at, old), (*at, new), new in value)
            value.setdefault(new, value.pop(old))
            yield found
        for key, inner in value.items():
            yield from take_current_names(inner, (*at, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from take_current_names(inner, (*at, index))


def current_place(location: Sequence[str | int]) -> Location:
    """A location under today's names: `mix.short` is `mix.on_shortfall`."""
    place: Location = ()
    for part in location:
        renamed = {old: new for model in _models_at(place) for old, new in model.renamed.items()}
        place += (part if isinstance(part, int) else renamed.get(part, part),)
    return place


def known_keys(location: Location) -> list[str]:
    """The keys that the schema knows at a location."""
    models = _models_at(location)
    return sorted([*models[0].model_fields, *(STEP_SECTIONS if models[0] is Step else ())]) if models else []


def all_keys(model: Any) -> Iterator[tuple[str, ...]]:
    """Every key of a section, and of the sections inside it."""
    for name, field in model.model_fields.items():
        yield (name,)
        for inner in models_in(field.annotation):
            yield from ((name, *key) for key in all_keys(inner))


def dotted(location: Location) -> str:
    """A location as messages name it: `mix.phases[0].end`; empty for the whole."""
    key = ""
    for part in location:
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    return key


def _models_at(location: Location) -> list[Any]:
    """The sections that may stand at a location."""
    models: list[Any] = [Manifest]
    for part in location:
        if isinstance(part, int) or not models:
            continue
        if models[0] is Step and part in STEP_SECTIONS:
            models = [STEP_SECTIONS[part]]
            continue
        field = models[0].model_fields.get(part)
        # Where it is no key, it is the kind that says which of several models a mapping is.
        models = models_in(field.annotation) if field is not None else [
            one for one in models if part in _kinds_of(one)] or models
    return models


def models_in(annotation: Any) -> list[Any]:
    """The sections that a key's type may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is None:
        return []
    return [model for inner in get_args(annotation) for model in models_in(inner)]


def _kinds_of(model: Any) -> tuple[Any, ...]:
    kind = model.model_fields.get("kind")
    return () if kind is None else get_args(kind.annotation)
