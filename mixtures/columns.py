"""The names that columns of documents may have, where a manifest gives them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

RESERVED = (
    "id",
    "keep",
    "reason",
    "error",
    "edits",
    "source",
    "locator",
    "url",
    "licence",
    "text",
    "metadata",
    "kept",
    "dropped_by",
    "tokens",
    "bytes",
)
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
