"""Records of WARC and ARC files as bytes; damage only affects the records that it
touches.

Both formats have a record's length before its content, and no other mark of the next
record. A length is trusted only if a header, or the end of the file, follows its
content. Otherwise the next header is searched, and the bytes before it are one gap.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from gristmill.dataprep.readers import compression
from gristmill.dataprep.readers.compression import DecodedStream
from gristmill.dataprep.readers.records import Rejected, excerpt

HEADER_BYTES = 4096
"""Bytes of a header that are read first; most headers have 300 to 800."""
MOST_HEADER_BYTES = 1 << 20
FOLLOWING_BYTES = 512
"""Bytes read after a record; the first lines of most headers are shorter."""


@dataclass(frozen=True)
class Form:
    """Format of an archive.

    Attributes:
        name: for messages.
        begin: start of a record, specific enough to be rare in content.
        end: end of a header.
        length: header field with the content's length, in a lower-case header.
        separators: bytes after a record.
        are_specific: True if separators are rare at the position that a wrong length
            leads to.
    """

    name: str
    begin: re.Pattern[bytes]
    end: re.Pattern[bytes]
    length: re.Pattern[bytes]
    separators: tuple[bytes, ...]
    are_specific: bool

    @cached_property
    def begin_of_line(self) -> re.Pattern[bytes]:
        """A line end, or a NUL of a hole in the file, followed by the start of a
        record.
        """
        return re.compile(rb"[\n\0](?=" + self.begin.pattern + rb")")


WARC = Form(
    "WARC",
    re.compile(rb"WARC/\d\.\d+[ \t]*\r?\n[A-Za-z-]+[ \t]*:"),
    re.compile(rb"\n\r?\n"),
    re.compile(rb"\ncontent-length[ \t]*:[ \t]*(\d{1,18})[ \t]*\r?\n"),
    (b"\r\n\r\n", b"\n\n"),
    True,
)
ARC = Form(
    "ARC",
    re.compile(
        rb"[a-z][a-z0-9+.-]*:[^\r\n]{0,65536}? [0-9a-fA-F.:]{3,45} \d{8,17} [^\r\n]{0,4096}?\d+[ \t]*\r?\n"
    ),
    re.compile(rb"\n"),
    re.compile(rb" (\d{1,18})[ \t]*\r?\n\Z"),
    (b"\n", b"\r\n"),
    False,
)
RESUMED_BYTES = 1 << 17
"""Longest start of a record: searched parts overlap by as much."""


@dataclass(frozen=True)
class Stored:
    """A record with a valid length.

    Attributes:
        header: with its line end.
        block: the content; None if longer than MAX_RECORD_BYTES.
    """

    header: bytes
    block: bytes | None


def split_records(stream: DecodedStream, form: Form) -> Iterator[Stored | Rejected]:
    """Yield the records of a file, and the gaps between them as Rejected without a
    number.
    """
    num_records = 0
    _skip_newlines(stream)
    while True:
        offset = stream.tell()
        record = _read_record(stream, form)
        if isinstance(record, Stored):
            num_records += 1
            yield record
            continue
        if record.error:
            # skip to the next header at the start of a line, or to the end
            size = compression.READ_BYTES + RESUMED_BYTES
            while content := stream.peek(size):
                line_match = form.begin_of_line.search(content)
                if line_match is not None:
                    stream.read(line_match.end())
                    break
                stream.read(
                    len(content) if len(content) < size else compression.READ_BYTES
                )
        if stream.peek(1):
            yield replace(
                record,
                error=f"{record.error}: {stream.tell() - offset:,} bytes at "
                f"offset {offset:,} of the content",
            )
        elif stream.error is not None:
            yield replace(
                record, error=str(stream.error), lost=stream.error.lost(num_records)
            )
            if not stream.resume():
                return
            _skip_newlines(stream)
        else:
            if record.error:
                yield replace(
                    record,
                    error=f"{record.error}, at offset {offset:,} of the content",
                    lost=None,
                )
            return


def _read_record(stream: DecodedStream, form: Form) -> Stored | Rejected:
    """Next record, or a gap of which at most the header is read. At the end a gap
    without an error.
    """
    if not stream.peek(1):
        return Rejected(0, "")
    for size in (HEADER_BYTES, MOST_HEADER_BYTES):
        head = stream.peek(size)
        end = form.end.search(head)
        if end is not None:
            break
    if end is None or not form.begin.match(head):
        return _gap(form, "no record begins here", stream.peek(HEADER_BYTES))
    header = head[: end.end()]
    stream.read(len(header))
    declared = form.length.search(header.lower())
    if declared is None:
        return _gap(form, "a record has no valid length", header)
    length = int(declared[1])
    if length > compression.MAX_RECORD_BYTES:
        while length and (skipped := stream.read(min(length, compression.READ_BYTES))):
            length -= len(skipped)
        if length:
            return _gap(form, "it ends in the middle of a record", header)
        _skip_newlines(stream)
        return Stored(header, None)
    block = stream.read(length)
    if len(block) == length and _is_followed(stream, form, block):
        return Stored(header, block)
    stream.push_back(block)
    reason = (
        "it ends in the middle of a record"
        if len(block) < length
        else "a record's length is wrong"
    )
    return _gap(form, reason, block)


def _gap(form: Form, reason: str, begin: bytes) -> Rejected:
    error = f"the {form.name} file is damaged or cut off: {reason}"
    return Rejected(0, error, excerpt(begin))


def _is_followed(stream: DecodedStream, form: Form, block: bytes) -> bool:
    """True if the next record, or the end, follows after empty lines, which are then
    read.
    """
    begin = stream.peek(FOLLOWING_BYTES)
    following = begin.lstrip(b"\r\n")
    newlines = len(begin) - len(following)
    if following and b"\n" not in following:
        following = stream.peek(MOST_HEADER_BYTES).lstrip(b"\r\n")
    is_separated = begin.startswith(form.separators)
    # part of a damaged member may have been decoded, with this record as its last
    if not following:
        is_followed = stream.error is None or not stream.error.decoded
    elif is_separated and form.are_specific:
        is_followed = True
    else:
        is_header = form.begin.match(following) is not None
        is_followed = is_header and (
            is_separated or block.endswith((b"\r", b"\n")) != form.are_specific
        )
    if is_followed:
        stream.read(newlines)
    return is_followed


def _skip_newlines(stream: DecodedStream) -> None:
    while (begin := stream.peek(FOLLOWING_BYTES)) and begin[0] in b"\r\n":
        stream.read(len(begin) - len(begin.lstrip(b"\r\n")))
