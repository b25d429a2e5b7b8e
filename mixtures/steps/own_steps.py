"""Steps of `prepare` that measure with a user's function or a model, or edit with a
function.

    prepare:
      - annotate: {use: ./steps.py:count_word, with: {word: xyzzy}, max: {magic: 0}}
      - annotate: {model: {path: models/edu, name: edu}, min: {edu: 2.5}}
      - edit: {use: ./steps.py:tidy}
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any  # noqa: F401 - it is of the annotation of `with`

from pydantic import Field

from gristmill.mixtures.base import Judging, Omissible, PositiveFloat
from gristmill.mixtures.columns import Column
from gristmill.mixtures.own_signatures import measured_columns
from gristmill.mixtures.schema.encoder_settings import ScoringModel
from gristmill.mixtures.user_code import BuiltInOrOwn, Own, OwnFunction


class Calling(Judging):
    """Settings for calling a user's function on documents."""

    columns: tuple[str, ...] = ()
    """Columns for a function that takes a batch (`pa.RecordBatch`, `pa.Table`): columns
    of documents, or those that earlier steps have measured. `[text]` if absent. A
    function that takes one document has a parameter for each column.
    """
    time_limit_seconds: PositiveFloat = 60.0
    """Time limit per call. A document that takes longer is quarantined; a batch that
    does is repeated one document at a time. Native code (a regular expression, a model)
    is not interrupted: the limit applies when it returns.
    """


class OwnStep(Calling, Own):
    """A step of `prepare` with a user's function."""


class Measuring(Calling):
    """Measurements of documents, with bounds on columns that drop documents."""

    min: dict[Column, int | float] = Field(default_factory=dict)
    """Drop documents with a smaller value in a column: `{quality: 0.3}`. A null
    passes.
    """
    max: dict[Column, int | float] = Field(default_factory=dict)
    """Drop documents with a larger value in a column: `{magic: 0}`. A null passes."""
    measures: tuple[Column, ...] = ()
    """Columns that the function returns, if its type hints and its `return {...}` do
    not show them.
    """


class OwnAnnotate(Measuring, OwnStep):
    """A user's function that measures documents, or decides which of them are kept."""

    @property
    def measured(self) -> list[str]:
        """All columns that the function may return, known without running it."""
        columns = [*self.measures, *measured_columns(self.use), *self.min, *self.max]
        return list(dict.fromkeys(columns)) or [self.use.name]


class Annotate(Measuring, BuiltInOrOwn):
    """A model that scores documents (docs/annotators.md), or a user's function that
    measures them, or decides which of them are kept (docs/own-steps.md).
    """

    added = ("model",)
    preset: Omissible[str | None] = Field(default=None, exclude=True)
    """Name of a ready annotator (`gristmill annotators`), or `FILE#NAME`, whose settings
    stand for those that are absent here.
    """
    use: Omissible[OwnFunction | None] = None
    """A function of your own: `./FILE.py:NAME`, a file beside the manifest, or
    `PACKAGE.MODULE:NAME`, installed.
    """
    __annotations__["with"] = "dict[str, object]"
    vars()["with"] = Field(
        default_factory=dict, description="Further arguments of the function, by name."
    )
    model: ScoringModel | None = None
    """A model instead of a function: only its path, or with settings for reading and
    for the names of its columns.
    """

    def _problems(self) -> Iterator[str]:
        if (self.use is None) == (self.model is None):
            yield (
                "annotate measures with a function of your own (`use`) or with a "
                "`model`: give one of them"
            )
        for name in self.changed_keys() if self.model is not None else ():
            if name in ("columns", "measures", "time_limit_seconds"):
                yield (
                    f"`{name}` is for functions, and has no effect on a model: "
                    "remove it"
                )

    @property
    def function(self) -> OwnAnnotate:
        """The step as one with a function, which it must have."""
        return OwnAnnotate.model_validate(
            {name: getattr(self, name) for name in OwnAnnotate.model_fields}
        )


class Edit(OwnStep):
    """A user's function that changes texts: it takes a text and returns the new one;
    see docs/own-steps.md.
    """

    @property
    def edits_text(self) -> bool:
        """True if the stage changes texts besides keeping or dropping them."""
        return True
