"""Record readers: a file of any format as a stream of records and rejected records.

A reader never stops at a bad record and never drops one: each becomes a `Rejected` in
its place, with the reason. Record numbers start at 1: the line of a JSON-lines file,
the row of a table, the record of a WARC, 1 for a text file or a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial

from gristmill.core.files import as_path
from gristmill.dataprep.readers import compression
from gristmill.dataprep.readers.archives import (
    ReadArchive,
    member_licences,
    read_tar,
    read_zip,
)
from gristmill.dataprep.readers.binary_formats import format_of_content, how_to_read
from gristmill.dataprep.readers.charsets import AUTO, UTF8, UndecodableError, decode
from gristmill.dataprep.readers.compression import (
    CorruptFileError,
    Metered,
    RecordTooLongError,
    read_whole,
)
from gristmill.dataprep.readers.csv_rows import read_csv
from gristmill.dataprep.readers.jsonl import read_jsonl
from gristmill.dataprep.readers.page_rights import page_rights
from gristmill.dataprep.readers.parquet import TableReader, read_table
from gristmill.dataprep.readers.pythondocs import python_documents
from gristmill.dataprep.readers.records import (
    HTML,
    Ended,
    Input,
    Page,
    Read,
    Reading,
    Rejected,
    chosen_metadata,
    excerpt,
    make_record,
    with_end,
)
from gristmill.dataprep.readers.sources import (
    DOCUMENT_FORMATS,
    FORMAT_OF,
    FORMATS,
    SourceFile,
)
from gristmill.dataprep.readers.warc import read_warc
from gristmill.dataprep.text.paragraph_runs import paragraph_runs


def read_records(file: SourceFile, reading: Reading) -> Iterator[Read]:
    """Records of a file, without the end markers of `read_file`."""
    return (item for item in read_file(file, reading) if not isinstance(item, Ended))


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
        documents = python_documents(file.location, file.name)
        for number, (locator, text, metadata) in enumerate(documents, start=1):
            yield make_record(number, locator, text, metadata)
        return
    path = as_path(file.location)
    meter = None if file.format in _RANDOM_ACCESS else meter or Metered(path)
    item = Input(file.name, meter or path, file.compression, file.metadata)

    with TableReader() if tables is None else nullcontext(tables) as reader:
        if file.format in _ARCHIVES:
            records = _read_archive(file, item, reading)
        elif file.format in _READERS:
            records = _READERS[file.format](item, reading)
        else:
            records = read_table(item, reading, file.format, reader)
        yield from with_end(records, file.size, meter)


def _read_archive(file: SourceFile, item: Input, reading: Reading) -> Iterator[Read]:
    """Read the members of an archive by the rules of a folder."""
    read_archive = _ARCHIVES[file.format]
    unmetered = replace(item, path=as_path(file.location))
    licences = cache(partial(member_licences, unmetered, read_archive))

    def read_member(member: Input) -> Iterator[Read] | None:
        extension, packed = compression.split_compression(member.name)
        form = FORMAT_OF.get(extension)
        if file.members != "auto":
            # a member without an extension has the source's format
            is_read = (
                file.members == "text"
                or not extension
                or extension in FORMATS.get(file.members, ())
            )
            form = file.members if is_read else None
        if form is None or form not in _READERS:
            return None
        folder = member.name.rpartition("/")[0]
        statement = licences().of(folder) if form == "text" else None
        metadata = {} if statement is None else statement.metadata()
        member = replace(member, compression=packed, metadata=metadata)
        return _READERS[form](member, reading)

    return read_archive(item, read_member)


def _read_document(item: Input, reading: Reading, form: str) -> Iterator[Read]:
    """Read a file as one page or document file, or as the documents of a text, several
    if it is split; drops a byte order mark and keeps newlines.
    """
    try:
        content = read_whole(item.path, item.compression)
    except (CorruptFileError, RecordTooLongError) as error:
        yield Rejected(1, str(error))
        return
    if form in DOCUMENT_FORMATS and content:
        yield Page(1, item.name, content, form=form)
        return
    binary = format_of_content(content)
    if binary or not content:
        yield Rejected(1, how_to_read(binary) if binary else "empty file")
        return
    html = form == HTML
    encoding = reading.encoding or (AUTO if html else None)
    errors = reading.encoding_errors
    if html and reading.extract != "none":
        yield Page(1, item.name, content, encoding or AUTO, errors=errors)
        return
    try:
        decoded = decode(content, encoding, html=html, errors=errors)
    except UndecodableError as error:
        yield Rejected(1, str(error), excerpt(content))
        return
    metadata = {**item.metadata}
    if decoded.encoding != UTF8:
        metadata["encoding"] = decoded.encoding
    text = decoded.text
    if html:
        metadata |= page_rights(text)
    if html or reading.split is None:
        chosen = chosen_metadata(metadata, reading)
        yield make_record(1, item.name, text, chosen, decoded.replaced)
        return
    for number, part in enumerate(paragraph_runs(text, reading.split), start=1):
        yield make_record(
            number,
            f"{item.name}#{number}",
            part,
            chosen_metadata(metadata, reading),
            part.count("\N{REPLACEMENT CHARACTER}") if decoded.replaced else 0,
        )


_READERS: dict[str, Callable[[Input, Reading], Iterator[Read]]] = {
    **{
        form: partial(_read_document, form=form)
        for form in ("text", HTML, *DOCUMENT_FORMATS)
    },
    "jsonl": read_jsonl,
    "csv": read_csv,
    "warc": read_warc,
}
"""Formats read sequentially, which are supported in archives."""
_RANDOM_ACCESS = ("parquet", "arrow", "zip")
"""Formats read in random order, so that the bytes read do not tell the progress."""
_ARCHIVES: dict[str, ReadArchive] = {"tar": read_tar, "zip": read_zip}
