"""What every section of a manifest is made of: strict models, bounded numbers, paths of outside files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"


class Section(BaseModel):
    """A part of the manifest: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Judging(Section):
    """What every preparing stage has in common."""

    sources: tuple[str, ...] | None = None
    """Judge only these sources; documents of the others pass unjudged."""
    max_quarantined: Fraction = 0.05
    """Share of documents that may raise an error before the stage fails."""

    @property
    def edits_text(self) -> bool:
        """Whether the stage changes texts, beside keeping or dropping them."""
        return False


class OutsidePath(str):
    """A file, glob, folder or URL that is no output of a stage.

    A relative one is relative to the manifest's folder; what it names is part of a fingerprint by content, not by path.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())


def outside_paths(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], OutsidePath]]:
    """Yield every outside path inside a section, with its location."""
    if isinstance(value, OutsidePath):
        yield at, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from outside_paths(getattr(value, name), (*at, name))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from outside_paths(inner, (*at, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from outside_paths(inner, (*at, index))
