"""WARC, WET and ARC files: the web pages of a crawl (ISO 28500; ARC is what came before). HTTP is read by fastwarc.

WHATWG MIME Sniffing Standard, 7.1 "Identifying a resource with an unknown MIME type" (https://mimesniff.spec.whatwg.org).
Two things differ, since what is looked for is pages: a byte order mark before a tag is passed over, and XML whose
root is `html` is XHTML.

Documents are the responses with a 2xx status whose type is HTML or plain text, and conversion records (the text that
Common Crawl's WET files hold). A response that declares no type is looked at as browsers do. Requests, metadata,
redirects, errors and pictures are not documents; they come out as Skipped.

Crawlers wrote what they liked: header lines that end in LF alone (ClueWeb), and bodies that they had unpacked already
beneath headers which still say gzip or chunked. Both are read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from gristmill.dataprep.reading import compression
from gristmill.dataprep.reading.archive_records import ARC, WARC, Gap, Stored, split_records
from gristmill.dataprep.reading.compression import DecodedStream
from gristmill.dataprep.reading.encoding import AUTO, UTF8, Decoded, UndecodableError, decode
from gristmill.dataprep.reading.records import (
    EMPTY,
    Dropped,
    Input,
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
"""How much of a body is looked at (5.2, "resource header")."""
_HTML = re.compile(
    rb"[\t\n\x0c\r ]*<(?:!doctype html|html|head|script|iframe|h1|div|font|table|a|style|title|b|body|br|p|!--)[ >]",
    re.IGNORECASE,
)
_XML = re.compile(rb"[\t\n\x0c\r ]*<\?xml")
_XHTML_ROOT = re.compile(rb"<(?:!doctype\s+)?html[\s>]", re.IGNORECASE)
_TEXT_MARKS = (b"\xfe\xff", b"\xff\xfe", b"\xef\xbb\xbf")
_PRINTED = {b"%PDF-": "application/pdf", b"%!PS-Adobe-": "application/postscript"}
"""Types that begin with letters; all others of the standard's tables have bytes that no text has."""
_BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")
"""The standard's "binary data bytes" (3)."""


def sniff_type(content: bytes) -> str:
    """The media type of a body, one of text/html, application/xhtml+xml, text/xml, text/plain and some that are not."""
    begin = content[:HEADER_BYTES]
    marked = begin.removeprefix(b"\xef\xbb\xbf")
    if _HTML.match(marked):
        return "text/html"
    if _XML.match(marked):
        return "application/xhtml+xml" if _XHTML_ROOT.search(marked) else "text/xml"
    printed = next((name for mark, name in _PRINTED.items() if begin.startswith(mark)), None)
    if printed is not None:
        return printed
    return "text/plain" if begin.startswith(_TEXT_MARKS) or is_text(begin) else "application/octet-stream"


def is_text(content: bytes) -> bool:
    """Whether the first bytes hold none that only binary data has."""
    return _BINARY.search(content[:HEADER_BYTES]) is None


HTML_TYPES = ("text/html", "application/xhtml+xml")
PLAIN_TYPE = "text/plain"
TOO_LONG = "the record is longer than {} MiB"
_KINDS = ("warcinfo", "response", "resource", "request", "metadata", "revisit", "conversion", "continuation")
"""Types of records (ISO 28500, 5.5)."""
_TYPE = re.compile(rb"\nwarc-type[ \t]*:[ \t]*([a-z]+)[ \t]*\r?\n")
_CONTINUED = re.compile(r"\r?\n[ \t]+")
_ARC_ABOUT = re.compile(r"(.*) ([0-9a-fA-F.:]{3,45}) (\d{14}) .*")
"""URL, address and date of a record: the URL may hold blanks, and so may the type."""
ARC_FIELDS = 5
"""Fields of the line about a record in version 1: URL, IP address, date, type, length."""
_ARC_BEGIN = b"filedesc://"
_ARC_DATE = re.compile(r"\A(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)\Z")
UNKNOWN_TYPES = ("", "unknown/unknown", "application/unknown", "*/*")
"""Declared types that say nothing, absent and malformed ones among them (WHATWG MIME Sniffing Standard, 7)."""
MAX_HTTP_HEADER_BYTES = 1 << 20
_EMPTY_LINE = b"\r\n\r\n"
_HEADER_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\r?\n")
_PACKINGS = ("transfer-encoding", "content-encoding")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}[ \t]*(;[^\r\n]*)?\r?\n")
_MEDIA_TYPE = re.compile(r"[a-z0-9!#$&^_.+-]{1,60}/[a-z0-9!#$&^_.+-]{1,60}")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.+-]+)", re.IGNORECASE)


class _BrokenError(ValueError):
    """A page that cannot be read, though the records behind it can."""


