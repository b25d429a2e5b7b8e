"""Child process that reads tables: takes the path of a Parquet or Arrow file, and
writes its rows as validated batches.

Arrow trusts the offsets in a file, so a damaged file may crash its reader or make it
allocate any amount of memory. Each batch is fully validated here before it is sent.
Started by `parquet.TableReader`; a message (`guarded.py`) is JSON, or after
`{"batch": true}` an Arrow stream of one batch.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.dataprep.readers.guarded import begin, limit_resource

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


class TableRequest(TypedDict):
    """File to read; see `tables.TableReader.batches`."""

    path: str
    form: str
    columns: Sequence[str] | None
    scalars: bool


class TableAnswer(TypedDict, total=False):
    """One of the answers to a request.

    Attributes:
        rows: number of rows in the file.
        lost: number of unreadable rows, with their `error`; None if unknown.
        batch: a batch follows.
        too_long: a row is too long.
        damage: error of a file that cannot be read further.
        memory: the limit was reached.
        errno: of an error of the storage, with its message as `error`.
    """

    rows: int
    lost: int | None
    batch: bool
    too_long: bool
    damage: str
    memory: bool
    errno: int
    error: str
    end: bool


def main() -> None:
    """Read files until the requests end, or a file is damaged. The only argument is
    JSON.
    """
    settings: TableSettings
    settings, requests, answers = begin()
    pages = 0
    if sys.platform.startswith("linux"):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit_resource(
        resource.RLIMIT_AS,
        pages * resource.getpagesize() + settings["memory_bytes"],
    )
    for request in requests:
        outcome = _answer(answers, json.loads(request), settings)
        _send(answers, outcome)
        if outcome != {"end": True}:
            return


def _send(answers: Connection, answer: TableAnswer) -> None:
    answers.send_bytes(json.dumps(answer).encode())


def _answer(
    answers: Connection, request: TableRequest, settings: TableSettings
) -> TableAnswer:
    """Write the batches of a file; returns the outcome."""
    read = _parquet if request["form"] == "parquet" else _arrow
    try:
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
        for batch in read(Path(request["path"]), request):
            if not isinstance(batch, pa.RecordBatch):
                _send(answers, batch)
                continue
            for piece in _pieces(batch, min(BATCH_BYTES, settings["row_bytes"])):
                if (error := _damage_of(piece)) is not None:
                    _send(answers, {"lost": len(piece), "error": error})
                    continue
                if len(piece) == 1 and piece.nbytes > settings["row_bytes"]:
                    _send(answers, {"too_long": True})
                else:
                    _send(answers, {"batch": True})
                    sink = pa.BufferOutputStream()
                    with pa.ipc.new_stream(sink, piece.schema) as writer:
                        writer.write_batch(piece)
                    answers.send_bytes(sink.getvalue())
            signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
    except (MemoryError, pa.ArrowMemoryError):
        return {"memory": True}
    except Exception as error:  # noqa: BLE001 - any error loses only this file
        if isinstance(error, OSError) and error.errno is not None:
            return {"errno": error.errno, "error": str(error)}
        return {"damage": _one_line(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"end": True}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _lost(error: Exception, rows: int | None) -> TableAnswer:
    """Answer for unreadable rows. Re-raises errors that are not of the file: lack of
    memory, a failing storage.
    """
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno is not None
    ):
        raise error
    return {"lost": rows, "error": _one_line(error)}


def _parquet(
    path: Path, request: TableRequest
) -> Iterator[pa.RecordBatch | TableAnswer]:
    """Yield the number of rows, if a file of this size can have so many, then the
    batches; damage loses its row group only.
    """
    size = path.stat().st_size
    with pq.ParquetFile(str(path), page_checksum_verification=True) as table:
        if table.metadata.num_rows <= size:
            yield {"rows": table.metadata.num_rows}
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
                yield _lost(error, max(rows - num_read, 1))


def _arrow(path: Path, request: TableRequest) -> Iterator[pa.RecordBatch | TableAnswer]:
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
                yield _lost(error, rows)  # the size of the previous batch
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
    if request["columns"] is None:
        return list(schema.names)
    requested = set(request["columns"])
    selected = requested | {
        name.split(".")[0] for name in requested if name not in schema.names
    }
    if not request["scalars"]:
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
            return _one_line(error)
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


if __name__ == "__main__":
    main()
