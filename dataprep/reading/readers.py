"""Record readers: a file of any format as a stream of records and rejected records.

A reader never stops at a bad record and never drops one: each becomes a `Rejected` in
its place, with the reason. Record numbers start at 1: the line of a JSON-lines file,
the row of a table, the record of a WARC, 1 for a text file or a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

from gristmill.core.files import as_path
from gristmill.dataprep.reading import compression
from gristmill.dataprep.reading.archives import read_tar, read_zip
from gristmill.dataprep.reading.binary_formats import format_of_content, how_to_read
from gristmill.dataprep.reading.charsets import AUTO, UTF8, UndecodableError, decode
from gristmill.dataprep.reading.compression import (
    CorruptFileError,
    Metered,
    RecordTooLongError,
    read_whole,
)
from gristmill.dataprep.reading.csv_rows import read_csv
from gristmill.dataprep.reading.json_lines import read_jsonl
from gristmill.dataprep.reading.pythondocs import python_documents
from gristmill.dataprep.reading.records import (
    Dropped,
    Ended,
    Input,
    Page,
    Read,
    Reading,
    Record,
    Records,
    Rejected,
    chosen_metadata,
    excerpt,
    make_record,
    with_end,
)
from gristmill.dataprep.reading.sources import SourceFile, member_format
from gristmill.dataprep.reading.table_guard import TableReader
from gristmill.dataprep.reading.tables import read_table
from gristmill.dataprep.reading.warc import read_warc
from gristmill.dataprep.text.chapters import chapters, heading_of, paragraph_runs


def read_records(file: SourceFile, reading: Reading) -> Iterator[Read]:
    """Records of a file, one by one, without the end markers of `read_file`."""
    return (
        item
        for item in one_by_one(read_file(file, reading))
        if not isinstance(item, Ended)
    )


def one_by_one(items: Iterable[Read]) -> Iterator[Read]:
    """Items of a reader with the documents of columns one by one."""
    for item in items:
        if isinstance(item, Records):
            yield from item
        else:
            yield item


def read_file(
    file: SourceFile,
    reading: Reading,
    tables: TableReader | None = None,
    meter: Metered | None = None,
) -> Iterator[Read]:
    """Read a file of any format as a stream, with one record or one small batch in
    memory.

    A file, and each member of an archive, ends with an Ended.

    Args:
        file: input of a source.
        reading: settings.
        tables: process that reads tables; a new one if None.
        meter: counter of stored bytes of a file that is read sequentially; a new one if
            None.

    Raises:
        OSError: the file cannot be opened or the storage fails; damaged content is a
            Rejected.
    """
    if file.format == "python":
        yield from _read_python(file)
        return
    path = as_path(file.location)
    meter = None if file.format in _RANDOM_ACCESS else meter or Metered(path)
    item = Input(file.name, meter or path, file.compression)
    with TableReader() if tables is None else nullcontext(tables) as reader:
        yield from with_end(_records(file, item, reading, reader), file.size, meter)


def _records(
    file: SourceFile, item: Input, reading: Reading, tables: TableReader
) -> Iterator[Read]:
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
    """Read a file as one document, or as several if it is split; drops a byte order
    mark and keeps newlines.
    """
    content = _whole(item)
    if isinstance(content, Rejected):
        yield content
        return
    try:
        decoded = decode(content, reading.encoding, errors=reading.encoding_errors)
    except UndecodableError as error:
        yield Rejected(1, str(error), excerpt(content))
        return
    metadata = {} if decoded.encoding == UTF8 else {"encoding": decoded.encoding}
    if reading.split is None:
        yield make_record(
            1,
            item.name,
            decoded.text,
            chosen_metadata(metadata, reading),
            decoded.replaced,
        )
        return
    parts = (
        chapters(decoded.text)
        if reading.split == "chapters"
        else paragraph_runs(decoded.text, reading.split)
    )
    for number, part in enumerate(parts, start=1):
        heading = heading_of(part) if reading.split == "chapters" else None
        replaced = part.count("\N{REPLACEMENT CHARACTER}") if decoded.replaced else 0
        yield make_record(
            number,
            f"{item.name}#{number}",
            part,
            chosen_metadata(metadata | {"heading": heading}, reading),
            replaced,
        )


def _read_html(
    item: Input, reading: Reading
) -> Iterator[Record | Page | Rejected | Dropped]:
    """Read a file as one page."""
    content = _whole(item)
    if isinstance(content, Rejected):
        yield content
        return
    if reading.extract != "none":
        yield Page(
            1,
            item.name,
            content,
            reading.encoding or AUTO,
            errors=reading.encoding_errors,
        )
        return
    try:
        decoded = decode(
            content, reading.encoding or AUTO, html=True, errors=reading.encoding_errors
        )
    except UndecodableError as error:
        yield Rejected(1, str(error), excerpt(content))
        return
    metadata = {} if decoded.encoding == UTF8 else {"encoding": decoded.encoding}
    yield make_record(
        1, item.name, decoded.text, chosen_metadata(metadata, reading), decoded.replaced
    )


def _whole(item: Input) -> bytes | Rejected:
    try:
        content = read_whole(item.path, item.compression)
    except (CorruptFileError, RecordTooLongError) as error:
        return Rejected(1, str(error))
    if not content:
        return Rejected(1, "empty file")
    if binary := format_of_content(content):
        return Rejected(1, how_to_read(binary))
    return content


def _read_python(file: SourceFile) -> Iterator[Record | Rejected | Dropped]:
    for number, document in enumerate(
        python_documents(file.location, file.name), start=1
    ):
        if document.error:
            yield Rejected(number, f"{document.locator}: {document.error}")
        else:
            yield make_record(
                number, document.locator, document.text, document.metadata
            )


_READERS: dict[str, Callable[[Input, Reading], Iterator[Read]]] = {
    "text": _read_text,
    "html": _read_html,
    "jsonl": read_jsonl,
    "csv": read_csv,
    "warc": read_warc,
}
_TABLES = ("parquet", "arrow")
_MEMBER_FORMATS = ("text", "html", "jsonl", "csv", "warc")
"""Formats read sequentially, which are supported in archives."""
_RANDOM_ACCESS = ("parquet", "arrow", "zip")
"""Formats read in random order, so that the bytes read do not tell the progress."""
_ARCHIVES = {"tar": read_tar, "zip": read_zip}
