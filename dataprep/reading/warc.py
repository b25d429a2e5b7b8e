"""Web pages of WARC, WET and ARC files (ISO 28500, and its predecessor ARC), with HTTP
parsed by fastwarc.

Types are sniffed as in the WHATWG MIME Sniffing Standard, 7.1 "Identifying a resource
with an unknown MIME type" (https://mimesniff.spec.whatwg.org), with two differences,
since pages are wanted: a byte order mark before a tag is skipped, and XML whose root is
`html` is XHTML.

Documents are responses with a 2xx status and a type of HTML or plain text, and
conversion records (the text in Common Crawl's WET files). The type of a response
without a declaration is sniffed like in browsers. Requests, metadata, redirects, errors
and images are not documents; they become Skipped.

Deviations of crawlers are supported: header lines that end in LF alone (ClueWeb), and
bodies that were decoded before they were stored, under headers that still declare gzip
or chunked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from gristmill.dataprep.reading import compression
from gristmill.dataprep.reading.archive_records import (
    ARC,
    WARC,
    Gap,
    Stored,
    split_records,
)
from gristmill.dataprep.reading.charsets import (
    AUTO,
    UTF8,
    Decoded,
    UndecodableError,
    decode,
)
from gristmill.dataprep.reading.compression import DecodedStream
from gristmill.dataprep.reading.records import (
    EMPTY,
    Dropped,
    Input,
    Metadata,
    Page,
    Read,
    Reading,
    Record,
    Rejected,
    Skipped,
    chosen_metadata,
    excerpt,
    make_record,
)

HEADER_BYTES = 1445
"""Bytes of a body that are sniffed (5.2, "resource header")."""
_HTML = re.compile(
    rb"[\t\n\x0c\r ]*<(?:!doctype html|html|head|script|iframe|h1|div|font|table|a|style|title|b|body|br|p|!--)[ >]",
    re.IGNORECASE,
)
_XML = re.compile(rb"[\t\n\x0c\r ]*<\?xml")
_XHTML_ROOT = re.compile(rb"<(?:!doctype\s+)?html[\s>]", re.IGNORECASE)
_TEXT_MARKS = (b"\xfe\xff", b"\xff\xfe", b"\xef\xbb\xbf")
_PRINTED = {b"%PDF-": "application/pdf", b"%!PS-Adobe-": "application/postscript"}
"""Types that start with letters; all others of the standard's tables have bytes that
text lacks.
"""
_BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
"""The standard's "binary data bytes" (3)."""


def sniff_type(content: bytes) -> str:
    """Sniff the media type of a body: text/html, application/xhtml+xml, text/xml,
    text/plain or a non-text type.
    """
    begin = content[:HEADER_BYTES]
    body = begin.removeprefix(b"\xef\xbb\xbf")
    if _HTML.match(body):
        return "text/html"
    if _XML.match(body):
        return "application/xhtml+xml" if _XHTML_ROOT.search(body) else "text/xml"
    letter_type = next(
        (name for mark, name in _PRINTED.items() if begin.startswith(mark)), None
    )
    if letter_type is not None:
        return letter_type
    return (
        "text/plain"
        if begin.startswith(_TEXT_MARKS) or is_text(begin)
        else "application/octet-stream"
    )


def is_text(content: bytes) -> bool:
    """True if the first bytes have no binary data bytes."""
    return _BINARY.search(content[:HEADER_BYTES]) is None


