"""Settings, requests and answers of the process that reads tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class TableSettings(TypedDict):
    """Limits of the process.

    Attributes:
        memory_bytes: on top of its memory at the start.
        seconds: processor time per batch of rows.
        row_bytes: size of the longest row.
    """

    memory_bytes: int
    seconds: float
    row_bytes: int


class TableRequest(TypedDict):
    """File to read.

    Attributes:
        form: `parquet` or `arrow`.
        columns: names, or `a.b` for the column `a`; None for all.
        scalars: also read all columns that are neither nested nor bytes.
    """

    path: str
    form: str
    columns: Sequence[str] | None
    scalars: bool


class TableAnswer(TypedDict, total=False):
    """One of the answers to a request.

    Attributes:
        rows: number of rows in the file.
        lost: number of unreadable rows, with their `error`; None if unknown.
        batch: true if a batch follows; False for a row that is too long.
        damage: error of a file that cannot be read further.
        memory: the limit was reached.
        errno: of an error of the storage, with its message as `error`.
    """

    rows: int
    lost: int | None
    batch: bool
    damage: str
    memory: bool
    errno: int
    error: str
    end: bool