def read_warc(item: Input, reading: Reading) -> Iterator[Read]:
    """The pages of a WARC, WET or ARC file; records are numbered from 1, of whatever type they are.

    Damage costs the records that it touches: one Rejected for what lies between two sound records.
    """
    with DecodedStream(item.path, item.compression) as stream:
        is_arc = stream.peek(len(_ARC_BEGIN)) == _ARC_BEGIN
        read = _ArcReader(item, reading) if is_arc else _WarcReader(item, reading)
        for number, record in enumerate(split_records(stream, ARC if is_arc else WARC), start=1):
            if isinstance(record, Gap):
                yield Rejected(number, record.error, excerpt(record.begin), lost=record.lost)
            else:
                yield read.record(number, record)


class _Header:
    """The header of a record: names in any case -> values.

    Continued lines are one value (RFC 822, 3.1.1), as the format allows.
    """

    def __init__(self, values: dict[str, str]) -> None:
        self._values = values

    @classmethod
    def parse(cls, header: bytes) -> _Header:
        """The header of a WARC record."""
        text = header.decode("utf-8", "replace")
        if "\n " in text or "\n\t" in text:
            text = _CONTINUED.sub(" ", text)
        pairs = (line.partition(":") for line in text.split("\n")[1:])
        return cls({name.strip().lower(): value.strip() for name, colon, value in pairs if colon})

    def get(self, name: str, default: str = "") -> str:
        """A value, or the default."""
        return self._values.get(name.lower(), default)


@dataclass(frozen=True)
class _Record:
    """What is known of a record besides its content."""

    headers: _Header
    is_http: bool
    record_id: str = ""


@dataclass
class _WarcReader:
    """Reads the records of a WARC file."""

    item: Input
    reading: Reading

    def record(self, number: int, stored: Stored) -> Read:
        """What becomes of a record."""
        found = _TYPE.search(stored.header.lower())
        kind = found[1].decode("ascii") if found else ""
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
    """Reads the records of an ARC file: one line about each record, its length last, then its content.

    The first record describes the file; its second line names the fields, 5 in version 1 and 10 in version 2
    (https://archive.org/web/researcher/ArcFileFormat.php).
    """

    item: Input
    reading: Reading
    fields: int = ARC_FIELDS

    def record(self, number: int, stored: Stored) -> Read:
        """What becomes of a record."""
        if stored.header.startswith(_ARC_BEGIN):
            names = (stored.block or b"").splitlines()[1:2]
            self.fields = max(len(names[0].split()) if names else 0, ARC_FIELDS)
            return Skipped("description of an ARC file")
        if stored.block is None:
            return Rejected(number, TOO_LONG.format(compression.MAX_RECORD_BYTES >> 20))
        about = stored.header.decode("latin-1").strip()
        named = _ARC_ABOUT.fullmatch(about)
        fields = list(named.groups()) if named else about.rsplit(" ", self.fields - 1)
        if len(fields) < ARC_FIELDS and named is None:
            return Rejected(number, f"the line about the record has {len(fields)} fields", excerpt(about))
        headers = _Header({"warc-target-uri": fields[0], "warc-date": _ARC_DATE.sub(r"\1-\2-\3T\4:\5:\6Z", fields[2])})
        is_http = fields[0].lower().startswith(("http://", "https://"))
        return _page(self.item, self.reading, number, _Record(headers, is_http), stored.block)


def _page(item: Input, reading: Reading, number: int, record: _Record, block: bytes) -> Read:
    try:
        return _response(item, reading, number, record, block)
    except (_BrokenError, UndecodableError) as error:
        return Rejected(number, str(error), excerpt(block))


def _conversion(item: Input, reading: Reading, number: int, record: _Record, block: bytes) -> Read:
    try:
        decoded = decode(block, UTF8, errors=reading.encoding_errors)
    except UndecodableError as error:
        return Rejected(number, str(error), excerpt(block))
    about = {
        **_about(record),
        "content_type": _media_type(record.headers.get("Content-Type", "")),
        "language": record.headers.get("WARC-Identified-Content-Language", ""),
    }
    return _text_of(number, _locator(item, number, record), decoded, about, reading)


def _text_of(
    number: int, locator: str, decoded: Decoded, about: Mapping[str, Any], reading: Reading
) -> Record | Rejected | Dropped:
    if not decoded.text.strip():
        return Dropped(number, EMPTY, locator)
    return make_record(number, locator, decoded.text, chosen_metadata(about, reading), decoded.replaced)


