"""Rows of Parquet and Arrow files as records; damage only affects the row groups and
batches that it touches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from gristmill.dataprep.reading.charsets import (
    KEEP_BAD,
    UTF8,
    most_replaced,
    replace_bad,
)
from gristmill.dataprep.reading.compression import CorruptFileError, RecordTooLongError
from gristmill.dataprep.reading.records import (
    Dropped,
    Fields,
    Input,
    Page,
    Reading,
    Record,
    Rejected,
    from_row,
    not_utf8,
    one_line,
)
from gristmill.dataprep.reading.table_guard import LostRows, TableReader

if TYPE_CHECKING:
    import pyarrow as pa

Row = tuple[Fields, int] | str | LostRows
"""A row and its number of U+FFFD for invalid bytes, or its error."""


def read_table(
    item: Input, reading: Reading, form: str, tables: TableReader
) -> Iterator[Record | Page | Rejected | Dropped]:
    """Read the rows of a Parquet file, or of an Arrow file: stream (as saved by Hugging
    Face) or file format.
    """
    columns = [
        reading.text,
        *([] if reading.id is None else [reading.id]),
        *(reading.metadata or ()),
    ]
    batches = tables.batches(
        cast(Path, item.path), form, columns, scalars=reading.metadata is None
    )
    number = lost = 0
    try:
        for number, row in enumerate(
            _all_rows(batches, reading.encoding_errors == "replace"), start=1
        ):
            if isinstance(row, str):
                yield Rejected(number, row)
            elif isinstance(row, LostRows):
                yield Rejected(
                    number, row.error, lost=None if row.rows is None else row.rows - 1
                )
                lost += (row.rows or 1) - 1
            else:
                yield from_row(reading, number, row[0], f"{item.name}#{number}", row[1])
    except CorruptFileError as error:
        yield Rejected(
            number + 1,
            str(error),
            lost=None
            if tables.rows is None
            else max(tables.rows - number - lost - 1, 0),
        )


def table_rows(
    path: Path, form: str = "parquet"
) -> Iterator[tuple[int, Fields | ValueError]]:
    """Yield rows with all non-null columns, numbered from 1; damaged rows become a
    CorruptFileError.
    """
    number = 0
    with TableReader() as tables:
        try:
            for number, row in enumerate(
                _all_rows(tables.batches(path, form), replaces=False), start=1
            ):
                if isinstance(row, LostRows):
                    yield number, CorruptFileError(row.error)
                elif isinstance(row, str):
                    yield number, ValueError(row)
                else:
                    yield (
                        number,
                        {
                            key: value
                            for key, value in row[0].items()
                            if value is not None
                        },
                    )
        except CorruptFileError as error:
            yield number + 1, error


def _all_rows(
    batches: Iterator[pa.RecordBatch | RecordTooLongError | LostRows], replaces: bool
) -> Iterator[Row]:
    for batch in batches:
        if isinstance(batch, RecordTooLongError):
            yield str(batch)
        elif isinstance(batch, LostRows):
            yield batch
        else:
            yield from _rows(batch, replaces)


def _rows(batch: pa.RecordBatch, replaces: bool) -> Iterator[Row]:
    try:
        rows: list[Fields] = batch.to_pylist()
    except (ValueError, OverflowError):
        # not UTF-8, or a date that Python does not support
        yield from (_row(batch.slice(row, 1), replaces) for row in range(len(batch)))
    else:
        yield from ((row, 0) for row in rows)


def _row(row_batch: pa.RecordBatch, replaces: bool) -> Row:
    try:
        row: Fields = row_batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        repaired = _repair_row(row_batch) if replaces else None
        return not_utf8(error) if repaired is None else repaired
    except (ValueError, OverflowError) as error:
        return f"the row cannot be read: {one_line(error)}"
    return row, 0


def _repair_row(row_batch: pa.RecordBatch) -> tuple[Fields, int] | None:
    """Row with U+FFFD for invalid UTF-8 in its string columns; None if there is too
    much.
    """
    import pyarrow as pa

    from gristmill.dataprep.reading.table_child import as_bytes

    columns = {}
    replaced = 0
    size = 0
    for name, column in zip(row_batch.schema.names, row_batch.columns, strict=True):
        if not (
            pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        ):
            columns[name] = column
            continue
        value = column.view(as_bytes(column.type))[0].as_py()
        text, num_bad = (
            (None, 0)
            if value is None
            else replace_bad(value.decode(UTF8, KEEP_BAD), UTF8)
        )
        columns[name], replaced, size = (
            pa.array([text], column.type),
            replaced + num_bad,
            size + len(value or b""),
        )
    if replaced > most_replaced(size):
        return None
    try:
        return pa.RecordBatch.from_pydict(columns).to_pylist()[0], replaced
    except (ValueError, OverflowError):  # nested strings are not UTF-8
        return None
