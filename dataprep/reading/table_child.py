"""The process that reads tables: takes the name of a Parquet or Arrow file, writes its rows as checked batches.

Arrow trusts the offsets that a file holds, so a damaged file may crash whoever reads it, or have it take any memory.
Here every batch is validated wholly before it leaves. Started by `table_guard.TableReader`; a frame (`guarded.py`) is
JSON, or behind `{"batch": true}` a stream of Arrow with one batch.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.dataprep.reading.guarded import begin, frame, limit_resource, read_frame

BATCH_ROWS = 256
BATCH_BYTES = 16 << 20
"""Bytes above which a batch is cut in two, down to single rows."""
_FILE_MAGIC = b"ARROW1"
"""What the Arrow file format begins with, and the stream format does not."""


def main() -> None:
    """Read one file after the other until the input ends, or one of them is damaged. The one argument is JSON."""
    settings, requests, answers = begin()
    limit_resource(resource.RLIMIT_AS, _address_space() + settings["memory_bytes"])
    while (request := read_frame(requests)) is not None:
        about = json.loads(request)
        ended = _answer(answers, Path(about["path"]), about, settings)
        answers.write(frame(ended))
        answers.flush()
        if ended != {"end": True}:
            return


def _answer(answers: BinaryIO, path: Path, about: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Write the batches of a file; returns how it ended."""
    try:
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
        for batch in _parquet(path, about) if about["form"] == "parquet" else _arrow(path, about):
            if isinstance(batch, int):
                answers.write(frame({"rows": batch}))
                continue
            for piece in _pieces(batch, min(BATCH_BYTES, settings["row_bytes"])):
                _check(piece)
                long = len(piece) == 1 and piece.nbytes > settings["row_bytes"]
                answers.write(frame({"batch": not long}))
                if not long:
                    answers.write(frame(_packed(piece)))
                answers.flush()
            signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
    except (MemoryError, pa.ArrowMemoryError):
        return {"memory": True}
    except OSError as error:  # without an errno it is Arrow that cannot decode
        return _damage(error) if error.errno is None else {"errno": error.errno, "error": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever a file does to its reader, it is this file that is lost
        return _damage(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"end": True}


def _damage(error: Exception) -> dict[str, Any]:
    """The answer about a file that is damaged; what it says is one line."""
    return {"damage": " ".join(str(error).split())}


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform.startswith("linux") else 0
    return pages * resource.getpagesize()


def _parquet(path: Path, about: dict[str, Any]) -> Iterator[pa.RecordBatch | int]:
    """The number of rows, unless it is more than a file of this size can hold, then the batches."""
    with pq.ParquetFile(str(path)) as table:
        if table.metadata.num_rows <= path.stat().st_size:
            yield table.metadata.num_rows
        columns = columns_of(table.schema_arrow, about)
        for group in range(table.num_row_groups):  # so that damage costs no row of the groups before
            yield from table.iter_batches(BATCH_ROWS, [group], columns, use_threads=False)


def _arrow(path: Path, about: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(str(path)) as source:
        is_file = source.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        source.seek(0)
        opened = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        columns = columns_of(opened.schema, about)
        with opened:
            batches = (opened.get_batch(n) for n in range(opened.num_record_batches)) if is_file else opened
            for batch in batches:
                batch.validate()  # lengths of the columns, before they are sliced
                wanted = batch.select(columns)
                for begin in range(0, len(wanted), BATCH_ROWS):
                    yield wanted.slice(begin, BATCH_ROWS)


def columns_of(schema: pa.Schema, about: dict[str, Any]) -> list[str]:
    """The columns that are read: all where none are asked for; of a nested field, the column that it lies in."""
    if about["columns"] is None:
        return list(schema.names)
    asked = set(about["columns"])
    named = asked | {name.split(".")[0] for name in asked if name not in schema.names}
    if not about["scalars"]:
        return [name for name in schema.names if name in named]
    no_metadata = (pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary)
    return [
        column.name
        for column in schema
        if column.name in named or not any(is_kind(column.type) for is_kind in no_metadata)
    ]


def _pieces(batch: pa.RecordBatch, most_bytes: int) -> Iterator[pa.RecordBatch]:
    """The batch, cut in two as often as it takes."""
    if len(batch) <= 1 or batch.nbytes <= most_bytes:
        yield batch
        return
    half = len(batch) // 2
    yield from _pieces(batch.slice(0, half), most_bytes)
    yield from _pieces(batch.slice(half), most_bytes)


def _check(batch: pa.RecordBatch) -> None:
    """Raise ArrowInvalid where an offset, an index or a length is wrong. Strings need not be UTF-8: that is an
    error of the row."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:
        for column in batch.columns:
            column.view(as_bytes(column.type)).validate(full=True)


def as_bytes(kind: pa.DataType) -> pa.DataType:
    """The type of the same buffers, with bytes for strings."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([kind.field(n).with_type(as_bytes(kind.field(n).type)) for n in range(kind.num_fields)])
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(as_bytes(kind.value_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(as_bytes(kind.value_type)))
    return kind


def _packed(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


if __name__ == "__main__":
    main()
