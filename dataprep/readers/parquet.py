"""Rows of Parquet and Arrow files as records; damage only affects the row groups and
batches that it touches.

A child process (`table_child.py`) reads the files, so that a damaged one only loses
itself. It is reused for further files. Earlier files may have corrupted a failing
process, so a file that crashes it or needs too much memory is read again in a fresh
one: the result of a file depends on that file alone.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.dataprep.readers import compression
from gristmill.dataprep.readers.charsets import (
    KEEP_BAD,
    UTF8,
    most_replaced,
    replace_bad,
)
from gristmill.dataprep.readers.compression import CorruptFileError, RecordTooLongError
from gristmill.dataprep.readers.guarded import EndedError, GuardedProcess, local_copy
from gristmill.dataprep.readers.records import (
    Fields,
    Input,
    Read,
    Reading,
    Rejected,
    from_row,
    not_utf8,
    one_line,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from gristmill.dataprep.readers.table_child import TableAnswer, TableRequest

    Batches = Iterator[pa.RecordBatch | "LostRows"]


@dataclass(frozen=True)
class LostRows:
    """Unreadable rows of a file.

    Attributes:
        rows: their number; None if unknown.
        error: CorruptFileError if the file is damaged there, else the error of the one
            row.
    """

    rows: int | None
    error: ValueError


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
        damaged = f"the {form.capitalize()} file is damaged"
        with local_copy(path) as file:
            request: TableRequest = {
                "path": str(file),
                "form": form,
                "columns": columns,
                "scalars": scalars,
            }
            num_yielded = 0
            is_fresh = self._child is None
            while True:
                try:
                    answers = self._answers(request, damaged)
                    for batch in islice(answers, num_yielded, None):
                        num_yielded += 1
                        yield batch
                    return
                except EndedError as error:
                    if is_fresh:
                        raise CorruptFileError(
                            f"{damaged}: its reader {error}"
                        ) from error
                    is_fresh = True

    def _answers(self, request: TableRequest, damaged: str) -> Batches:
        """Yield the answers to a request; kills the process unless all were read.
        Raises EndedError if the process ended, or lacked memory.
        """
        import pyarrow as pa

        is_complete, self.rows = False, None
        if self._child is None:
            settings = {
                "memory_bytes": self.memory_bytes,
                "seconds": self.seconds,
                "row_bytes": compression.MAX_RECORD_BYTES,
            }
            late = f"took more than {self.seconds:g} s for a batch of its rows"
            self.begin(
                "gristmill.dataprep.readers.table_child",
                settings,
                {signal.SIGPROF: late},
            )
        try:
            self.send(json.dumps(request).encode())
            while not is_complete:
                answer: TableAnswer = json.loads(self.receive())
                if "rows" in answer:
                    self.rows = answer["rows"]
                elif "too_long" in answer:
                    most = compression.MAX_RECORD_BYTES >> 20
                    error = RecordTooLongError(f"the row is longer than {most} MiB")
                    yield LostRows(1, error)
                elif "lost" in answer:
                    damage = CorruptFileError(f"{damaged}: {answer['error']}")
                    yield LostRows(answer["lost"], damage)
                elif "batch" in answer:
                    yield pa.ipc.open_stream(self.receive()).read_next_batch()
                elif "errno" in answer:
                    raise OSError(answer["errno"], answer["error"])
                elif "memory" in answer:
                    raise EndedError(
                        f"needed more than {self.memory_bytes >> 20} MiB of memory"
                    )
                elif "damage" in answer:
                    raise CorruptFileError(f"{damaged}: {answer['damage']}")
                else:
                    is_complete = True
        finally:
            if not is_complete:
                self.kill()


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
    import pyarrow as pa

    from gristmill.dataprep.readers.table_child import as_bytes

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
