"""Records read from a file: documents, pages awaiting extraction, and rejected, dropped
and skipped records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from gristmill.dataprep.licences.statements import LICENCE, STATED_BY
from gristmill.dataprep.readers.charsets import (
    AUTO,
    UTF8,
    Errors,
    UndecodableError,
    decode,
)
from gristmill.dataprep.readers.compression import Openable
from gristmill.dataprep.readers.page_rights import OPT_OUT_KEYS

EXCERPT_CHARACTERS = 200
NUL = "\0"
HTML = "html"
Fields = Mapping[str, Any]
"""A record of a user's file: fields by name, as JSON or Arrow gives them."""
Metadata = Mapping[str, object]
"""Metadata of a document, to be written as JSON."""
EMPTY = "extract/empty"
"""Reason for dropping a page without text, which is common on the web and not an
error.
"""


_METADATA_ENCODER = json.JSONEncoder(
    ensure_ascii=False, sort_keys=True, default=str, allow_nan=False
)
"""Shared encoder: `json.dumps` creates one per record."""


def metadata_json(values: Metadata) -> str:
    """Metadata as a document's JSON string. NaN and infinities, which JSON lacks,
    become strings.
    """
    if not values:
        return "{}"
    try:
        return _METADATA_ENCODER.encode(values)
    except ValueError:
        return _METADATA_ENCODER.encode(_finite(values))


def _finite(value: Any) -> Any:
    """Copy of a value with NaN and infinities as strings, spelled like Python's
    `json`.
    """
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return (
        json.dumps(value)
        if isinstance(value, float) and not math.isfinite(value)
        else value
    )


@dataclass(frozen=True)
class Reading:
    """Settings for reading the records of a source; see the manifest's Source.

    Attributes:
        text, id: keys or columns of the text and the locator.
        metadata: keys to keep; None for all scalar ones.
        encoding: name of a codec, `auto`, or None for the format's default.
        encoding_errors: handling of invalid bytes; see `decode`.
        extract: extractor of HTML, or None for the format's default.
        split: split text files into paragraphs of so many characters; None for no
            split.
        split_parts: split document files into their pages or chapters.
    """

    text: str = "text"
    id: str | None = None
    metadata: Sequence[str] | None = None
    encoding: str | None = None
    extract: str | None = None
    encoding_errors: Errors = "replace"
    split: int | None = None
    split_parts: bool = False

    @cached_property
    def is_nested(self) -> bool:
        """True if a value inside of an object or a list of a record may be kept."""
        return bool(self.metadata) or "." in f"{self.text}{self.id}"


@dataclass(frozen=True)
class Input:
    """A file or a member of an archive; `name` is the prefix of locators, `metadata`
    that of a document that is the whole file, or a part of it.
    """

    name: str
    path: Openable
    compression: str = ""
    metadata: Metadata = field(default_factory=dict)


class Record(NamedTuple):
    """One document; `metadata` is a JSON object, `replaced` the number of U+FFFD put
    for invalid bytes.
    """

    number: int
    locator: str
    text: str
    metadata: str
    replaced: int = 0


@dataclass(frozen=True)
class Page:
    """HTML page or document file whose text is not extracted yet.

    Attributes:
        number: of the record in its file.
        locator: of the extracted document.
        content: stored bytes, in a possibly unknown encoding.
        encoding: name of a codec, or `auto`.
        charset: declared by the server, or empty.
        metadata: available before extraction.
        part: member of an archive, or empty.
        errors: handling of invalid bytes.
        form: HTML, or one of `sources.DOCUMENT_FORMATS`.
    """

    number: int
    locator: str
    content: bytes
    encoding: str = "auto"
    charset: str = ""
    metadata: Metadata = field(default_factory=dict)
    part: str = ""
    errors: Errors = "replace"
    form: str = HTML


@dataclass(frozen=True)
class Rejected:
    """A record that is not a document, with its error.

    Attributes:
        number: of the record in its file.
        error: description.
        excerpt: start of the record.
        part: member of an archive, or empty.
        lost: number of records after it that are lost with it, as its file cannot be
            read further; None if unknown.
    """

    number: int
    error: str
    excerpt: str = ""
    part: str = ""
    lost: int | None = 0


@dataclass(frozen=True)
class Dropped:
    """A page that was read without an error but has no text."""

    number: int
    reason: str
    locator: str
    part: str = ""


@dataclass(frozen=True)
class Skipped:
    """An item in a file that is not a document.

    Attributes:
        reason: its kind: an HTTP request, an image, a directory.
        candidate: True for kinds that may be documents, such as responses but not
            requests; there is a warning if most candidates of a source are skipped.
        crawl: statements of a `warcinfo` record about the crawl of its file.
    """

    reason: str
    candidate: bool = False
    crawl: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """End of a file, or of an archive's member, with its number of records and its
    losses.

    Attributes:
        records: number of records read, including bad ones.
        stored_bytes, read_bytes: its size, and the bytes read before an error.
        part: member of an archive, or empty.
        error: that prevented reading to the end, or empty.
        lost: number of lost records; None if unknown.
    """

    records: int
    stored_bytes: int
    read_bytes: int
    part: str = ""
    error: str = ""
    lost: int | None = 0


Read = Record | Page | Rejected | Dropped | Skipped | Ended
"""Every item that a reader yields."""


class Meter(Protocol):
    """Counter of the bytes read from a file."""

    read_bytes: int


