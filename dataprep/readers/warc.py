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
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from gristmill.dataprep.readers import compression
from gristmill.dataprep.readers.archive_records import (
    ARC,
    WARC,
    Stored,
    split_records,
)
from gristmill.dataprep.readers.charsets import AUTO, UTF8, UndecodableError, decode
from gristmill.dataprep.readers.compression import DecodedStream
from gristmill.dataprep.readers.page_rights import header_opt_outs, page_rights
from gristmill.dataprep.readers.records import (
    EMPTY,
    Dropped,
    Input,
    Page,
    Read,
    Reading,
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
    for mark, name in _PRINTED.items():
        if begin.startswith(mark):
            return name
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
CRAWL_FIELDS = (
    "ispartof",
    "publisher",
    "software",
    "http-header-user-agent",
    "robots",
)
"""Fields of a `warcinfo` record in lower case (ISO 28500, 6.2; not `operator`, which
often is a person).
"""
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
            yield (
                replace(record, number=number)
                if isinstance(record, Rejected)
                else reader.record(number, record)
            )


Headers = Mapping[str, str]
"""Header of a record, by lower-case names; `warc-type` in lower case."""


@dataclass
class _WarcReader:
    """Reader of the records of a WARC file."""

    item: Input
    reading: Reading

    def record(self, number: int, stored: Stored) -> Read:
        """Convert a record."""
        headers = self.describe(number, stored)
        if not isinstance(headers, dict):
            return headers
        if stored.block is None:
            most = compression.MAX_RECORD_BYTES >> 20
            return Rejected(number, f"the record is longer than {most} MiB")
        try:
            return self._convert(number, headers, stored.block)
        except (_BrokenError, UndecodableError) as error:
            return Rejected(number, str(error), excerpt(stored.block))

    def describe(self, number: int, stored: Stored) -> dict[str, str] | Read:
        """Read the header of a record; its continuation lines are joined (RFC 822,
        3.1.1), as the format allows.
        """
        type_match = _TYPE.search(stored.header.lower())
        kind = type_match[1].decode("ascii") if type_match else ""
        if kind == "warcinfo":
            return Skipped("warcinfo record", crawl=_crawl(stored.block or b""))
        if kind not in ("response", "conversion"):
            return Skipped(f"{kind if kind in _KINDS else 'unknown'} record")
        text = stored.header.decode("utf-8", "replace")
        if "\n " in text or "\n\t" in text:
            text = _CONTINUED.sub(" ", text)
        pairs = (line.partition(":") for line in text.split("\n")[1:])
        headers = {
            name.strip().lower(): value.strip() for name, colon, value in pairs if colon
        }
        return {**headers, "warc-type": kind}

    def _convert(self, number: int, headers: Headers, block: bytes) -> Read:
        # wget adds angle brackets
        url = headers.get("warc-target-uri", "").removeprefix("<").removesuffix(">")
        identity = headers.get("warc-record-id", "").strip("<>")
        identity = identity.removeprefix("urn:uuid:") or f"{self.item.name}#{number}"
        # crawls have a URL more than once, and a document's locator is unique
        locator = f"{url}#{identity}"
        metadata = {
            "url": url,
            "date": headers.get("warc-date", ""),
            "truncated": headers.get("warc-truncated", ""),
        }
        content_type = headers.get("content-type", "")
        if headers.get("warc-type") == "conversion":
            metadata["content_type"] = _media_type(content_type)
            metadata["language"] = headers.get("warc-identified-content-language", "")
            return self._text(number, locator, block, metadata, UTF8)
        if not content_type.startswith("application/http"):
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
        metadata["content_type"] = media_type
        metadata |= header_opt_outs(http.http_headers.items())
        encoding = self.reading.encoding or AUTO
        if media_type == PLAIN_TYPE or self.reading.extract == "none":
            metadata["charset"] = charset
            html = media_type != PLAIN_TYPE
            return self._text(number, locator, content, metadata, encoding, html)
        errors = self.reading.encoding_errors
        return Page(
            number, locator, content, encoding, charset, metadata, errors=errors
        )

    def _text(
        self,
        number: int,
        locator: str,
        content: bytes,
        metadata: dict[str, str],
        encoding: str,
        html: bool = False,
    ) -> Read:
        charset = metadata.get("charset", "")
        errors = self.reading.encoding_errors
        decoded = decode(content, encoding, charset, html, errors)
        if decoded.encoding != UTF8:
            metadata["encoding"] = decoded.encoding
        if not decoded.text.strip():
            return Dropped(number, EMPTY, locator)
        if html:
            metadata |= page_rights(decoded.text)
        chosen = chosen_metadata(metadata, self.reading)
        return make_record(number, locator, decoded.text, chosen, decoded.replaced)


@dataclass
class _ArcReader(_WarcReader):
    """Reader of the records of an ARC file: a line about each record that ends with its
    length, then its content.

    The first record describes the file; its second line names the fields, 5 in version
    1 and 10 in version 2 (https://archive.org/web/researcher/ArcFileFormat.php).
    """

    fields: int = ARC_FIELDS

    def describe(self, number: int, stored: Stored) -> dict[str, str] | Read:
        """Read the line about a record."""
        if stored.header.startswith(_ARC_BEGIN):
            names = (stored.block or b"").splitlines()[1:2]
            self.fields = max(len(names[0].split()) if names else 0, ARC_FIELDS)
            return Skipped("description of an ARC file")
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
        is_http = fields[0].lower().startswith(("http://", "https://"))
        return {
            "warc-target-uri": fields[0].strip(),
            "warc-date": _ARC_DATE.sub(r"\1-\2-\3T\4:\5:\6Z", fields[2]),
            "content-type": "application/http" if is_http else "",
        }


def _crawl(block: bytes) -> dict[str, str]:
    """Statements of a `warcinfo` record about the crawl, among CRAWL_FIELDS."""
    lines = block.decode("utf-8", "replace").splitlines()
    pairs = (line.partition(":") for line in lines)
    fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return {name: fields[name] for name in CRAWL_FIELDS if fields.get(name)}


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
    most = compression.MAX_RECORD_BYTES
    first_error: _BrokenError | None = None
    for number in range(len(packings) + 1):
        for dropped in combinations(packings, number):
            response = block
            if dropped:
                head, end, body = block.partition(_EMPTY_LINE)
                kept_lines = [
                    line
                    for line in head.split(b"\r\n")
                    if line.partition(b":")[0].strip().lower().decode("latin-1")
                    not in dropped
                ]
                response = b"\r\n".join(kept_lines) + end + body
            try:
                content: bytes = _parse_http(response, "all").reader.read(most + 1)
            except OSError as error:
                first_error = first_error or _BrokenError(
                    f"the body of the HTTP response cannot be decoded: {error}"
                )
                continue
            if len(content) > most:
                raise _BrokenError(f"the page is longer than {most >> 20} MiB")
            in_chunks = "transfer-encoding" in dropped and _CHUNK_SIZE.match(content)
            if not dropped or (is_text(content) and not in_chunks):
                return content
    assert first_error is not None
    raise first_error


def _media_type(declared: str) -> str:
    media_type = declared.partition(";")[0].strip().lower()
    return media_type if _MEDIA_TYPE.fullmatch(media_type) else ""
