"""Names of document columns that a manifest may set."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

RESERVED = tuple(
    (
        "id keep reason error edits source locator url licence text metadata kept "
        "dropped_by tokens bytes"
    ).split()
)
"""Column names with another meaning."""
_COLUMN = re.compile(r"^[A-Za-z_]\w*$")


def check_column(name: str) -> str:
    """Check the name of a column that a step measures.

    Raises:
        ValueError: it is not a column name, or is reserved.
    """
    if not _COLUMN.match(name):
        raise ValueError(
            f"{name!r} cannot be a column: letters, digits and _ only, "
            "and no digit first"
        )
    if name in RESERVED:
        raise ValueError(
            f"{name!r} has another meaning for documents; choose "
            "another name for the column"
        )
    return name


Column = Annotated[str, AfterValidator(check_column)]