HTML_TYPES = ("text/html", "application/xhtml+xml")
PLAIN_TYPE = "text/plain"
TOO_LONG = "the record is longer than {} MiB"
_KINDS = (
    "warcinfo",
    "response",
    "resource",
    "request",
    "metadata",
    "revisit",
    "conversion",
    "continuation",
)
"""Types of records (ISO 28500, 5.5)."""
_TYPE = re.compile(rb"\nwarc-type[ \t]*:[ \t]*([a-z]+)[ \t]*\r?\n")
_CONTINUED = re.compile(r"\r?\n[ \t]+")
_ARC_ABOUT = re.compile(r"(.*) ([0-9a-fA-F.:]{3,45}) (\d{14}) .*")
"""URL, address and date of a record: the URL may contain spaces, and so may the
type.
"""
ARC_FIELDS = 5
"""Fields of a record's line in version 1: URL, IP address, date, type, length."""
_ARC_BEGIN = b"filedesc://"
_ARC_DATE = re.compile(r"\A(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)\Z")
UNKNOWN_TYPES = ("", "unknown/unknown", "application/unknown", "*/*")
"""Declared types without information; absent and malformed ones are empty (WHATWG MIME
Sniffing Standard, 7).
"""
MAX_HTTP_HEADER_BYTES = 1 << 20
_EMPTY_LINE = b"\r\n\r\n"
_HEADER_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\r?\n")
_BODY_ENCODINGS = ("transfer-encoding", "content-encoding")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}[ \t]*(;[^\r\n]*)?\r?\n")
_MEDIA_TYPE = re.compile(r"[a-z0-9!#$&^_.+-]{1,60}/[a-z0-9!#$&^_.+-]{1,60}")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.+-]+)", re.IGNORECASE)


class _BrokenError(ValueError):
    """A page that cannot be read, in a file that can be read further."""


def read_warc(item: Input, reading: Reading) -> Iterator[Read]:
    """Read the pages of a WARC, WET or ARC file; records of all types are numbered from
    1.

    Damage only affects the records that it touches: one Rejected for the gap between
    two valid records.
    """
    with DecodedStream(item.path, item.compression) as stream:
        is_arc = stream.peek(len(_ARC_BEGIN)) == _ARC_BEGIN
        reader = _ArcReader(item, reading) if is_arc else _WarcReader(item, reading)
        for number, record in enumerate(
            split_records(stream, ARC if is_arc else WARC), start=1
        ):
            if isinstance(record, Gap):
                yield Rejected(
                    number, record.error, excerpt(record.begin), lost=record.lost
                )
            else:
                yield reader.record(number, record)


class _Header:
    """Header of a record: case-insensitive names -> values.

    Continuation lines are joined (RFC 822, 3.1.1), as the format allows.
    """

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values

    @classmethod
    def parse(cls, header: bytes) -> _Header:
        """Parse the header of a WARC record."""
        text = header.decode("utf-8", "replace")
        if "\n " in text or "\n\t" in text:
            text = _CONTINUED.sub(" ", text)
        pairs = (line.partition(":") for line in text.split("\n")[1:])
        return cls(
            {
                name.strip().lower(): value.strip()
                for name, colon, value in pairs
                if colon
            }
        )

    def get(self, name: str, default: str = "") -> str:
        """Value of a field, or the default."""
        return self._values.get(name.lower(), default)


@dataclass(frozen=True)
class _Record:
    """Metadata of a record."""

    headers: _Header
    is_http: bool
    record_id: str = ""


@dataclass
class _WarcReader:
    """Reader of the records of a WARC file."""

    item: Input
    reading: Reading

    def record(self, number: int, stored: Stored) -> Read:
        """Convert a record."""
        type_match = _TYPE.search(stored.header.lower())
        kind = type_match[1].decode("ascii") if type_match else ""
        if kind not in ("response", "conversion"):
            return Skipped(f"{kind if kind in _KINDS else 'unknown'} record")
        if stored.block is None:
            return Rejected(number, TOO_LONG.format(compression.MAX_RECORD_BYTES >> 20))
        headers = _Header.parse(stored.header)
        is_http = headers.get("Content-Type").startswith("application/http")
        record = _Record(headers, is_http, headers.get("WARC-Record-ID"))
        if kind == "conversion":
            return _conversion(self.item, self.reading, number, record, stored.block)
        return _page(self.item, self.reading, number, record, stored.block)


