"""Rows of Parquet and Arrow files as records; damage only affects the row groups and
batches that it touches.

A child process (`table_child.py`) reads the files, so that a damaged one only loses
itself. It is reused for further files.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from gristmill.dataprep.readers import compression
from gristmill.dataprep.readers.charsets import (
    KEEP_BAD,
    UTF8,
    most_replaced,
    replace_bad,
)
from gristmill.dataprep.readers.compression import CorruptFileError, one_line
from gristmill.dataprep.readers.guarded import (
    OUT_OF_MEMORY,
    EndedError,
    GuardedProcess,
    local_copy,
)
from gristmill.dataprep.readers.records import (
    Fields,
    Input,
    Read,
    Reading,
    Rejected,
    from_row,
    not_utf8,
)
from gristmill.dataprep.readers.table_child import LostRows, TableRequest, as_bytes

Batches = Iterator[pa.RecordBatch | LostRows]
Row = tuple[Fields, int] | LostRows
"""A row and its number of U+FFFD for invalid bytes, or its error."""


@dataclass
class TableReader(GuardedProcess):
    """A process that reads tables, started for the first one.

    Attributes:
        memory_bytes: limit of the memory on top of that at the start: a decoded batch
            and its copies.
        seconds: CPU limit per batch of rows.
    """

    memory_bytes: int = 2 << 30
    seconds: float = 60.0
    rows: int | None = None
    """Number of rows in the current file's footer; None if it has no number."""

    def batches(
        self,
        path: str | Path,
        form: str,
        columns: Sequence[str] | None = None,
        scalars: bool = True,
    ) -> Batches:
        """Yield the batches of a Parquet or Arrow file, all of them valid.

        Args:
            form: `parquet` or `arrow`.
            columns: names, or `a.b` for the column `a`; all if None.
            scalars: also read all columns that are neither nested nor bytes.

        Raises:
            CorruptFileError: the file is damaged, after all batches before the damage.
            OSError: the storage failed.
        """
        self.rows = None
        with local_copy(path) as file:
            request = TableRequest(str(file), form, columns, scalars)
            try:
                for answer in self.answers(request):
                    if isinstance(answer, int):
                        self.rows = answer
                    elif isinstance(answer, LostRows):
                        yield answer
                    else:
                        yield pa.ipc.open_stream(answer).read_next_batch()
            except EndedError as error:
                raise CorruptFileError(
                    f"{request.damaged}: its reader {error}"
                ) from error

    def start(self) -> None:
        """Start the process."""
        settings = {
            "memory_bytes": self.memory_bytes,
            "seconds": self.seconds,
            "row_bytes": compression.MAX_RECORD_BYTES,
        }
        self.begin(
            "gristmill.dataprep.readers.table_child",
            settings,
            {
                signal.SIGPROF: f"took more than {self.seconds:g} s for a batch of its "
                "rows",
                OUT_OF_MEMORY: f"needed more than {self.memory_bytes >> 20} MiB of "
                "memory",
            },
        )


def read_table(
    item: Input, reading: Reading, form: str, tables: TableReader
) -> Iterator[Read]:
    """Read the rows of a Parquet file, or of an Arrow file: stream (as saved by Hugging
    Face) or file format.
    """
    names = [reading.text, reading.id, *(reading.metadata or ())]
    batches = tables.batches(
        str(item.path),
        form,
        [name for name in names if name is not None],
        scalars=reading.metadata is None,
    )
    number = lost = 0
    try:
        for number, row in enumerate(
            _rows(batches, reading.encoding_errors == "replace"), start=1
        ):
            if isinstance(row, LostRows):
                lost_after = None if row.rows is None else row.rows - 1
                yield Rejected(number, str(row.error), lost=lost_after)
                lost += lost_after or 0
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
        rows = _rows(tables.batches(path, form), replaces=False)
        try:
            for number, row in enumerate(rows, start=1):
                if isinstance(row, LostRows):
                    yield number, row.error
                else:
                    fields, _ = row
                    yield (
                        number,
                        {
                            key: value
                            for key, value in fields.items()
                            if value is not None
                        },
                    )
        except CorruptFileError as error:
            yield number + 1, error


def _rows(batches: Batches, replaces: bool) -> Iterator[Row]:
    for batch in batches:
        if isinstance(batch, LostRows):
            yield batch
            continue
        try:
            rows: list[Fields] = batch.to_pylist()
        except (ValueError, OverflowError):
            # not UTF-8, or a date that Python does not support
            for number in range(len(batch)):
                row_batch = batch.slice(number, 1)
                try:
                    row: Fields = row_batch.to_pylist()[0]
                except UnicodeDecodeError as error:
                    repaired = _repair_row(row_batch) if replaces else None
                    yield repaired or LostRows(1, ValueError(not_utf8(error)))
                except (ValueError, OverflowError) as error:
                    problem = f"the row cannot be read: {one_line(error)}"
                    yield LostRows(1, ValueError(problem))
                else:
                    yield row, 0
        else:
            yield from ((row, 0) for row in rows)


def _repair_row(row_batch: pa.RecordBatch) -> tuple[Fields, int] | None:
    """Row with U+FFFD for invalid UTF-8 in its string columns; None if there is too
    much.
    """
    columns = dict(zip(row_batch.schema.names, row_batch.columns, strict=True))
    replaced = size = 0
    for name, column in columns.items():
        kind = column.type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if is_text and column.is_valid()[0].as_py():
            value = column.view(as_bytes(kind))[0].as_py()
            text, num_bad = replace_bad(value.decode(UTF8, KEEP_BAD), UTF8)
            columns[name] = pa.array([text], kind)
            replaced += num_bad
            size += len(value)
    if replaced > most_replaced(size):
        return None
    try:
        return pa.RecordBatch.from_pydict(columns).to_pylist()[0], replaced
    except (ValueError, OverflowError):  # nested strings are not UTF-8
        return None
