"""What comes out of a file: documents, pages that are to become one, and what is none, each with its reason."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from gristmill.dataprep.reading.compression import Openable
from gristmill.dataprep.reading.encoding import AUTO, UTF8, Decoded, Errors, UndecodableError, decode

EXCERPT_CHARACTERS = 200
NUL = "\0"
EMPTY = "extract/empty"
"""Reason for which a page without text is dropped: on the web they are common, and no mistake of anybody's."""


_METADATA_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=str, allow_nan=False)
"""Made once: `json.dumps` makes one for every record."""


def metadata_json(values: Mapping[str, Any]) -> str:
    """Metadata as the JSON string that a document carries. NaN and infinities, which JSON lacks, become strings."""
    if not values:
        return "{}"
    try:
        return _METADATA_ENCODER.encode(values)
    except ValueError:
        return _METADATA_ENCODER.encode(_finite(values))


def _finite(value: Any) -> Any:
    """A value with strings, as Python's `json` spells them, for the numbers that JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Reading:
    """How the records of a source are read; see the manifest's Source.

    Attributes:
        text, id: key or column of the text and of the locator.
        metadata: keys that are kept; None for all scalar ones.
        encoding: a codec's name, `auto`, or None for the format's own way.
        encoding_errors: what becomes of bad bytes; see `decode`.
        extract: extractor of HTML, or None for the format's own way.
        split: how text files are cut: into `chapters`, into paragraphs of so many characters, or not at all.
        by_kernel: whether JSON lines are read by a kernel, which gives what Python does; compiling it takes longer than
            reading a sample.
    """

    text: str = "text"
    id: str | None = None
    metadata: Sequence[str] | None = None
    encoding: str | None = None
    extract: str | None = None
    encoding_errors: Errors = "replace"
    split: Literal["chapters"] | int | None = None
    by_kernel: bool = True


@dataclass(frozen=True)
class Input:
    """A file or a member of an archive; `name` is what locators begin with."""

    name: str
    path: Openable
    compression: str = ""


class Record(NamedTuple):
    """One document as it was read; `metadata` is a JSON object, `replaced` the number of U+FFFD put for bad bytes."""

    number: int
    locator: str
    text: str
    metadata: str
    replaced: int = 0


@dataclass(frozen=True)
class Records:
    """Documents of a file that were read together, as columns; what Record has of each, and nothing was replaced.

    Attributes:
        numbers: int64 of shape (n,), ascending.
        locators: n strings.
        texts: n large strings, none of them empty.
        metadata: n strings.
    """

    numbers: np.ndarray
    locators: pa.Array
    texts: pa.Array
    metadata: pa.Array

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Record]:
        columns = (
            self.numbers.tolist(),
            *(column.to_pylist() for column in (self.locators, self.texts, self.metadata)),
        )
        return (Record(*row) for row in zip(*columns, strict=True))

    def part(self, begin: int, end: int) -> Records:
        """Some of them, without a copy."""
        return Records(
            self.numbers[begin:end],
            *(column.slice(begin, end - begin) for column in (self.locators, self.texts, self.metadata)),
        )


@dataclass(frozen=True)
class Page:
    """HTML whose text is still to be extracted.

    Attributes:
        number: of the record in its file.
        locator: of the document that comes out.
        content: as stored, in an encoding that may be unknown.
        encoding: a codec's name, or `auto`.
        charset: what the server declared, or empty.
        metadata: what is known before the page is read.
        part: member of an archive, or empty.
        errors: what becomes of bad bytes.
    """

    number: int
    locator: str
    content: bytes
    encoding: str = "auto"
    charset: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""
    errors: Errors = "replace"


@dataclass(frozen=True)
class Rejected:
    """One record that is not a document, and why.

    Attributes:
        number: of the record in its file.
        error: why.
        excerpt: its beginning.
        part: member of an archive, or empty.
        lost: records behind it that are lost with it, since its file cannot be read on; None where it is not known how
            many.
    """

    number: int
    error: str
    excerpt: str = ""
    part: str = ""
    lost: int | None = 0


@dataclass(frozen=True)
class Dropped:
    """A page that was read without an error but has no text to keep."""

    number: int
    reason: str
    locator: str
    part: str = ""


@dataclass(frozen=True)
class Skipped:
    """Something in a file that is not meant as a document.

    Attributes:
        reason: what it is: an HTTP request, an image, a directory.
        candidate: whether it is of a kind that documents come from, as a response is and a request is not; a source
            of which most candidates are skipped is warned of.
    """

    reason: str
    candidate: bool = False


@dataclass(frozen=True)
class Ended:
    """The end of a file, or of one member of an archive: what came out of it, and whether that is all.

    Attributes:
        records: that were read of it, bad ones among them.
        stored_bytes, read_bytes: its size, and how much of that was read before it could not be read on.
        part: member of an archive, or empty.
        error: why it could not be read to its end, or empty.
        lost: records that it lost, None where the number is unknown.
    """

    records: int
    stored_bytes: int
    read_bytes: int
    part: str = ""
    error: str = ""
    lost: int | None = 0


Read = Record | Records | Page | Rejected | Dropped | Skipped | Ended
"""Everything that a reader yields."""


class Meter(Protocol):
    """What knows how much of a file was read."""

    read_bytes: int


def with_end(records: Iterator[Read], stored_bytes: int, meter: Meter | None, part: str = "") -> Iterator[Read]:
    """What a file or a member gives, and behind it an Ended.

    Args:
        records: of the file; what its members say of their own ends passes.
        stored_bytes: its size.
        meter: counts what was read of it; None where that is not known.
        part: the member, or empty for a file.
    """
    number, error = 0, ""
    lost: int | None = 0
    for record in records:
        yield record
        number += len(record) if isinstance(record, Records) else isinstance(record, Record | Page | Rejected | Dropped)
        if isinstance(record, Rejected) and record.lost != 0 and record.part == part:
            error, lost = record.error, None if None in (lost, record.lost) else (lost or 0) + (record.lost or 0)
    yield Ended(number, stored_bytes, stored_bytes if meter is None else meter.read_bytes, part, error, lost)


def make_record(
    number: int, locator: str, text: str, metadata: Mapping[str, Any], replaced: int = 0
) -> Record | Rejected | Dropped:
    """A document, or why it cannot be one: it is dropped without text, quarantined with NULs or what UTF-8 cannot hold.

    No text has NULs: they are another encoding's, or those of a binary file.
    """
    if not text:
        return Dropped(number, EMPTY, locator)
    if NUL in text:
        return Rejected(
            number,
            f"the text has {text.count(NUL):,} NUL characters; if it is UTF-16 or UTF-32 without a byte order mark, "
            "name that as `encoding`",
            excerpt(text),
        )
    record = Record(number, locator, text, metadata_json(metadata), replaced)
    if text.isascii() and locator.isascii() and record.metadata.isascii():  # strings know it without a look
        return record
    for what, value in (("text", text), ("id", locator), ("metadata", record.metadata)):
        if (lone := _lone_surrogate(value)) is not None:
            return Rejected(number, f"{what} has a lone surrogate {lone}, which UTF-8 cannot hold", excerpt(text))
    return record


def from_row(
    reading: Reading, number: int, row: Mapping[str, Any], locator: str, replaced: int = 0
) -> Record | Page | Rejected | Dropped:
    """A document of a table's row or a JSON object; a Page where its text is HTML that is to be extracted.

    Args:
        replaced: how many bad sequences of the row have become U+FFFD already.
    """
    text = field_of(row, reading.text)
    if text is None and not has_field(row, reading.text):
        return Rejected(number, f"no field {reading.text!r}; the fields are {_names(row)}", excerpt(str(dict(row))))
    if text is None:
        return Dropped(number, EMPTY, locator)
    if not isinstance(text, str | bytes):
        return Rejected(number, f"field {reading.text!r} must be a string, not {kind(text)}", excerpt(str(dict(row))))
    if reading.id is not None:
        key = field_of(row, reading.id)
        if not isinstance(key, str | int) or isinstance(key, bool) or key == "":
            return Rejected(
                number, f"field {reading.id!r} must be a string or an integer, not {kind(key)}", excerpt(str(dict(row)))
            )
        locator = str(key)
    metadata = _metadata(row, reading)
    if text and reading.extract not in (None, "none"):
        return _page(number, locator, text, metadata, reading)
    try:
        decoded = (
            Decoded(text, UTF8)
            if isinstance(text, str)
            else (decode(text, reading.encoding, errors=reading.encoding_errors))
        )
    except UndecodableError as error:
        return Rejected(number, str(error), excerpt(text))
    return make_record(number, locator, decoded.text, metadata, decoded.replaced + replaced)


def _page(
    number: int, locator: str, html: str | bytes, metadata: Mapping[str, Any], reading: Reading
) -> Page | Rejected | Dropped:
    made = make_record(number, locator, html if isinstance(html, str) else "bytes", metadata)
    if not isinstance(made, Record):
        return made
    if isinstance(html, str):
        return Page(number, locator, html.encode("utf-8"), UTF8, metadata=metadata)
    return Page(number, locator, html, reading.encoding or AUTO, metadata=metadata, errors=reading.encoding_errors)


def has_field(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a field, be it null."""
    if name in row:
        return True
    outer, dot, inner = name.partition(".")
    return bool(dot) and isinstance(row.get(outer), Mapping) and has_field(row[outer], inner)


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """A field's value or None; `a.b` is the key of that name where there is one, else the key `b` inside of `a`."""
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    return field_of(row[outer], inner) if dot and isinstance(row.get(outer), Mapping) else None


