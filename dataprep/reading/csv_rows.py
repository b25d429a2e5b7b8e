"""Rows of CSV and TSV files as records. The first row names the columns; quoting is that of RFC 4180."""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from typing import Any

from gristmill.dataprep.reading import compression
from gristmill.dataprep.reading.compression import DecodedStream
from gristmill.dataprep.reading.encoding import AUTO, UTF8, UndecodableError, decode, marked_codec
from gristmill.dataprep.reading.records import Input, Page, Reading, Record, Rejected, excerpt, from_row

SNIFFED_BYTES = 1 << 20
"""Beginning of the file from which `encoding: auto` decides."""


def read_csv(item: Input, reading: Reading) -> Iterator[Record | Page | Rejected]:
    """One row is one record, numbered from 1 without the header; empty lines are none.

    A row whose fields do not match the header in number, or whose quoting is broken, is quarantined alone; a quote that
    never closes takes the rest of the file with it, as one record.
    """
    csv.field_size_limit(compression.MAX_RECORD_BYTES)
    with DecodedStream(item.path, item.compression) as stream:
        start = stream.read(SNIFFED_BYTES)
        try:
            codec = _codec(start, reading.encoding)
        except UndecodableError as error:
            yield Rejected(1, str(error), excerpt(start))
            return
        rows = _rows(_lines(start, stream, codec), "\t" if ".tsv" in item.name.lower() else ",")
        number = 0
        try:
            header = next(rows, [])
            if isinstance(header, str) or len(set(header)) < len(header):
                yield Rejected(1, f"the header: {header}" if isinstance(header, str) else "a column is named twice")
                return
            for number, row in enumerate(rows, start=1):
                yield _record(item, reading, number, header, row)
        except UnicodeDecodeError as error:
            yield Rejected(number + 1, f"not valid {codec}: byte 0x{error.object[error.start]:02x}")
        if stream.error is not None:
            yield Rejected(number + 1, str(stream.error))


def _codec(start: bytes, encoding: str | None) -> str:
    if encoding != AUTO:
        return "utf-8-sig" if encoding in (None, UTF8) else str(encoding)
    if (marked := marked_codec(start)) is not None:
        return "utf-8-sig" if marked == UTF8 else marked[: len("utf-16")]  # codecs that take the mark off
    return decode(start[: start.rfind(b"\n") + 1] or start, AUTO).encoding  # whole lines, so whole characters


def _lines(start: bytes, stream: DecodedStream, codec: str) -> Iterator[str]:
    """The file's lines with their ends; what does not decode becomes lone surrogates, which `_record` refuses."""
    decoder = codecs.getincrementaldecoder(codec)(errors="surrogateescape")
    rest, chunk = "", start
    while chunk:
        *whole, rest = _split(rest + decoder.decode(chunk))
        yield from whole
        chunk = stream.read(compression.READ_BYTES)
    yield from io.StringIO(rest + decoder.decode(b"", final=True), newline="")


def _split(text: str) -> list[str]:
    r"""Lines with their `\n`; the last is what comes behind the last `\n`."""
    parts = text.split("\n")
    return [*(part + "\n" for part in parts[:-1]), parts[-1]]


def _rows(lines: Iterator[str], delimiter: str) -> Iterator[list[str] | str]:
    """The rows, or what is wrong with one; a new parser goes on behind it, at the next line."""
    while True:
        parser = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            yield from (row for row in parser if row)
            return
        except csv.Error as error:
            broken = str(error)
        yield "a quoted field is not closed before the file ends" if broken == "unexpected end of data" else (
            f"not valid CSV: {broken}"
        )


def _record(
    item: Input, reading: Reading, number: int, header: list[str], row: list[str] | str
) -> Record | Page | Rejected:
    if isinstance(row, str):
        return Rejected(number, row)
    shown = excerpt(", ".join(row))
    if len(row) != len(header):
        return Rejected(number, f"the row has {len(row)} fields, the header {len(header)}", shown)
    damaged = next((char for value in row for char in value if "\udc80" <= char <= "\udcff"), None)
    if damaged is not None:
        codec = "UTF-8" if reading.encoding in (None, AUTO) else reading.encoding
        return Rejected(number, f"not valid {codec}: byte 0x{ord(damaged) - 0xDC00:02x}", shown)
    fields: dict[str, Any] = dict(zip(header, row, strict=True))
    return from_row(reading, number, fields, f"{item.name}#{number}")
