"""Lines of JSON files: JSON lines unchanged, a JSON array with one line per element."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from gristmill.dataprep.readers.charsets import utf8_parts
from gristmill.dataprep.readers.compression import (
    MAX_RECORD_BYTES,
    Damage,
    Line,
    Openable,
    RecordTooLongError,
    read_parts,
    split_lines,
    until_damage,
)

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ARRAY_START = re.compile(rb"\s*\[(?:\s*[{\]]|[ \t\r]*\n|\s*\Z)")
"""An array that spans lines or contains objects; a line such as `[1, 2]` in a
JSON-lines file is a bad record.
"""
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["{}\[\],]', re.DOTALL)
"""A string, a bracket, a comma, or the quote of an incomplete string."""


def json_elements(path: Openable, compression: str) -> Iterator[Line]:
    """Yield the lines of a JSON file like `split_lines`; for an array, which is read
    whole, a line per element.
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
    return split_lines(_array_parts(content) if is_array(start) else content)


def is_array(start: bytes) -> bool:
    """True if a file with this start is a JSON array of objects."""
    return _ARRAY_START.match(start.removeprefix(BYTE_ORDER_MARK)) is not None


def json_lines(
    path: Openable, compression: str
) -> Iterator[bytes | RecordTooLongError]:
    """Yield the lines of `json_elements`.

    Raises:
        CorruptFileError: at the first damage.
    """
    return until_damage(json_elements(path, compression))


def _array_parts(parts: Iterator[bytes | Damage]) -> Iterator[bytes | Damage]:
    """Yield the elements of an array as lines, and then the text after it; a Damage
    after the complete elements of an array that is damaged or has no end.
    """
    text = bytearray()
    damage: Damage | None = None
    for part in parts:
        if isinstance(part, Damage):
            damage = part
            break
        text += part
        if len(text) > MAX_RECORD_BYTES:
            yield Damage(
                f"the JSON array is longer than {MAX_RECORD_BYTES >> 20} MiB; convert "
                "it to JSON lines",
                offset=0,
            )
            return
    begin = text.index(b"[") + 1
    depth = 0
    for token in _TOKEN.finditer(text, begin):
        mark = token.group()
        if mark == b'"':
            break
        if mark in (b"{", b"["):
            depth += 1
        elif mark in (b"}", b"]") and depth:
            depth -= 1
        elif mark == b"]" or (mark == b"," and not depth):
            yield _line(text[begin : token.start()])
            begin = token.end()
            if mark == b"]":
                yield bytes(text[begin:])
                if damage is not None:
                    yield damage
                yield from parts
                return
    rest = text[begin:].rstrip()
    if not depth and rest.endswith(b"}"):
        yield _line(rest)
    error = "the JSON array has no end: the file is cut off"
    yield Damage(error if damage is None else damage.error, offset=0)


def _line(element: bytearray) -> bytes:
    """Element as a line; empty if it is blank."""
    content = element.strip()
    # A line break in a string is an error in JSON, and so is a carriage return.
    return bytes(content.replace(b"\n", b"\r")) + b"\n" if content else b""