def _metadata(row: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    if reading.metadata is not None:
        values = {name: field_of(row, name) for name in reading.metadata}
        return {name: value for name, value in values.items() if value is not None}
    scalars = {name: value for name, value in row.items() if value is not None and not isinstance(value, (list, dict))}
    scalars.pop(reading.text, None)
    if reading.id is not None:
        scalars.pop(reading.id, None)
    return scalars


def chosen_metadata(values: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """Of what a reader or an extractor found out, what the source keeps; empty values are left out."""
    wanted = values if reading.metadata is None else reading.metadata
    return {name: values[name] for name in wanted if values.get(name) not in (None, "")}


def _lone_surrogate(value: str) -> str | None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(value[error.start]):04x}"
    return None


def not_utf8(error: UnicodeDecodeError) -> str:
    """Why bytes are no UTF-8, for a person."""
    return f"not valid UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"


def excerpt(content: bytes | str) -> str:
    """The beginning of a bad record, in a form that any file can hold."""
    text = content[: 4 * EXCERPT_CHARACTERS].decode("utf-8", "replace") if isinstance(content, bytes) else content
    return text[:EXCERPT_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def kind(value: Any) -> str:
    """What a JSON value is, for a person."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _names(row: Mapping[str, Any]) -> str:
    return excerpt(", ".join(map(str, row))) or "none"


def one_line(error: BaseException) -> str:
    """An error's message without its line breaks."""
    return " ".join(str(error).split())
