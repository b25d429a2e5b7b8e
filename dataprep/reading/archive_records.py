"""Records of WARC and ARC files as bytes; damage costs the records that it touches, and no more.

Both formats say how long a record is before its content, and nothing else says where the next one begins. So a length
counts only where a header, or the file's end, follows what it spans. Otherwise the next header is looked for, and what
lies before it is one Gap.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from gristmill.dataprep.reading import compression
from gristmill.dataprep.reading.compression import DecodedStream

HEADER_BYTES = 4096
"""Of a header that is looked at first; most have 300 to 800."""
MOST_HEADER_BYTES = 1 << 20
FOLLOWING_BYTES = 512
"""Behind a record, of which most headers' first lines have less."""


@dataclass(frozen=True)
class Form:
    """A format of archives.

    Attributes:
        name: for messages.
        begin: the beginning of a record, so specific that hardly any content has it.
        ends: what a header may end with; the first of them does.
        length: the header's field with the content's length, in a header in lower case.
        separators: what stands behind a record.
        are_specific: whether that is hardly ever found at a place that a wrong length leads to.
    """

    name: str
    begin: re.Pattern[bytes]
    ends: tuple[bytes, ...]
    length: re.Pattern[bytes]
    separators: tuple[bytes, ...]
    are_specific: bool

    @cached_property
    def begin_of_line(self) -> re.Pattern[bytes]:
        """A line end, or a NUL of a hole in the file, that a record's beginning follows."""
        return re.compile(rb"[\n\0](?=" + self.begin.pattern + rb")")


WARC = Form(
    "WARC",
    re.compile(rb"WARC/\d\.\d+[ \t]*\r?\n[A-Za-z-]+[ \t]*:"),
    (b"\n\r\n", b"\n\n"),
    re.compile(rb"\ncontent-length[ \t]*:[ \t]*(\d{1,18})[ \t]*\r?\n"),
    (b"\r\n\r\n", b"\n\n"),
    True,
)
ARC = Form(
    "ARC",
    re.compile(rb"[a-z][a-z0-9+.-]*:[^\r\n]{0,65536}? [0-9a-fA-F.:]{3,45} \d{8,17} [^\r\n]{0,4096}?\d+[ \t]*\r?\n"),
    (b"\n",),
    re.compile(rb" (\d{1,18})[ \t]*\r?\n\Z"),
    (b"\n", b"\r\n"),
    False,
)
RESUMED_BYTES = 1 << 17
"""How far a record's beginning may reach: parts that are searched overlap by so much."""


@dataclass(frozen=True)
class Stored:
    """A record whose length is right.

    Attributes:
        header: with the line end behind it.
        block: the content; None where it is longer than MAX_RECORD_BYTES.
    """

    header: bytes
    block: bytes | None


@dataclass(frozen=True)
class Gap:
    """Content that holds no sound record.

    Attributes:
        error: why, and where it lies.
        begin: its first bytes.
        lost: records that are lost besides one; None where nobody knows, since the file cannot be read on.
    """

    error: str
    begin: bytes
    lost: int | None = 0


def split_records(stream: DecodedStream, form: Form) -> Iterator[Stored | Gap]:
    """The records of a file, and what lies between them and is none."""
    read = 0
    _pass_newlines(stream)
    while True:
        at = stream.tell()
        record = _read_record(stream, form)
        if isinstance(record, Stored):
            read += 1
            yield record
            continue
        if record.error:
            _pass_to_header(stream, form)
        if stream.peek(1):
            yield replace(record, error=f"{record.error}: {stream.tell() - at:,} bytes at offset {at:,} of the content")
        elif stream.error is not None:
            yield replace(record, error=str(stream.error), lost=stream.error.lost(read))
            if not stream.resume():
                return
            _pass_newlines(stream)
        else:
            if record.error:
                yield replace(record, error=f"{record.error}, at offset {at:,} of the content", lost=None)
            return


def _read_record(stream: DecodedStream, form: Form) -> Stored | Gap:
    """The next record. At the end a Gap without an error; else a Gap of which at most the header is read."""
    if not stream.peek(1):
        return Gap("", b"")
    header = _header(stream, form)
    damaged = f"the {form.name} file is damaged or cut off"
    if header is None:
        return Gap(f"{damaged}: no record begins here", stream.peek(HEADER_BYTES))
    stream.read(len(header))
    declared = form.length.search(header.lower())
    if declared is None:
        return Gap(f"{damaged}: a record has no valid length", header)
    length = int(declared[1])
    if length > compression.MAX_RECORD_BYTES:
        if not _pass(stream, length):
            return Gap(f"{damaged}: it ends in the middle of a record", header)
        _pass_newlines(stream)
        return Stored(header, None)
    block = stream.read(length)
    if len(block) == length and _is_followed(stream, form, block):
        return Stored(header, block)
    stream.push_back(block)
    reason = "it ends in the middle of a record" if len(block) < length else "a record's length is wrong"
    return Gap(f"{damaged}: {reason}", block)


def _header(stream: DecodedStream, form: Form) -> bytes | None:
    """The header that stands next, to its end."""
    head = stream.peek(HEADER_BYTES)
    end = _end_of(head, form)
    if end < 0:
        head = stream.peek(MOST_HEADER_BYTES)
        end = _end_of(head, form)
    return head[:end] if end >= 0 and form.begin.match(head) else None


def _end_of(head: bytes, form: Form) -> int:
    """Where a header ends; -1 where it goes on."""
    end = -1
    for mark in form.ends:
        at = head.find(mark, 0, end if end >= 0 else len(head))
        if at >= 0:
            end = at + len(mark)
    return end


def _is_followed(stream: DecodedStream, form: Form, block: bytes) -> bool:
    """Whether the next record, or the end, comes behind what was read and empty lines; then these are read too."""
    begin = stream.peek(FOLLOWING_BYTES)
    behind = begin.lstrip(b"\r\n")
    newlines = len(begin) - len(behind)
    if behind and b"\n" not in behind:
        behind = stream.peek(MOST_HEADER_BYTES).lstrip(b"\r\n")
    is_separated = begin.startswith(form.separators)
    if not behind:  # bytes of a damaged member may have come out, and this record is the last of them
        is_followed = stream.error is None or not stream.error.decoded
    elif is_separated and form.are_specific:
        is_followed = True
    else:
        is_header = form.begin.match(behind) is not None
        is_followed = is_header and (is_separated or block.endswith((b"\r", b"\n")) != form.are_specific)
    if is_followed:
        stream.read(newlines)
    return is_followed


def _pass_newlines(stream: DecodedStream) -> None:
    while (begin := stream.peek(FOLLOWING_BYTES)) and begin[0] in b"\r\n":
        stream.read(len(begin) - len(begin.lstrip(b"\r\n")))


def _pass(stream: DecodedStream, size: int) -> bool:
    """Pass over so many bytes; False where the content ends before."""
    while size and (passed := stream.read(min(size, compression.READ_BYTES))):
        size -= len(passed)
    return not size


def _pass_to_header(stream: DecodedStream, form: Form) -> None:
    """Go to the next record's header on a line of its own, or to the end."""
    size = compression.READ_BYTES + RESUMED_BYTES
    while content := stream.peek(size):
        found = form.begin_of_line.search(content)
        if found is not None:
            stream.read(found.end())
            return
        stream.read(len(content) if len(content) < size else compression.READ_BYTES)
