"""Child process that reads tables: the rows of a Parquet or Arrow file as validated
batches.

Arrow trusts the offsets in a file, so a damaged file may crash its reader or make it
allocate any amount of memory. Each batch is fully validated here before it is sent.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.dataprep.readers.compression import (
    CorruptFileError,
    RecordTooLongError,
    one_line,
)
from gristmill.dataprep.readers.guarded import (
    OUT_OF_MEMORY,
    begin,
    limit_resource,
    serve,
)

BATCH_ROWS = 256
BATCH_BYTES = 16 << 20
"""Bytes above which a batch is halved, down to single rows."""
_FILE_MAGIC = b"ARROW1"
"""First bytes of the Arrow file format, which the stream format lacks."""
_STREAM_OFFSET = 8
"""Start of the stream in the file format, after the padded magic bytes (Arrow Columnar
Format).
"""


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


@dataclass(frozen=True)
class TableRequest:
    """File to read; see `parquet.TableReader.batches`."""

    path: str
    form: str
    columns: Sequence[str] | None
    scalars: bool

    @property
    def damaged(self) -> str:
        """Start of an error message."""
        return f"the {self.form.capitalize()} file is damaged"


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


Answer = int | LostRows | bytes
"""Number of rows in the file, unreadable rows, or an Arrow stream of one batch."""


def main() -> None:
    """Read files until the requests end."""
    settings: TableSettings
    settings, requests, answers = begin()
    pages = 0
    if sys.platform.startswith("linux"):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit_resource(
        resource.RLIMIT_AS,
        pages * resource.getpagesize() + settings["memory_bytes"],
    )
    serve(requests, answers, partial(_answers, settings))


def _answers(settings: TableSettings, request: TableRequest) -> Iterator[Answer]:
    """Yield the batches of a file.

    Raises:
        CorruptFileError: it cannot be read further.
        OSError: the storage failed.
    """
    read = _parquet if request.form == "parquet" else _arrow
    most = settings["row_bytes"]
    try:
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
        for batch in read(Path(request.path), request):
            if not isinstance(batch, pa.RecordBatch):
                yield batch
                continue
            for piece in _pieces(batch, min(BATCH_BYTES, most)):
                if (error := _damage_of(piece)) is not None:
                    damage = CorruptFileError(f"{request.damaged}: {error}")
                    yield LostRows(len(piece), damage)
                elif len(piece) == 1 and piece.nbytes > most:
                    problem = f"the row is longer than {most >> 20} MiB"
                    yield LostRows(1, RecordTooLongError(problem))
                else:
                    sink = pa.BufferOutputStream()
                    with pa.ipc.new_stream(sink, piece.schema) as writer:
                        writer.write_batch(piece)
                    yield sink.getvalue().to_pybytes()
            signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
    except (MemoryError, pa.ArrowMemoryError):
        signal.raise_signal(OUT_OF_MEMORY)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CorruptFileError(f"{request.damaged}: {one_line(error)}") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _lost(request: TableRequest, error: Exception, rows: int | None) -> LostRows:
    """Rows that damage makes unreadable. Re-raises errors that are not of the file: lack of
    memory, a failing storage.
    """
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno is not None
    ):
        raise error
    return LostRows(rows, CorruptFileError(f"{request.damaged}: {one_line(error)}"))


def _parquet(
    path: Path, request: TableRequest
) -> Iterator[pa.RecordBatch | int | LostRows]:
    """Yield the number of rows, if a file of this size can have so many, then the
    batches; damage loses its row group only.
    """
    size = path.stat().st_size
    with pq.ParquetFile(str(path), page_checksum_verification=True) as table:
        if table.metadata.num_rows <= size:
            yield table.metadata.num_rows
        columns = columns_of(table.schema_arrow, request)
        for group in range(table.num_row_groups):
            num_read = 0
            try:
                for batch in table.iter_batches(
                    BATCH_ROWS, [group], columns, use_threads=False
                ):
                    num_read += len(batch)
                    yield batch
            except Exception as error:  # noqa: BLE001 - any error of a damaged file
                rows = min(table.metadata.row_group(group).num_rows, size)
                yield _lost(request, error, max(rows - num_read, 1))


def _arrow(path: Path, request: TableRequest) -> Iterator[pa.RecordBatch | LostRows]:
    with pa.OSFile(str(path)) as source:
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        if not is_file:
            yield from _stream_batches(source, request)
            return
        try:
            opened = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            # a truncated file has lost its footer, and is a stream after its first
            # bytes
            source.seek(_STREAM_OFFSET)
            yield from _stream_batches(source, request)
            raise
        columns = columns_of(opened.schema, request)
        rows: int | None = None
        for number in range(opened.num_record_batches):
            try:
                batch = opened.get_batch(number)
                batch.validate()  # column lengths, before slicing
            except Exception as error:  # noqa: BLE001 - any error of a damaged file
                yield _lost(request, error, rows)  # the size of the previous batch
                continue
            rows = len(batch)
            yield from _slices(batch.select(columns))


def _stream_batches(
    source: pa.NativeFile, request: TableRequest
) -> Iterator[pa.RecordBatch]:
    with pa.ipc.open_stream(source) as opened:
        columns = columns_of(opened.schema, request)
        for batch in opened:
            batch.validate()
            yield from _slices(batch.select(columns))


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(batch), BATCH_ROWS):
        yield batch.slice(first, BATCH_ROWS)


def columns_of(schema: pa.Schema, request: TableRequest) -> list[str]:
    """Columns to read: all if none are requested; for a nested field, its top-level
    column.
    """
    if request.columns is None:
        return list(schema.names)
    requested = set(request.columns)
    selected = requested | {
        name.split(".")[0] for name in requested if name not in schema.names
    }
    if not request.scalars:
        return [name for name in schema.names if name in selected]
    no_metadata = (pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary)
    return [
        column.name
        for column in schema
        if column.name in selected
        or not any(is_kind(column.type) for is_kind in no_metadata)
    ]


def _pieces(batch: pa.RecordBatch, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield the batch in halves, as small as necessary."""
    if len(batch) <= 1 or batch.nbytes <= most_bytes:
        yield batch
        return
    half = len(batch) // 2
    yield from _pieces(batch.slice(0, half), most_bytes)
    yield from _pieces(batch.slice(half), most_bytes)


def _damage_of(batch: pa.RecordBatch) -> str | None:
    """Error of a wrong offset, index or length, or None. Strings need not be UTF-8:
    that is an error of the row.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        try:
            for column in batch.columns:
                column.view(as_bytes(column.type)).validate(full=True)
        except pa.ArrowInvalid as error:
            return one_line(error)
    return None


def as_bytes(kind: pa.DataType) -> pa.DataType:
    """Type of the same buffers, with bytes for strings."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct(
            [
                kind.field(n).with_type(as_bytes(kind.field(n).type))
                for n in range(kind.num_fields)
            ]
        )
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(as_bytes(kind.value_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(as_bytes(kind.value_type)))
    return kind
