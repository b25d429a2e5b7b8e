"""Rows of CSV and TSV files as records. The first row has the column names; quoting
follows RFC 4180.
"""

from __future__ import annotations

import codecs
import csv
import io
from collections.abc import Iterator
from dataclasses import replace

from gristmill.dataprep.readers import compression
from gristmill.dataprep.readers.charsets import (
    AUTO,
    KEEP_BAD,
    UTF8,
    UndecodableError,
    decode,
    marked_codec,
    most_replaced,
    replace_bad,
)
from gristmill.dataprep.readers.compression import (
    DecodedStream,
    RawStream,
    RecordTooLongError,
)
from gristmill.dataprep.readers.records import (
    Input,
    Read,
    Reading,
    Rejected,
    excerpt,
    from_row,
)

_WIDE_CODECS = ("utf-16", "utf-32")
"""Encodings with multi-byte code units, in which reading cannot resume at any byte."""
SNIFFED_BYTES = 1 << 20
"""Start of the file from which `encoding: auto` is detected."""


def read_csv(item: Input, reading: Reading) -> Iterator[Read]:
    """Read one record per row, numbered from 1 without the header; empty lines are
    skipped.

    A row with a wrong number of fields or broken quoting is quarantined alone. A quote
    that never closes consumes the rest of the file, as one record that counts the lost
    ones.
    """
    csv.field_size_limit(compression.MAX_RECORD_BYTES)
    with DecodedStream(item.path, item.compression) as stream:
        start = stream.peek(SNIFFED_BYTES)
        try:
            codec = _codec(start, reading)
        except UndecodableError as error:
            yield Rejected(1, str(error), excerpt(start), lost=None)
            return
        delimiter = "\t" if ".tsv" in item.name.lower() else ","
        header: list[str] | None = None
        number = 0
        try:
            while True:
                lines = _Lines(stream, codec)
                rows = _rows(lines, delimiter)
                if header is None:
                    first = next(rows, [])
                    if isinstance(first, Rejected):
                        yield Rejected(1, f"the header: {first.error}", lost=None)
                        return
                    if len(set(first)) < len(first):
                        yield Rejected(1, "a column is named twice", lost=None)
                        return
                    header = first
                for row in rows:
                    if lines.unended and stream.error is not None:
                        break  # damage truncated this row
                    number += 1
                    yield _record(
                        item, reading, number, header, row, lines.unended, codec
                    )
                if stream.error is None:
                    return
                number += 1
                lost = stream.error.lost(number - 1)
                yield Rejected(number, str(stream.error), lost=lost)
                if codec.startswith(_WIDE_CODECS) or not stream.resume():
                    return
                stream.skip_line()
        except RecordTooLongError as error:
            yield Rejected(number + 1, str(error), lost=None)
        except UnicodeDecodeError as error:
            yield Rejected(
                number + 1,
                f"not valid {codec}: byte 0x{error.object[error.start]:02x}",
                lost=None,
            )
        except UnicodeError as error:  # UTF-16 or UTF-32 without a byte order mark
            yield Rejected(
                number + 1,
                f"not valid {codec}: {error}; name its byte order, such as {codec}-le",
                lost=None,
            )


class _Lines:
    """Lines of a file with their ends; undecodable bytes become lone surrogates, which
    `_record` rejects.

    Attributes:
        number: of lines passed to the parser.
        unended: the last line has no line end, as in a truncated file.
    """

    def __init__(self, stream: DecodedStream, codec: str) -> None:
        self.number = 0
        self.unended = False
        self._stream = stream
        self._encoding = codec

    def __iter__(self) -> Iterator[str]:
        source = io.BufferedReader(RawStream(self._stream), compression.READ_BYTES)
        text = io.TextIOWrapper(source, self._encoding, KEEP_BAD, newline="\n")
        most = compression.MAX_RECORD_BYTES
        while line := text.readline(most + 1):
            if len(line) > most:
                raise RecordTooLongError(f"a line is longer than {most >> 20} MiB")
            # lines that end in carriage return alone arrive as one without an end
            is_complete = line.endswith("\n")
            for part in [line] if is_complete else io.StringIO(line, newline=""):
                self.number += 1
                self.unended = not part.endswith(("\n", "\r"))
                yield part


def _codec(start: bytes, reading: Reading) -> str:
    if reading.encoding in (None, AUTO) and (marked := marked_codec(start)) is not None:
        # codecs that strip the mark
        return "utf-8-sig" if marked == UTF8 else marked[: len("utf-16")]
    if reading.encoding != AUTO:
        return (
            "utf-8-sig"
            if reading.encoding in (None, UTF8)
            else codecs.lookup(reading.encoding).name
        )
    # complete lines, so complete characters
    sample = start[: start.rfind(b"\n") + 1] or start
    return decode(sample, AUTO, errors=reading.encoding_errors).encoding


def _rows(lines: _Lines, delimiter: str) -> Iterator[list[str] | Rejected]:
    """Yield rows, or errors without a number; after an error a new parser continues at the next
    line.
    """
    line_iterator = iter(lines)
    while True:
        before = lines.number
        try:
            for row in csv.reader(line_iterator, delimiter=delimiter, strict=True):
                before = lines.number
                if row:
                    yield row
            return
        except csv.Error as error:
            broken = str(error)
        consumed = lines.number - before - 1
        if broken == "unexpected end of data":
            problem = "a quoted field is not closed before the file ends"
            yield Rejected(0, problem, lost=None if lines.unended else consumed)
        else:
            yield Rejected(0, f"not valid CSV: {broken}", lost=consumed)


def _record(
    item: Input,
    reading: Reading,
    number: int,
    header: list[str],
    row: list[str] | Rejected,
    is_unended: bool,
    codec: str,
) -> Read:
    if isinstance(row, Rejected):
        return replace(row, number=number)
    if len(row) != len(header):
        return Rejected(
            number,
            f"the row has {len(row)} fields, the header {len(header)}",
            excerpt(", ".join(row)),
            lost=None if is_unended and len(row) < len(header) else 0,
        )
    decoded_fields = [replace_bad(value, codec) for value in row]
    replaced = sum(bad for _, bad in decoded_fields)
    allowed = (
        most_replaced(sum(map(len, row))) if reading.encoding_errors == "replace" else 0
    )
    if replaced > allowed:
        damaged = next(
            char for value in row for char in value if "\udc00" <= char <= "\udcff"
        )
        name = "UTF-8" if reading.encoding in (None, AUTO) else reading.encoding
        return Rejected(
            number,
            f"not valid {name}: byte 0x{ord(damaged) - 0xDC00:02x}",
            excerpt(", ".join(row)),
        )
    fields = dict(zip(header, (value for value, _ in decoded_fields), strict=True))
    return from_row(reading, number, fields, f"{item.name}#{number}", replaced)
