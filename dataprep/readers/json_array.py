"""JSON files in blocks of lines: JSON lines unchanged, a JSON array with one line per
element.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from gristmill.dataprep.readers.charsets import utf8_parts
from gristmill.dataprep.readers.compression import (
    BLOCK_BYTES,
    MAX_RECORD_BYTES,
    Blocks,
    CorruptFileError,
    Damage,
    Openable,
    RecordTooLongError,
    blocks_of,
    read_parts,
    split_blocks,
)

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SEPARATORS = b", \t\r\n"
_ARRAY_START = re.compile(rb"\s*\[(?:\s*[{\]]|[ \t\r]*\n|\s*\Z)")
"""An array that spans lines or contains objects; a line such as `[1, 2]` in a
JSON-lines file is a bad record.
"""
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\]]', re.DOTALL)
"""A string, a bracket, or the quote of an incomplete string."""


def json_blocks(path: Openable, compression: str) -> Blocks:
    """Yield the lines of a JSON file in blocks, like `blocks_of`; for an array, a
    line per element.

    Raises:
        CorruptFileError: an array is damaged or has no end; raised after the complete
            elements before.
    """
    parts = utf8_parts(read_parts(path, compression))
    begin: list[bytes | Damage] = []
    start = b""
    for part in parts:
        begin.append(part)
        start += part if isinstance(part, bytes) else b""
        if isinstance(part, Damage) or start.strip():
            break
    content = chain(begin, parts)
    return _ArrayText().blocks(content) if is_array(start) else blocks_of(content)


def is_array(start: bytes) -> bool:
    """True if a file with this start is a JSON array of objects."""
    return _ARRAY_START.match(start.removeprefix(BYTE_ORDER_MARK)) is not None


def json_lines(
    path: Openable, compression: str
) -> Iterator[bytes | RecordTooLongError]:
    """Yield the lines of `json_blocks` one by one, without their ends.

    Raises:
        CorruptFileError: at the first damage.
    """
    return split_blocks(json_blocks(path, compression))


class _ArrayText:
    """Text of an array that is not split into lines yet."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._scanned = 0
        self._next_scan_size = BLOCK_BYTES
        self._depth = 0
        self._behind: bytes | None = None
        """Text after the end of the array; None before the end."""

    def blocks(self, parts: Iterator[bytes | Damage]) -> Blocks:
        """Yield the elements of an array as blocks of lines, and then the lines after
        it; see `json_blocks`.
        """
        for part in parts:
            if isinstance(part, Damage):
                yield from self.scan()
                raise CorruptFileError(part.error)
            self._text += part
            if len(self._text) >= self._next_scan_size:
                yield from self.scan()
            if self._behind is not None:
                break
        else:
            yield from self.scan()
            if self._behind is None:
                raise CorruptFileError("the JSON array has no end: the file is cut off")
        yield from blocks_of(chain([self._behind], parts))

    def scan(self) -> Iterator[bytes]:
        """Yield a block of the complete elements, if there are any.

        Raises:
            CorruptFileError: the next element is longer than the longest record.
        """
        lines: list[bytes] = []
        begin = 0
        scanned = self._scanned
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
                self._behind = bytes(self._text[scanned:])
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
            raise CorruptFileError(
                "an element of the JSON array is longer than "
                f"{MAX_RECORD_BYTES >> 20} MiB"
            )
        self._next_scan_size = max(2 * len(self._text), len(self._text) + BLOCK_BYTES)

    def _add_line(self, lines: list[bytes], begin: int, end: int) -> None:
        """Add a range of the text as a line, unless it has only white space and
        commas.
        """
        content = self._text[begin:end].strip(_SEPARATORS)
        if content:
            # A line break in a string is an error in JSON, and so is a carriage return.
            lines.append(bytes(content.replace(b"\n", b"\r")) + b"\n")
