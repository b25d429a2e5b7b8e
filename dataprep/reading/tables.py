"""Rows of Parquet and Arrow files as records; a damaged file gives its rows up to the damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gristmill.dataprep.documents import open_parquet
from gristmill.dataprep.reading.compression import CorruptFileError
from gristmill.dataprep.reading.records import Input, Page, Reading, Record, Rejected, from_row, not_utf8, one_line

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 256
_FILE_MAGIC = b"ARROW1"
"""What the Arrow file format begins with, and the stream format does not."""


def read_parquet(item: Input, reading: Reading) -> Iterator[Record | Page | Rejected]:
    """The rows of a Parquet file, a small batch at a time."""
    yield from _records(item, reading, "Parquet", _parquet_batches(cast(Path, item.path), reading))


def read_arrow(item: Input, reading: Reading) -> Iterator[Record | Page | Rejected]:
    """The rows of an Arrow file in either form: stream (as Hugging Face datasets are saved) or file."""
    yield from _records(item, reading, "Arrow", _arrow_batches(cast(Path, item.path), reading))


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """Rows with all of their columns that are not null, numbered from 1; behind a damage, what it is."""
    import pyarrow as pa

    number = 0
    try:
        with open_parquet(path) as table:
            batches = table.iter_batches(batch_size=BATCH_ROWS, use_threads=False)
            for number, row in enumerate((row for batch in batches for row in _rows(batch)), start=1):
                yield number, (ValueError(row) if isinstance(row, str) else
                               {key: value for key, value in row.items() if value is not None})
    except pa.ArrowException as error:
        yield number + 1, CorruptFileError(f"the Parquet file is damaged: {one_line(error)}")
    except OSError as error:
        if error.errno is not None:  # the storage failed; without an errno it is Arrow that cannot decode
            raise
        yield number + 1, CorruptFileError(f"the Parquet file is damaged: {one_line(error)}")


def _records(
    item: Input, reading: Reading, form: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[Record | Page | Rejected]:
    import pyarrow as pa

    number = 0
    try:
        for number, row in enumerate((row for batch in batches for row in _rows(batch)), start=1):
            if isinstance(row, str):
                yield Rejected(number, row)
            else:
                yield from_row(reading, number, row, f"{item.name}#{number}")
    except pa.ArrowException as error:
        yield Rejected(number + 1, f"the {form} file is damaged: {one_line(error)}", lost=None)
    except OSError as error:
        if error.errno is not None:  # the storage failed; without an errno it is Arrow that cannot decode
            raise
        yield Rejected(number + 1, f"the {form} file is damaged: {one_line(error)}", lost=None)


def _parquet_batches(path: Path, reading: Reading) -> Iterator[pa.RecordBatch]:
    with open_parquet(path) as table:
        columns = _columns(table.schema_arrow, reading)
        yield from table.iter_batches(batch_size=BATCH_ROWS, columns=columns, use_threads=False)


def _arrow_batches(path: Path, reading: Reading) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    with path.open("rb") as stream, pa.PythonFile(stream, mode="r") as source:
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        opened = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        columns = _columns(opened.schema, reading)
        with opened:
            batches = (opened.get_batch(n) for n in range(opened.num_record_batches)) if is_file else opened
            for batch in batches:
                wanted = batch.select(columns)
                for begin in range(0, len(wanted), BATCH_ROWS):
                    yield wanted.slice(begin, BATCH_ROWS)


def _columns(schema: pa.Schema, reading: Reading) -> list[str]:
    """The columns that are read; of a nested field, the column that it lies in."""
    import pyarrow as pa

    asked = {reading.text, *([] if reading.id is None else [reading.id]), *(reading.metadata or ())}
    named = asked | {name.split(".")[0] for name in asked if name not in schema.names}
    if reading.metadata is not None:
        return [name for name in schema.names if name in named]
    no_metadata = (pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary)
    return [
        column.name for column in schema
        if column.name in named or not any(is_kind(column.type) for is_kind in no_metadata)
    ]  # fmt: skip


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | str]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except UnicodeDecodeError:
        yield from (_row(batch, row) for row in range(len(batch)))
    else:
        yield from rows


def _row(batch: pa.RecordBatch, row: int) -> dict[str, Any] | str:
    try:
        found: dict[str, Any] = batch.slice(row, 1).to_pylist()[0]
        return found
    except UnicodeDecodeError as error:
        return not_utf8(error)
