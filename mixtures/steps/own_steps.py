"""The steps of `prepare` that measure by a function of the user's or by a model, or edit by a function.

prepare:
  - annotate: {use: ./steps.py:count_word, with: {word: xyzzy}, max: {magic: 0}}
  - annotate: {model: {path: models/edu, name: edu}, min: {edu: 2.5}}
  - edit: {use: ./steps.py:tidy}
"""

from __future__ import annotations

from typing import Annotated, Any  # noqa: F401 - Any is of the annotation of `with`

from pydantic import Field, model_validator

from gristmill.mixtures.base import Judging, PositiveFloat
from gristmill.mixtures.columns import Column
from gristmill.mixtures.encoder_settings import ScoringModel
from gristmill.mixtures.own_signatures import measured_columns
from gristmill.mixtures.user_code import BuiltInOrOwn, Own, OwnFunction


class Calling(Judging):
    """How a function of the user's is called on documents."""

    columns: tuple[str, ...] = ()
    """What a function that takes a batch (`pa.RecordBatch`, `pa.Table`) is given: columns of documents, or columns that
    steps before have measured. `[text]` if absent. A function that takes one document has a parameter for each."""
    time_limit_seconds: PositiveFloat = 60.0
    """For one call. A document that takes longer is quarantined; a batch that does is given one document at a time.
    Native code (a regular expression, a model) is not interrupted: the limit is seen when it returns."""


class OwnStep(Calling, Own):
    """A step of `prepare` whose function a user has written."""


class Measuring(Calling):
    """What measures documents, and drops those whose columns are too small or too large."""

    min: dict[Column, int | float] = Field(default_factory=dict)
    """Drop documents of which a column is smaller: `{quality: 0.3}`. A null passes."""
    max: dict[Column, int | float] = Field(default_factory=dict)
    """Drop documents of which a column is larger: `{magic: 0}`. A null passes."""
    measures: tuple[Column, ...] = ()
    """The columns that the function returns, where its type hints and its `return {...}` do not say so."""


class OwnAnnotate(Measuring, OwnStep):
    """A function of the user's that measures documents, or decides which of them are kept."""

    @property
    def measured(self) -> list[str]:
        """All columns that the function may return, known without running it."""
        found = [*self.measures, *measured_columns(self.use), *self.min, *self.max]
        return list(dict.fromkeys(found)) or [self.use.name]


class Annotate(Measuring, BuiltInOrOwn):
    """A model that scores documents (docs/annotators.md), or a function of the user's that measures them, or decides
    which of them are kept (docs/own-steps.md)."""

    added = ("model",)
    use: Annotated[OwnFunction | None, Field(exclude_if=lambda value: value is None)] = None
    """A function of your own: `./FILE.py:NAME`, a file beside the manifest, or `PACKAGE.MODULE:NAME`, installed."""
    __annotations__["with"] = "dict[str, Any]"
    vars()["with"] = Field(default_factory=dict, description="Further arguments of the function, by name.")
    model: ScoringModel | None = None
    """A model in place of a function: its path alone, or with how it reads and what its columns are called."""

    @model_validator(mode="after")
    def _measures_by_one(self) -> Annotate:
        if (self.use is None) == (self.model is None):
            raise ValueError("annotate measures by a function of your own (`use`) or by a `model`: name one of them")
        unused = [
            name
            for name in ("columns", "measures", "time_limit_seconds")
            if name in self.model_fields_set
            and getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
        ]
        if self.model is not None and unused:
            raise ValueError(f"`{unused[0]}` is of functions, and says nothing to a model: remove it")
        return self

    @property
    def function(self) -> OwnAnnotate:
        """The step as one of a function, which it must have."""
        return OwnAnnotate.model_validate({name: getattr(self, name) for name in OwnAnnotate.model_fields})


class Edit(OwnStep):
    """A function of the user's that changes texts: it takes a text and returns the new one; see docs/own-steps.md."""

    @property
    def edits_text(self) -> bool:
        """Whether the stage changes texts, beside keeping or dropping them."""
        return True