def with_end(
    records: Iterator[Read], stored_bytes: int, meter: Meter | None, part: str = ""
) -> Iterator[Read]:
    """Yield the records of a file or a member, then an Ended.

    Args:
        records: of the file; the ends of its members are passed on.
        stored_bytes: size of the file.
        meter: counter of the bytes read; None if unknown.
        part: the member, or empty for a file.
    """
    number, error = 0, ""
    lost: int | None = 0
    for record in records:
        yield record
        number += isinstance(record, Record | Page | Rejected | Dropped)
        if isinstance(record, Rejected) and record.lost != 0 and record.part == part:
            error = record.error
            lost = None if lost is None or record.lost is None else lost + record.lost
    yield Ended(
        number,
        stored_bytes,
        stored_bytes if meter is None else meter.read_bytes,
        part,
        error,
        lost,
    )


def make_record(
    number: int, locator: str, text: str, metadata: Metadata, replaced: int = 0
) -> Record | Rejected | Dropped:
    """Make a document; an empty text is dropped, one with NULs or lone surrogates is
    quarantined.

    NULs come from another encoding or a binary file.
    """
    if not text:
        return Dropped(number, EMPTY, locator)
    if NUL in text:
        return Rejected(
            number,
            f"the text has {text.count(NUL):,} NUL characters; if it is UTF-16 or "
            "UTF-32 without a byte order mark, name that as `encoding`",
            excerpt(text),
        )
    record = Record(number, locator, text, metadata_json(metadata), replaced)
    for name, value in (("text", text), ("id", locator), ("metadata", record.metadata)):
        if value.isascii():  # O(1)
            continue
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            lone = f"\\u{ord(value[error.start]):04x}"
            return Rejected(
                number,
                f"{name} has a lone surrogate {lone}, which UTF-8 cannot hold",
                excerpt(text),
            )
    return record


def from_row(
    reading: Reading,
    number: int,
    row: Fields,
    locator: str,
    replaced: int = 0,
) -> Record | Page | Rejected | Dropped:
    """Make a document of a table's row or a JSON object; a Page if its text is HTML to
    be extracted.

    Args:
        replaced: number of U+FFFD already put for invalid bytes of the row.
    """

    def rejected(error: str) -> Rejected:
        return Rejected(number, error, excerpt(str(dict(row))))

    text = field_of(row, reading.text, _MISSING)
    if text is _MISSING:
        names = excerpt(", ".join(map(str, row))) or "none"
        return rejected(f"no field {reading.text!r}; the fields are {names}")
    if text is None:
        return Dropped(number, EMPTY, locator)
    if not isinstance(text, str | bytes):
        return rejected(f"field {reading.text!r} must be a string, not {kind(text)}")
    if reading.id is not None:
        key = field_of(row, reading.id)
        if not isinstance(key, str | int) or isinstance(key, bool) or key == "":
            return rejected(
                f"field {reading.id!r} must be a string or an integer, not {kind(key)}"
            )
        locator = str(key)
    metadata = _metadata(row, reading)
    if text and reading.extract not in (None, "none"):
        html = text if isinstance(text, str) else "bytes"
        record = make_record(number, locator, html, metadata)
        if not isinstance(record, Record):
            return record
        encoding = UTF8 if isinstance(text, str) else reading.encoding or AUTO
        return Page(
            number,
            locator,
            text.encode() if isinstance(text, str) else text,
            encoding,
            metadata=metadata,
            errors=reading.encoding_errors,
        )
    if isinstance(text, bytes):
        try:
            decoded = decode(text, reading.encoding, errors=reading.encoding_errors)
        except UndecodableError as error:
            return Rejected(number, str(error), excerpt(text))
        text = decoded.text
        replaced += decoded.replaced
    return make_record(number, locator, text, metadata, replaced)


_MISSING = object()


def field_of(row: Fields, name: str, default: object = None) -> Any:
    """Value of a field; `a.b` is the key `a.b` if there is one, else the key `b` of the
    object `a`.
    """
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    value = row.get(outer) if dot else None
    return field_of(value, inner, default) if isinstance(value, Mapping) else default


def _metadata(row: Fields, reading: Reading) -> Metadata:
    if reading.metadata is not None:
        values = {name: field_of(row, name) for name in reading.metadata}
        return {name: value for name, value in values.items() if value is not None}
    return {
        name: value
        for name, value in row.items()
        if value is not None
        and not isinstance(value, (list, dict))
        and name not in (reading.text, reading.id)
    }


def chosen_metadata(values: Metadata, reading: Reading) -> Metadata:
    """Metadata that the source keeps, without empty values."""
    names: Iterable[str] = values
    if reading.metadata is not None:
        names = (*reading.metadata, LICENCE, STATED_BY, *OPT_OUT_KEYS)
    return {name: values[name] for name in names if values.get(name) not in (None, "")}


def not_utf8(error: UnicodeDecodeError) -> str:
    """Error message for bytes that are not UTF-8."""
    return (
        f"not valid UTF-8: byte 0x{error.object[error.start]:02x} at position "
        f"{error.start}"
    )


def excerpt(content: bytes | str) -> str:
    """Start of a bad record, in valid UTF-8."""
    if isinstance(content, bytes):
        content = content[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace")
    return content[:EXCERPT_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def kind(value: Any) -> str:
    """Name of a JSON value's type for messages."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number"
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), type(value).__name__)
