"""Building blocks of the manifest's sections: strict models, bounded numbers, paths of
outside files.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from gristmill.mixtures.hub_paths import HUB, is_at_commit

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
InnerFraction = Annotated[float, Field(gt=0.0, lt=1.0)]
PartialShare = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]
Several = Annotated[int, Field(ge=2)]
RowLength = Annotated[int, Field(ge=8)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Text = Annotated[str, Field(min_length=1)]
Part = TypeVar("Part")
NonEmpty = Annotated[tuple[Part, ...], Field(min_length=1)]
Omissible = Annotated[Part, Field(exclude_if=lambda value: not value)]
"""A setting that is left out of dumps if it is empty."""
RawSection = Mapping[str, Any]
"""Section, or a whole manifest, as YAML has it before validation."""
DumpedSection = dict[str, Any]
"""Section as JSON."""
Options = dict[str, Any]
"""Settings whose keys other software defines."""
Recipe = dict[str, Any]
"""Settings that can change a stage's output, as JSON."""
RECIPE = "recipe"
"""Context of `model_dump` for the settings that are hashed into fingerprints."""


class Section(BaseModel):
    """A part of the manifest. Unknown keys are errors, and values never change after
    validation.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    added: ClassVar[Collection[str]] = ()
    """Keys that recipes omit at their default, so that a new key does not change
    fingerprints.
    """

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return cls.described(handler(schema), handler)

    @classmethod
    def described(
        cls, schema: JsonSchemaValue, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return a JSON schema of the section with the description of each setting."""
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in docstrings(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema

    def _problems(self) -> Iterator[str]:
        """Yield contradictions between this class's settings; bases have their own."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_problems(self) -> Self:
        for kind in reversed(type(self).__mro__):
            if issubclass(kind, Section) and "_problems" in vars(kind):
                for problem in kind._problems(self):
                    raise ValueError(problem)
        return self

    def changed_keys(self) -> list[str]:
        """Return the keys whose values are not their defaults."""
        return [
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) != field.get_default(call_default_factory=True)
        ]

    @model_serializer(mode="wrap")
    def _omit_added_defaults(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> DumpedSection:
        dumped: DumpedSection = handler(self)
        if info.context != RECIPE:
            return dumped
        absent = set(self.added).difference(self.changed_keys())
        return {key: value for key, value in dumped.items() if key not in absent}


@cache
def docstrings(section: type[BaseModel]) -> dict[str, str]:
    """Return the description of each setting: its `description`, or the docstring below
    it, in this class or a base.

    Docstrings are read from the source, on demand: pydantic's own way of keeping them
    takes two fifths of the time in which every command imports the sections of a
    manifest.
    """
    texts_below: dict[str, str | None] = {}
    for base in reversed(section.__mro__):
        if not base.__module__.startswith("gristmill."):
            continue
        try:
            definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except OSError:  # the class comes from `create_model`
            continue
        assert isinstance(definition, ast.ClassDef)
        for setting, below in pairwise([*definition.body, ast.Pass()]):
            if isinstance(setting, ast.AnnAssign) and isinstance(
                setting.target, ast.Name
            ):
                text = None
                if (
                    isinstance(below, ast.Expr)
                    and isinstance(below.value, ast.Constant)
                    and isinstance(below.value.value, str)
                ):
                    text = inspect.cleandoc(below.value.value)
                texts_below[setting.target.id] = text
    descriptions = {
        name: field.description or texts_below.get(name)
        for name, field in section.model_fields.items()
    }
    return {name: text for name, text in descriptions.items() if text}


class Seeded(Section):
    """A section with its own `seed`; the manifest's if absent."""

    if TYPE_CHECKING:
        seed: int | None

    @property
    def key_seed(self) -> int:
        """Seed from which keys are derived (`core.seeds`); a stage receives the
        manifest's seed for an absent one.
        """
        return 0 if self.seed is None else self.seed


class Judging(Section):
    """Settings of every preparing stage."""

    sources: tuple[str, ...] | None = None
    """Judge only these sources; documents of the others pass unjudged."""
    max_quarantined: Fraction = 0.05
    """Share of documents that may raise an error before the stage fails."""

    @property
    def edits_text(self) -> bool:
        """True if the stage changes texts besides keeping or dropping them."""
        return False


class OutsidePath(str):
    """A file, glob, folder or URL that is not an output of a stage.

    A relative path is relative to the manifest's folder. Fingerprints contain its
    content, not the path. A name of the Hugging Face Hub has a commit.
    """

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def checked(value: str) -> OutsidePath:
            if value.startswith(HUB) and not is_at_commit(value):
                raise ValueError(
                    "must be hf://NAME@COMMIT or hf://datasets/NAME@COMMIT with a commit "
                    "of 40 hexadecimal digits, since branches and tags move; write "
                    "their commits in with: gristmill lock MANIFEST"
                )
            return cls(value)

        return core_schema.no_info_after_validator_function(
            checked, core_schema.str_schema()
        )


Location = tuple[str | int, ...]
"""Keys and numbers of list items that lead to a part of a section."""


def parts_of(
    value: Any, kind: type[Part], at: Location = ()
) -> Iterator[tuple[Location, Part]]:
    """Yield every part of a type inside a section, with its location."""
    if isinstance(value, kind):
        yield at, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from parts_of(getattr(value, name), kind, (*at, name))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from parts_of(inner, kind, (*at, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from parts_of(inner, kind, (*at, index))


def value_at(value: Any, location: Location) -> Any:
    """Return the part of a section at a location."""
    for part in location:
        is_section = isinstance(value, BaseModel)
        value = getattr(value, str(part)) if is_section else value[part]
    return value


def flat_items(
    value: Mapping[str, Any], separator: str = ".", prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings, each under its full name."""
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping):
            yield from flat_items(inner, separator, name + separator)
        else:
            yield name, inner


def outside_paths(value: Any) -> Iterator[tuple[Location, OutsidePath]]:
    """Yield every outside path inside a section, with its location."""
    return parts_of(value, OutsidePath)


def inside(value: Any, *keys: str) -> RawSection:
    """Return a section inside an unvalidated one; empty if it is not a mapping."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def entries(section: RawSection, key: str) -> Sequence[Any]:
    """Return a list of an unvalidated section; empty if it is not a list."""
    value = section.get(key)
    return value if isinstance(value, list | tuple) else ()


def named_items(items: Any) -> Iterator[tuple[str, Any]]:
    """Yield names with their settings from a mapping, or from a list of names and
    mappings.

    Raises:
        ValueError: an item of the list has another form.
    """
    if isinstance(items, Mapping):
        yield from items.items()
        return
    for item in items:
        pairs = {item: {}} if isinstance(item, str) else item
        if not isinstance(pairs, dict):
            raise ValueError(
                f"write a name, or a mapping of one name to its settings, not {item!r}"
            )
        for name, settings in pairs.items():
            yield name, {} if settings is None else settings


def repeated(items: Sequence[Part]) -> Part | None:
    """Return the first item that equals an earlier one, or None."""
    earlier: set[Part] = set()
    for item in items:
        if item in earlier:
            return item
        earlier.add(item)
    return None


def dependency_order(
    references: Mapping[str, Collection[str]],
) -> tuple[list[str], list[str]]:
    """Return the names, each after those that it refers to and otherwise in their
    order; and the names that refer to each other in a cycle, or to such names.

    Args:
        references: name -> the names that it refers to.
    """
    waiting, order = dict(references), list[str]()
    while ready := next(
        (
            name
            for name, targets in waiting.items()
            if waiting.keys().isdisjoint(targets)
        ),
        None,
    ):
        order.append(ready)
        del waiting[ready]
    return order, list(waiting)