def _response(item: Input, reading: Reading, number: int, record: _Record, block: bytes) -> Read:
    if not record.is_http:
        return Skipped("response of another protocol than HTTP", candidate=True)
    block = _with_crlf(block)
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
    packings = [name for name in _PACKINGS if name in http.http_headers]
    content = _payload(block, packings) if packings else block[body:]
    if media_type in UNKNOWN_TYPES:
        media_type = sniff_type(content)
        if media_type not in (*HTML_TYPES, PLAIN_TYPE):
            return Skipped(f"content type {media_type}, by its first bytes", candidate=True)
    found = _CHARSET.search(declared)
    charset = found.group(1).lower() if found else ""
    about = {**_about(record), "content_type": media_type}
    encoding, locator = reading.encoding or AUTO, _locator(item, number, record)
    if media_type == PLAIN_TYPE or reading.extract == "none":
        decoded = decode(content, encoding, charset, media_type != PLAIN_TYPE, reading.encoding_errors)
        if decoded.encoding != UTF8:
            about["encoding"] = decoded.encoding
        return _text_of(number, locator, decoded, {**about, "charset": charset}, reading)
    return Page(number, locator, content, encoding, charset, about, errors=reading.encoding_errors)


def _with_crlf(block: bytes) -> bytes:
    """The response with header lines that end in CRLF, as fastwarc needs them."""
    empty = block.find(_EMPTY_LINE, 0, MAX_HTTP_HEADER_BYTES)
    if empty >= 0 and block.count(b"\n", 0, empty) == block.count(b"\r\n", 0, empty):
        return block
    end = _HEADER_END.search(block, 0, MAX_HTTP_HEADER_BYTES)
    if end is None:
        return block
    head = block[: end.start()]
    return _LINE_END.sub(b"\r\n", head) + b"\r\n\r\n" + block[end.end() :]


def _without(block: bytes, dropped: Collection[str]) -> bytes:
    """The response without some of its header lines."""
    head, end, body = block.partition(b"\r\n\r\n")
    kept = [
        line for line in head.split(b"\r\n") if line.partition(b":")[0].strip().lower().decode("latin-1") not in dropped
    ]
    return b"\r\n".join(kept) + end + body


def _parse_http(block: bytes, auto_decode: Literal["none", "all"]) -> Any:
    """The block as a record of its own: where fastwarc cannot parse it, the file's iteration must continue."""
    from fastwarc.warc import WarcRecord

    headers = (
        f"WARC/1.1\r\nWARC-Type: response\r\nContent-Type: application/http; msgtype=response\r\n"
        f"Content-Length: {len(block)}\r\n\r\n"
    )
    alone = WarcRecord.from_bytes(headers.encode("ascii") + block + b"\r\n\r\n")
    alone.parse_http(auto_decode=auto_decode, max_header_len=MAX_HTTP_HEADER_BYTES)
    return alone


def _payload(block: bytes, packings: Collection[str]) -> bytes:
    """The body, unpacked as its headers say; where that fails and it was unpacked already, as it is.

    Args:
        packings: the _PACKINGS that its headers have.

    Raises:
        _BrokenError: it can be unpacked in no way that gives text, or is too long.
    """
    failed: _BrokenError | None = None
    for number in range(len(packings) + 1):
        for dropped in combinations(packings, number):
            try:
                content = _unpacked(_without(block, dropped) if dropped else block)
            except OSError as error:
                failed = failed or _BrokenError(f"the body of the HTTP response cannot be decoded: {error}")
                continue
            in_chunks = "transfer-encoding" in dropped and _CHUNK_SIZE.match(content)
            if not dropped or (is_text(content) and not in_chunks):
                return content
    assert failed is not None
    raise failed


def _unpacked(block: bytes) -> bytes:
    content: bytes = _parse_http(block, "all").reader.read(compression.MAX_RECORD_BYTES + 1)
    if len(content) > compression.MAX_RECORD_BYTES:
        raise _BrokenError(f"the page is longer than {compression.MAX_RECORD_BYTES >> 20} MiB")
    return content


def _about(record: _Record) -> dict[str, Any]:
    return {
        "url": _url(record),
        "date": record.headers.get("WARC-Date", ""),
        "truncated": record.headers.get("WARC-Truncated", ""),
    }


def _url(record: _Record) -> str:
    return (
        record.headers.get("WARC-Target-URI").strip().removeprefix("<").removesuffix(">")
    )  # wget puts it in angle brackets


def _locator(item: Input, number: int, record: Any) -> str:
    """The URL and the record's id: crawls hold an address more than once, and a document's locator is unique."""
    identity = (record.record_id or "").strip("<>").removeprefix("urn:uuid:")
    return f"{_url(record)}#{identity or f'{item.name}#{number}'}"


def _media_type(declared: str) -> str:
    found = declared.partition(";")[0].strip().lower()
    return found if _MEDIA_TYPE.fullmatch(found) else ""