@dataclass
class _ArcReader:
    """Reader of the records of an ARC file: a line about each record that ends with its
    length, then its content.

    The first record describes the file; its second line names the fields, 5 in version
    1 and 10 in version 2 (https://archive.org/web/researcher/ArcFileFormat.php).
    """

    item: Input
    reading: Reading
    fields: int = ARC_FIELDS

    def record(self, number: int, stored: Stored) -> Read:
        """Convert a record."""
        if stored.header.startswith(_ARC_BEGIN):
            names = (stored.block or b"").splitlines()[1:2]
            self.fields = max(len(names[0].split()) if names else 0, ARC_FIELDS)
            return Skipped("description of an ARC file")
        if stored.block is None:
            return Rejected(number, TOO_LONG.format(compression.MAX_RECORD_BYTES >> 20))
        record_line = stored.header.decode("latin-1").strip()
        line_match = _ARC_ABOUT.fullmatch(record_line)
        fields = (
            list(line_match.groups())
            if line_match
            else record_line.rsplit(" ", self.fields - 1)
        )
        if len(fields) < ARC_FIELDS and line_match is None:
            return Rejected(
                number,
                f"the line about the record has {len(fields)} fields",
                excerpt(record_line),
            )
        headers = _Header(
            {
                "warc-target-uri": fields[0],
                "warc-date": _ARC_DATE.sub(r"\1-\2-\3T\4:\5:\6Z", fields[2]),
            }
        )
        is_http = fields[0].lower().startswith(("http://", "https://"))
        return _page(
            self.item, self.reading, number, _Record(headers, is_http), stored.block
        )


def _page(
    item: Input, reading: Reading, number: int, record: _Record, block: bytes
) -> Read:
    try:
        return _response(item, reading, number, record, block)
    except (_BrokenError, UndecodableError) as error:
        return Rejected(number, str(error), excerpt(block))


def _conversion(
    item: Input, reading: Reading, number: int, record: _Record, block: bytes
) -> Read:
    try:
        decoded = decode(block, UTF8, errors=reading.encoding_errors)
    except UndecodableError as error:
        return Rejected(number, str(error), excerpt(block))
    metadata = {
        **_about(record),
        "content_type": _media_type(record.headers.get("Content-Type", "")),
        "language": record.headers.get("WARC-Identified-Content-Language", ""),
    }
    return _text_of(number, _locator(item, number, record), decoded, metadata, reading)


def _text_of(
    number: int,
    locator: str,
    decoded: Decoded,
    metadata: Metadata,
    reading: Reading,
) -> Record | Rejected | Dropped:
    if not decoded.text.strip():
        return Dropped(number, EMPTY, locator)
    return make_record(
        number,
        locator,
        decoded.text,
        chosen_metadata(metadata, reading),
        decoded.replaced,
    )


def _response(
    item: Input, reading: Reading, number: int, record: _Record, block: bytes
) -> Read:
    if not record.is_http:
        return Skipped("response of another protocol than HTTP", candidate=True)
    block = _normalize_line_ends(block)
    end = block.find(_EMPTY_LINE)
    body = end + len(_EMPTY_LINE) if end >= 0 else len(block)
    try:
        http = _parse_http(block[:body], "none")
    except OSError as error:
        raise _BrokenError(f"the HTTP response cannot be read: {error}") from error
    status = None if http.http_headers is None else http.http_headers.status_code
    if status is None:
        raise _BrokenError("the HTTP response has no status")
    if not 200 <= status < 300:
        return Skipped(f"HTTP status {status}", candidate=True)
    declared = http.http_headers.get("Content-Type", "") or ""
    media_type = _media_type(declared)
    if media_type not in (*HTML_TYPES, PLAIN_TYPE, *UNKNOWN_TYPES):
        return Skipped(f"content type {media_type}", candidate=True)
    packings = [name for name in _BODY_ENCODINGS if name in http.http_headers]
    content = _payload(block, packings) if packings else block[body:]
    if media_type in UNKNOWN_TYPES:
        media_type = sniff_type(content)
        if media_type not in (*HTML_TYPES, PLAIN_TYPE):
            return Skipped(
                f"content type {media_type}, by its first bytes", candidate=True
            )
    charset_match = _CHARSET.search(declared)
    charset = charset_match.group(1).lower() if charset_match else ""
    metadata = {**_about(record), "content_type": media_type}
    encoding = reading.encoding or AUTO
    locator = _locator(item, number, record)
    if media_type == PLAIN_TYPE or reading.extract == "none":
        decoded = decode(
            content,
            encoding,
            charset,
            media_type != PLAIN_TYPE,
            reading.encoding_errors,
        )
        if decoded.encoding != UTF8:
            metadata["encoding"] = decoded.encoding
        return _text_of(
            number, locator, decoded, {**metadata, "charset": charset}, reading
        )
    return Page(
        number,
        locator,
        content,
        encoding,
        charset,
        metadata,
        errors=reading.encoding_errors,
    )


