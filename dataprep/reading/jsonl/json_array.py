"""JSON files in blocks of lines: JSON lines as they are, a JSON array with a line per element."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from gristmill.dataprep.reading.compression import (
    BLOCK_BYTES,
    MAX_RECORD_BYTES,
    CorruptFileError,
    Damage,
    Openable,
    RecordTooLongError,
    blocks_of,
    read_parts,
    split_blocks,
)
from gristmill.dataprep.reading.encoding import utf8_parts

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SEPARATORS = b", \t\r\n"
_ARRAY_START = re.compile(rb"\s*\[(?:\s*[{\]]|[ \t\r]*\n|\s*\Z)")
"""An array that fills lines or holds objects; a line such as `[1, 2]` in a file of JSON lines is a bad record."""
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
"""A string, a bracket, or the quote of a string that has not ended yet."""


def json_blocks(path: Openable, compression: str) -> Iterator[bytes | RecordTooLongError | Damage]:
    """Yield the lines of a file of JSON in blocks, as `read_blocks` does; of an array, a line per element.

    Raises:
        CorruptFileError: of an array, after all whole elements before the damage or before its missing end.
    """
    parts = utf8_parts(read_parts(path, compression))
    begin: list[bytes | Damage] = []
    start = b""
    for part in parts:
        begin.append(part)
        if isinstance(part, Damage):
            break
        start += part
        if start.strip():
            break
    content = chain(begin, parts)
    if is_array(start):
        return _array_blocks(content)
    return blocks_of(content)


def is_array(start: bytes) -> bool:
    """Whether a file that starts so is a JSON array of objects."""
    return _ARRAY_START.match(start.removeprefix(BYTE_ORDER_MARK)) is not None


def json_lines(path: Openable, compression: str) -> Iterator[bytes | RecordTooLongError]:
    """Yield the lines of `json_blocks` one by one, without their ends.

    Raises:
        CorruptFileError: at the first damage.
    """
    return split_blocks(json_blocks(path, compression))


def _array_blocks(parts: Iterator[bytes | Damage]) -> Iterator[bytes | RecordTooLongError | Damage]:
    elements = _Elements()
    for part in parts:
        if isinstance(part, Damage):
            yield from elements.scan()
            raise CorruptFileError(part.error)
        yield from elements.add(part)
        if elements.behind is not None:
            break
    if elements.behind is None:
        yield from elements.scan()
    if elements.behind is None:
        raise CorruptFileError("the JSON array has no end: the file is cut off")
    yield from blocks_of(chain([elements.behind], parts))


class _Elements:
    """The text of an array that has not been cut into lines yet.

    Attributes:
        behind: the text after the end of the array; None until it is met.
    """

    def __init__(self) -> None:
        self.behind: bytes | None = None
        self._text = bytearray()
        self._scanned = 0
        self._scan_at = BLOCK_BYTES
        self._depth = 0

    def add(self, chunk: bytes) -> Iterator[bytes]:
        """Add text, and yield a block of lines where enough of it has come."""
        self._text += chunk
        if len(self._text) >= self._scan_at:
            yield from self.scan()

    def scan(self) -> Iterator[bytes]:
        """Yield a block of the elements that end in the text, if there are any.

        Raises:
            CorruptFileError: the next element is longer than a record may be.
        """
        lines: list[bytes] = []
        begin, scanned = 0, self._scanned
        for token in _TOKEN.finditer(self._text, scanned):
            mark = token.group()
            if mark == b'"':
                break
            scanned = token.end()
            if mark in (b"{", b"["):
                if self._depth == 1:
                    self._add_line(lines, begin, token.start())
                    begin = token.start()
                if self._depth == 0:
                    begin = scanned
                self._depth += 1
            elif mark == b"]" and self._depth == 1:
                self._add_line(lines, begin, token.start())
                self.behind = bytes(self._text[scanned:])
                break
            elif mark in (b"}", b"]") and self._depth > 1:
                self._depth -= 1
                if self._depth == 1:
                    self._add_line(lines, begin, scanned)
                    begin = scanned
        if lines:
            yield b"".join(lines)
        del self._text[:begin]
        self._scanned = scanned - begin
        if len(self._text) > MAX_RECORD_BYTES:
            raise CorruptFileError(f"an element of the JSON array is longer than {MAX_RECORD_BYTES >> 20} MiB")
        self._scan_at = max(2 * len(self._text), len(self._text) + BLOCK_BYTES)

    def _add_line(self, lines: list[bytes], begin: int, end: int) -> None:
        """Add a part of the text as a line, unless it is only white space and commas."""
        content = self._text[begin:end].strip(_SEPARATORS)
        if content:
            # A line break inside of a string is an error in JSON, and so is a carriage return.
            lines.append(bytes(content.replace(b"\n", b"\r")) + b"\n")
