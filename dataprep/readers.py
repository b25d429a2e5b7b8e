"""Record readers: plain text, JSON lines and Parquet, as a stream of records and of what could not be read.

A reader never stops at a bad record and never drops one: each comes out as a `Rejected` in its place, with the
reason. Record numbers count from 1: the line of a JSON-lines file, the row of a Parquet file, 1 for a text file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.dataprep.compression import CorruptFileError, RecordTooLongError, read_lines, read_whole
from gristmill.dataprep.documents import metadata_json, open_parquet
from gristmill.dataprep.files import as_path
from gristmill.dataprep.pythondocs import python_documents
from gristmill.dataprep.sources import SourceFile

EXCERPT_CHARACTERS = 200
PARQUET_BATCH_ROWS = 256
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Fields:
    """Which keys or columns of a record are what; see the manifest's Source."""

    text: str = "text"
    id: str | None = None
    metadata: Sequence[str] | None = None


@dataclass(frozen=True)
class Record:
    """One document as it was read; `metadata` is a JSON object."""

    number: int
    locator: str
    text: str
    metadata: str


@dataclass(frozen=True)
class Rejected:
    """One record that is no document, and why."""

    number: int
    error: str
    excerpt: str = ""


def read_records(file: SourceFile, fields: Fields) -> Iterator[Record | Rejected]:
    """Read a file of any format, streaming (one record, or one small Parquet batch, is in memory at a time).

    Raises:
        OSError: the file cannot be opened or the storage fails; damaged content is a Rejected instead.
    """
    return _READERS[file.format](file, fields)


def _read_text(file: SourceFile, fields: Fields) -> Iterator[Record | Rejected]:
    """The whole file is one document; a byte order mark is not part of it, newlines stay as they are."""
    try:
        content = read_whole(as_path(file.location), file.compression)
    except (CorruptFileError, RecordTooLongError) as error:
        yield Rejected(1, str(error))
        return
    if not content:
        yield Rejected(1, "empty file")
        return
    try:
        text = content.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        yield Rejected(1, _not_utf8(error), _excerpt(content))
        return
    yield _document(1, file.name, text, {})


def _read_jsonl(file: SourceFile, fields: Fields) -> Iterator[Record | Rejected]:
    """One JSON object a line; lines of white space alone are no records."""
    number = 0
    try:
        for number, line in enumerate(read_lines(as_path(file.location), file.compression), start=1):
            if isinstance(line, RecordTooLongError):
                yield Rejected(number, str(line))
                continue
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line and not line.isspace():
                yield _from_line(file, fields, number, line)
    except CorruptFileError as error:
        yield Rejected(number + 1, str(error))


def _from_line(file: SourceFile, fields: Fields, number: int, line: bytes) -> Record | Rejected:
    try:
        row = parse_json(line)
    except ValueError as error:
        return Rejected(number, str(error), _excerpt(line))
    if not isinstance(row, dict):
        return Rejected(number, f"a JSON object was expected, not {_kind(row)}", _excerpt(line))
    return _from_row(file, fields, number, row, f"{file.name}#{number}")


def parse_json(line: bytes) -> Any:
    """Parse one line of JSON. NaN and Infinity, which JSON does not have but Python writes, become strings.

    Raises:
        ValueError: not UTF-8, not JSON, or nested too deeply; the message is a reason for a person.
    """
    try:
        return json.loads(line.decode("utf-8"), parse_constant=str)
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from error
    except RecursionError as error:
        raise ValueError("not readable JSON: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error


def _read_parquet(file: SourceFile, fields: Fields) -> Iterator[Record | Rejected]:
    """One row is one document; a damaged file gives its rows up to the damage."""
    import pyarrow as pa

    number = 0
    try:
        for number, row in enumerate(_parquet_rows(as_path(file.location), fields), start=1):
            if isinstance(row, str):
                yield Rejected(number, row)
            else:
                yield _from_row(file, fields, number, row, f"{file.name}#{number}")
    except (pa.ArrowException, CorruptFileError) as error:
        yield Rejected(number + 1, f"the Parquet file is damaged: {_one_line(error)}")
    except OSError as error:
        if error.errno is not None:  # the storage failed; without an errno it is Arrow that cannot decode
            raise
        yield Rejected(number + 1, f"the Parquet file is damaged: {_one_line(error)}")


def _parquet_rows(path: Path, fields: Fields) -> Iterator[dict[str, Any] | str]:
    with open_parquet(path) as table:
        columns = _parquet_columns(table.schema_arrow, fields)
        for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=columns, use_threads=False):
            try:
                yield from batch.to_pylist()
            except UnicodeDecodeError:
                yield from (_parquet_row(batch, row) for row in range(len(batch)))