def _normalize_line_ends(block: bytes) -> bytes:
    """Response with header lines that end in CRLF, as fastwarc requires."""
    empty = block.find(_EMPTY_LINE, 0, MAX_HTTP_HEADER_BYTES)
    if empty >= 0 and block.count(b"\n", 0, empty) == block.count(b"\r\n", 0, empty):
        return block
    end = _HEADER_END.search(block, 0, MAX_HTTP_HEADER_BYTES)
    if end is None:
        return block
    head = block[: end.start()]
    return _LINE_END.sub(b"\r\n", head) + b"\r\n\r\n" + block[end.end() :]


def _without(block: bytes, dropped: Collection[str]) -> bytes:
    """Response without some of its header lines."""
    head, end, body = block.partition(b"\r\n\r\n")
    kept = [
        line
        for line in head.split(b"\r\n")
        if line.partition(b":")[0].strip().lower().decode("latin-1") not in dropped
    ]
    return b"\r\n".join(kept) + end + body


def _parse_http(block: bytes, auto_decode: Literal["none", "all"]) -> Any:
    """Parse the block as a separate record, so that an error of fastwarc does not end
    the file's iteration.
    """
    from fastwarc.warc import WarcRecord

    headers = (
        "WARC/1.1\r\nWARC-Type: response\r\nContent-Type: application/http; "
        "msgtype=response\r\n"
        f"Content-Length: {len(block)}\r\n\r\n"
    )
    record = WarcRecord.from_bytes(headers.encode("ascii") + block + b"\r\n\r\n")
    record.parse_http(auto_decode=auto_decode, max_header_len=MAX_HTTP_HEADER_BYTES)
    return record


def _payload(block: bytes, packings: Collection[str]) -> bytes:
    """Decoded body; the stored body if decoding fails and it is already decoded.

    Args:
        packings: encodings of _BODY_ENCODINGS in its headers.

    Raises:
        _BrokenError: the body cannot be decoded to text, or is too long.
    """
    first_error: _BrokenError | None = None
    for number in range(len(packings) + 1):
        for dropped in combinations(packings, number):
            try:
                content = _unpacked(_without(block, dropped) if dropped else block)
            except OSError as error:
                first_error = first_error or _BrokenError(
                    f"the body of the HTTP response cannot be decoded: {error}"
                )
                continue
            in_chunks = "transfer-encoding" in dropped and _CHUNK_SIZE.match(content)
            if not dropped or (is_text(content) and not in_chunks):
                return content
    assert first_error is not None
    raise first_error


def _unpacked(block: bytes) -> bytes:
    content: bytes = _parse_http(block, "all").reader.read(
        compression.MAX_RECORD_BYTES + 1
    )
    if len(content) > compression.MAX_RECORD_BYTES:
        raise _BrokenError(
            f"the page is longer than {compression.MAX_RECORD_BYTES >> 20} MiB"
        )
    return content


def _about(record: _Record) -> dict[str, str]:
    return {
        "url": _url(record),
        "date": record.headers.get("WARC-Date", ""),
        "truncated": record.headers.get("WARC-Truncated", ""),
    }


def _url(record: _Record) -> str:
    # wget adds angle brackets
    return (
        record.headers.get("WARC-Target-URI")
        .strip()
        .removeprefix("<")
        .removesuffix(">")
    )


def _locator(item: Input, number: int, record: Any) -> str:
    """URL with the record's id: crawls have a URL more than once, and a document's
    locator is unique.
    """
    identity = (record.record_id or "").strip("<>").removeprefix("urn:uuid:")
    return f"{_url(record)}#{identity or f'{item.name}#{number}'}"


def _media_type(declared: str) -> str:
    media_type = declared.partition(";")[0].strip().lower()
    return media_type if _MEDIA_TYPE.fullmatch(media_type) else ""
