"""WARC and WET files: the web pages in a crawl's archive (ISO 28500), read by fastwarc.

Documents are the responses with a 2xx status whose type is HTML or plain text, and conversion records (the text that
Common Crawl's WET files hold). Requests, metadata, redirects, errors and pictures are no documents; they come out as
Skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Literal, cast

from gristmill.dataprep.reading import compression
from gristmill.dataprep.reading.compression import DecodedStream
from gristmill.dataprep.reading.encoding import AUTO, UTF8, UndecodableError, decode
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

HTML_TYPES = ("text/html", "application/xhtml+xml")
PLAIN_TYPE = "text/plain"
MAX_HTTP_HEADER_BYTES = 1 << 20
_MEDIA_TYPE = re.compile(r"[a-z0-9!#$&^_.+-]{1,60}/[a-z0-9!#$&^_.+-]{1,60}")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.+-]+)", re.IGNORECASE)


class _BrokenError(ValueError):
    """A page that cannot be read, though the records behind it can."""


def read_warc(item: Input, reading: Reading) -> Iterator[Read]:
    """The pages of a WARC or WET file; records are numbered from 1, of whatever type they are.

    A file that is cut off or damaged gives the pages before the damage and one Rejected.
    """
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    number = 0
    with DecodedStream(item.path, item.compression) as stream:
        try:
            for number, record in enumerate(ArchiveIterator(cast(BinaryIO, stream), parse_http=False), start=1):
                declared = record.headers.get("Content-Length") or ""
                if not declared.strip().isdigit():
                    yield Rejected(number, _damage(stream, "a record has no valid Content-Length"), lost=None)
                    return
                length = int(declared)
                wanted = record.record_type in (WarcRecordType.response, WarcRecordType.conversion)
                block = record.reader.read() if wanted and length <= compression.MAX_RECORD_BYTES else b""
                if len(block) + record.reader.consume() < length:
                    ends = _damage(stream, "it ends in the middle of a record")
                    yield Rejected(number, ends, excerpt(block), lost=None)
                    return
                if not wanted:
                    yield Skipped(f"{record.record_type} record")
                elif length > compression.MAX_RECORD_BYTES:
                    yield Rejected(number, f"the record is longer than {compression.MAX_RECORD_BYTES >> 20} MiB")
                else:
                    yield _from_record(item, reading, number, record, block)
        except OSError as error:
            if error.errno is not None:  # the storage failed; without an errno it is fastwarc that cannot parse
                raise
            yield Rejected(number + 1, _damage(stream, str(error)), lost=None)
            return
        if stream.error is not None:
            yield Rejected(number + 1, str(stream.error), lost=None)


def _damage(stream: DecodedStream, what: str) -> str:
    return str(stream.error) if stream.error is not None else f"the WARC file is damaged or cut off: {what}"


def _from_record(item: Input, reading: Reading, number: int, record: Any, block: bytes) -> Read:
    from fastwarc.warc import WarcRecordType

    if record.record_type == WarcRecordType.conversion:
        return _conversion(item, reading, number, record, block)
    try:
        return _response(item, reading, number, record, block)
    except (_BrokenError, UndecodableError) as error:
        return Rejected(number, str(error), excerpt(block))


def _conversion(item: Input, reading: Reading, number: int, record: Any, block: bytes) -> Read:
    try:
        text = decode(block, UTF8).text
    except UndecodableError as error:
        return Rejected(number, str(error), excerpt(block))
    about = {
        **_about(record),
        "content_type": _media_type(record.headers.get("Content-Type", "")),
        "language": record.headers.get("WARC-Identified-Content-Language", ""),
    }
    return _text_of(number, _locator(item, number, record), text, about, reading)


def _text_of(
    number: int, locator: str, text: str, about: Mapping[str, Any], reading: Reading
) -> Record | Rejected | Dropped:
    if not text.strip():
        return Dropped(number, EMPTY, locator)
    return make_record(number, locator, text, chosen_metadata(about, reading))


def _response(item: Input, reading: Reading, number: int, record: Any, block: bytes) -> Read:
    http = _parse_http(record, block, "none")
    if not record.is_http:
        return Skipped("response of another protocol than HTTP")
    status = None if http.http_headers is None else http.http_headers.status_code
    if status is None:
        raise _BrokenError("the HTTP response has no status")
    if not 200 <= status < 300:
        return Skipped(f"HTTP status {status}")
    declared = http.http_headers.get("Content-Type", "") or ""
    media_type = _media_type(declared)
    if media_type not in (*HTML_TYPES, PLAIN_TYPE):
        return Skipped(f"content type {media_type or 'missing or malformed'}")
    content = _payload(record, block)
    found = _CHARSET.search(declared)
    charset = found.group(1).lower() if found else ""
    about = {**_about(record), "content_type": media_type}
    encoding, locator = reading.encoding or AUTO, _locator(item, number, record)
    if media_type == PLAIN_TYPE or reading.extract == "none":
        decoded = decode(content, encoding, charset, html=media_type != PLAIN_TYPE)
        if decoded.encoding != UTF8:
            about["encoding"] = decoded.encoding
        return _text_of(number, locator, decoded.text, {**about, "charset": charset}, reading)
    return Page(number, locator, content, encoding, charset, about)


def _parse_http(record: Any, block: bytes, auto_decode: Literal["none", "all"]) -> Any:
    """The block as a record of its own: where fastwarc cannot parse it, the file's iteration must go on."""
    from fastwarc.warc import WarcRecord

    headers = (
        f"WARC/1.1\r\nWARC-Type: response\r\nContent-Type: application/http; msgtype=response\r\n"
        f"Content-Length: {len(block)}\r\n\r\n"
    )
    try:
        alone = WarcRecord.from_bytes(headers.encode("ascii") + block + b"\r\n\r\n")
        if record.is_http:
            alone.parse_http(auto_decode=auto_decode, max_header_len=MAX_HTTP_HEADER_BYTES)
    except OSError as error:
        raise _BrokenError(f"the HTTP response cannot be read: {error}") from error
    return alone


def _payload(record: Any, block: bytes) -> bytes:
    try:
        content: bytes = _parse_http(record, block, "all").reader.read(compression.MAX_RECORD_BYTES + 1)
    except OSError as error:
        raise _BrokenError(f"the body of the HTTP response cannot be decoded: {error}") from error
    if len(content) > compression.MAX_RECORD_BYTES:
        raise _BrokenError(f"the page is longer than {compression.MAX_RECORD_BYTES >> 20} MiB")
    return content


def _about(record: Any) -> dict[str, Any]:
    return {
        "url": _url(record),
        "date": record.headers.get("WARC-Date", ""),
        "truncated": record.headers.get("WARC-Truncated", ""),
    }


def _url(record: Any) -> str:
    url: str = record.headers.get("WARC-Target-URI", "") or ""
    return url.strip().removeprefix("<").removesuffix(">")  # wget puts it in angle brackets


def _locator(item: Input, number: int, record: Any) -> str:
    """The URL and the record's id: crawls hold an address more than once, and a document's locator is unique."""
    identity = (record.record_id or "").strip("<>").removeprefix("urn:uuid:")
    return f"{_url(record)}#{identity or f'{item.name}#{number}'}"


def _media_type(declared: str) -> str:
    found = declared.partition(";")[0].strip().lower()
    return found if _MEDIA_TYPE.fullmatch(found) else ""