def _parquet_columns(schema: Any, fields: Fields) -> list[str]:
    import pyarrow as pa

    if fields.metadata is not None:
        wanted = {fields.text, fields.id, *fields.metadata}
        return [name for name in schema.names if name in wanted]
    no_metadata = (pa.types.is_nested, pa.types.is_binary, pa.types.is_large_binary)
    return [
        column.name for column in schema
        if column.name in (fields.text, fields.id) or not any(is_kind(column.type) for is_kind in no_metadata)
    ]  # fmt: skip


def _parquet_row(batch: Any, row: int) -> dict[str, Any] | str:
    try:
        return batch.slice(row, 1).to_pylist()[0]
    except UnicodeDecodeError as error:
        return _not_utf8(error)


def _read_python(file: SourceFile, fields: Fields) -> Iterator[Record | Rejected]:
    for number, document in enumerate(python_documents(file.location, file.name), start=1):
        if document.error:
            yield Rejected(number, f"{document.locator}: {document.error}")
        else:
            yield _document(number, document.locator, document.text, document.metadata)


_READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "python": _read_python}


def _from_row(
    file: SourceFile, fields: Fields, number: int, row: Mapping[str, Any], locator: str
) -> Record | Rejected:
    if fields.text not in row:
        return Rejected(number, f"no field {fields.text!r}; the fields are {_names(row)}", _excerpt(str(dict(row))))
    text = row[fields.text]
    if not isinstance(text, str):
        return Rejected(number, f"field {fields.text!r} must be a string, not {_kind(text)}", _excerpt(str(dict(row))))
    if fields.id is not None:
        key = row.get(fields.id)
        if not isinstance(key, str | int) or isinstance(key, bool) or key == "":
            return Rejected(number, f"field {fields.id!r} must be a string or an integer, not {_kind(key)}",
                            _excerpt(str(dict(row))))  # fmt: skip
        locator = str(key)
    return _document(number, locator, text, _metadata(row, fields))


def _document(number: int, locator: str, text: str, metadata: Mapping[str, Any]) -> Record | Rejected:
    if not text:
        return Rejected(number, "empty text")
    record = Record(number, locator, text, metadata_json(metadata))
    for what, value in (("text", record.text), ("id", record.locator), ("metadata", record.metadata)):
        if (lone := _lone_surrogate(value)) is not None:
            return Rejected(number, f"{what} has a lone surrogate {lone}, which UTF-8 cannot hold", _excerpt(text))
    return record


def _metadata(row: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    if fields.metadata is not None:
        return {name: row[name] for name in fields.metadata if row.get(name) is not None}
    return {
        name: value for name, value in row.items()
        if name not in (fields.text, fields.id) and value is not None and not isinstance(value, list | dict)
    }  # fmt: skip


def _lone_surrogate(value: str) -> str | None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(value[error.start]):04x}"
    return None


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not valid UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"


def _excerpt(content: bytes | str) -> str:
    """The beginning of a bad record, in a form that any file can hold."""
    text = content[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace") if isinstance(content, bytes) else content
    return text[:EXCERPT_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _names(row: Mapping[str, Any]) -> str:
    return _excerpt(", ".join(map(str, row))) or "none"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
