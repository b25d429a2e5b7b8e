"""Record readers: a file of any format as a stream of records and of what could not be read.

A reader never stops at a bad record and never drops one: each comes out as a `Rejected` in its place, with the
reason. Record numbers count from 1: the line of a JSON-lines file, the row of a table, the record of a WARC, 1 for a
text file or a page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from gristmill.dataprep.files import as_path
from gristmill.dataprep.reading import compression
from gristmill.dataprep.reading.archives import read_tar, read_zip
from gristmill.dataprep.reading.compression import (
    CorruptFileError,
    Metered,
    RecordTooLongError,
    Unended,
    read_lines,
    read_whole,
)
from gristmill.dataprep.reading.csv_rows import read_csv
from gristmill.dataprep.reading.encoding import (
    AUTO,
    KEEP_BAD,
    UTF8,
    UndecodableError,
    decode,
    most_replaced,
    replace_bad,
)
from gristmill.dataprep.reading.pythondocs import python_documents
from gristmill.dataprep.reading.records import (
    Dropped,
    Ended,
    Input,
    Page,
    Read,
    Reading,
    Record,
    Rejected,
    chosen_metadata,
    excerpt,
    from_row,
    kind,
    make_record,
    not_utf8,
    with_end,
)
from gristmill.dataprep.reading.sources import SourceFile, member_format
from gristmill.dataprep.reading.table_guard import TableReader
from gristmill.dataprep.reading.tables import read_table
from gristmill.dataprep.reading.warc import read_warc

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UNEXPECTED_MARK = "Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"
_DECODER = json.JSONDecoder(parse_constant=str)
"""Made once: with `parse_constant`, `json.loads` makes one for every record."""


def read_records(file: SourceFile, reading: Reading) -> Iterator[Read]:
    """The records of a file, as `read_file` gives them, without what it says of files and members that end."""
    return (item for item in read_file(file, reading) if not isinstance(item, Ended))


def read_file(file: SourceFile, reading: Reading, tables: TableReader | None = None) -> Iterator[Read]:
    """Read a file of any format, streaming (one record, or one small batch of rows, is in memory at a time).

    The last thing that comes, and the last of each member of an archive, is an Ended.

    Args:
        file: what to read.
        reading: how.
        tables: the process that reads tables; one of its own if absent.

    Raises:
        OSError: the file cannot be opened or the storage fails; damaged content is a Rejected instead.
    """
    if file.format == "python":
        yield from _read_python(file)
        return
    path = as_path(file.location)
    meter = None if file.format in _AT_ANY_PLACE else Metered(path)
    item = Input(file.name, meter or path, file.compression)
    with TableReader() if tables is None else nullcontext(tables) as reader:
        yield from with_end(_records(file, item, reading, reader), file.size, meter)


def _records(file: SourceFile, item: Input, reading: Reading, tables: TableReader) -> Iterator[Read]:
    if file.format in _TABLES:
        yield from read_table(item, reading, file.format, tables)
        return
    if file.format not in _ARCHIVES:
        yield from _READERS[file.format](item, reading)
        return

    def read_member(member: Input, reading: Reading) -> Iterator[Read] | None:
        extension, packed = compression.split_compression(member.name)
        form = member_format(extension, file.members)
        if form not in _MEMBER_FORMATS:
            return None
        return _READERS[form](Input(member.name, member.path, packed), reading)

    yield from _ARCHIVES[file.format](item, reading, read_member)


def _read_text(item: Input, reading: Reading) -> Iterator[Record | Rejected | Dropped]:
    """The whole file is one document; a byte order mark is not part of it, newlines stay as they are."""
    content = _whole(item)
    if isinstance(content, Rejected):
        yield content
        return
    try:
        decoded = decode(content, reading.encoding, errors=reading.encoding_errors)
    except UndecodableError as error:
        yield Rejected(1, str(error), excerpt(content))
        return
    found = {} if decoded.encoding == UTF8 else {"encoding": decoded.encoding}
    yield make_record(1, item.name, decoded.text, chosen_metadata(found, reading), decoded.replaced)


def _read_html(item: Input, reading: Reading) -> Iterator[Record | Page | Rejected | Dropped]:
    """The whole file is one page."""
    content = _whole(item)
    if isinstance(content, Rejected):
        yield content
        return
    if reading.extract != "none":
        yield Page(1, item.name, content, reading.encoding or AUTO, errors=reading.encoding_errors)
        return
    try:
        decoded = decode(content, reading.encoding or AUTO, html=True, errors=reading.encoding_errors)
    except UndecodableError as error:
        yield Rejected(1, str(error), excerpt(content))
        return
    found = {} if decoded.encoding == UTF8 else {"encoding": decoded.encoding}
    yield make_record(1, item.name, decoded.text, chosen_metadata(found, reading), decoded.replaced)


def _whole(item: Input) -> bytes | Rejected:
    try:
        return read_whole(item.path, item.compression) or Rejected(1, "empty file")
    except (CorruptFileError, RecordTooLongError) as error:
        return Rejected(1, str(error))


def _read_jsonl(item: Input, reading: Reading) -> Iterator[Record | Page | Rejected | Dropped]:
    """One JSON object a line; lines of white space alone are not records."""
    number = 0
    try:
        for number, line in enumerate(read_lines(item.path, item.compression), start=1):
            if isinstance(line, RecordTooLongError):
                yield Rejected(number, str(line))
                continue
            if number == 1 and line.startswith(BYTE_ORDER_MARK):
                line = type(line)(line.removeprefix(BYTE_ORDER_MARK))
            if line and not line.isspace():
                yield _from_line(item, reading, number, line)
    except CorruptFileError as error:
        yield Rejected(number + 1, str(error), lost=None)


def _from_line(item: Input, reading: Reading, number: int, line: bytes) -> Record | Page | Rejected | Dropped:
    try:
        text, replaced = _line_text(line, reading)
        row = parse_json(text)
    except ValueError as error:
        if isinstance(line, Unended):
            return Rejected(number, f"the file is cut off in its last line: {error}", excerpt(line), lost=None)
        return Rejected(number, str(error), excerpt(line))
    if not isinstance(row, dict):
        return Rejected(number, f"a JSON object was expected, not {kind(row)}", excerpt(line))
    return from_row(reading, number, row, f"{item.name}#{number}", replaced)


def _line_text(line: bytes, reading: Reading) -> tuple[str, int]:
    """A line as text, and how many bad sequences became U+FFFD."""
    try:
        return line.decode(UTF8), 0
    except UnicodeDecodeError as error:
        text, replaced = replace_bad(line.decode(UTF8, KEEP_BAD), UTF8)
        if reading.encoding_errors == "strict" or replaced > most_replaced(len(line)):
            raise ValueError(not_utf8(error)) from error
        return text, replaced


def parse_json(line: bytes | str) -> Any:
    """Parse one line of JSON. NaN and Infinity, which JSON does not have but Python writes, become strings.

    Raises:
        ValueError: not UTF-8, not JSON, or nested too deeply; the message is a reason for a person.
    """
    try:
        text = line if isinstance(line, str) else line.decode(UTF8)
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from error
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("not readable JSON: nested too deeply") from error
    except ValueError as error:
        why = UNEXPECTED_MARK if text.startswith("\ufeff") else error
        raise ValueError(f"not valid JSON: {why}") from error


def _read_python(file: SourceFile) -> Iterator[Record | Rejected | Dropped]:
    for number, document in enumerate(python_documents(file.location, file.name), start=1):
        if document.error:
            yield Rejected(number, f"{document.locator}: {document.error}")
        else:
            yield make_record(number, document.locator, document.text, document.metadata)


_READERS: dict[str, Callable[[Input, Reading], Iterator[Read]]] = {
    "text": _read_text, "html": _read_html, "jsonl": _read_jsonl, "csv": read_csv, "warc": read_warc,
}  # fmt: skip
_TABLES = ("parquet", "arrow")
_MEMBER_FORMATS = ("text", "html", "jsonl", "csv", "warc")
"""Formats that are read as a stream, so that they may lie in an archive."""
_AT_ANY_PLACE = ("parquet", "arrow", "zip")
"""Formats that are not read from their begin to their end, so that bytes read say nothing of how far it went."""
_ARCHIVES = {"tar": read_tar, "zip": read_zip}
