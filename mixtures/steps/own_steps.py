"""The sections `annotate` and `edit`: steps of `prepare` whose function a user has written.

    prepare:
      - annotate: {use: ./steps.py:count_word, with: {word: xyzzy}, max: {magic: 0}}
      - edit: {use: ./steps.py:tidy}
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from gristmill.mixtures.own_code import Own
from gristmill.mixtures.own_signatures import measured_columns
from gristmill.mixtures.section import Judging, PositiveFloat

RESERVED = ("id", "keep", "reason", "error", "edits", "source", "locator", "url", "licence", "text", "metadata", "kept",
            "dropped_by", "tokens", "bytes")
"""Names of columns that mean something else."""
_COLUMN = re.compile(r"^[A-Za-z_]\w*$")


def check_column(name: str) -> str:
    """The name of a column that a step measures.

    Raises:
        ValueError: it is none, or means something else.
    """
    if not _COLUMN.match(name):
        raise ValueError(f"{name!r} cannot be a column: letters, digits and _ only, and no digit first")
    if name in RESERVED:
        raise ValueError(f"{name!r} means something else of a document; call the column otherwise")
    return name


Column = Annotated[str, AfterValidator(check_column)]


class OwnStep(Judging, Own):
    """A step of `prepare` whose function a user has written."""

    columns: tuple[str, ...] = ()
    """What a function that takes a batch (`pa.RecordBatch`, `pa.Table`) is given: columns of documents, or columns that
    steps before have measured. `[text]` if absent. A function that takes one document has a parameter for each."""
    time_limit_seconds: PositiveFloat = 60.0
    """For one call. A document that takes longer is quarantined; a batch that does is given one document at a time.
    Native code (a regular expression, a model) is not interrupted: the limit is seen when it returns."""


class Annotate(OwnStep):
    """A function of the user's that measures documents, or decides which of them are kept; see docs/own-steps.md."""

    min: dict[Column, int | float] = Field(default_factory=dict)
    """Drop documents of which a column is smaller: `{quality: 0.3}`. A null passes."""
    max: dict[Column, int | float] = Field(default_factory=dict)
    """Drop documents of which a column is larger: `{magic: 0}`. A null passes."""
    measures: tuple[Column, ...] = ()
    """The columns that the function returns, where its type hints and its `return {...}` do not say so."""

    @property
    def measured(self) -> list[str]:
        """All columns that the function may return, known without running it."""
        found = [*self.measures, *measured_columns(self.use), *self.min, *self.max]
        return list(dict.fromkeys(found)) or [self.use.name]


class Edit(OwnStep):
    """A function of the user's that changes texts: it takes a text and returns the new one; see docs/own-steps.md."""

    @property
    def edits_text(self) -> bool:
        """Whether the stage changes texts, beside keeping or dropping them."""
        return True
