"""JSON lines and arrays: one document per line or element."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson

from gristmill.dataprep.readers.charsets import (
    KEEP_BAD,
    UTF8,
    most_replaced,
    replace_bad,
)
from gristmill.dataprep.readers.compression import (
    CorruptFileError,
    Damage,
    Unended,
)
from gristmill.dataprep.readers.json_array import json_elements
from gristmill.dataprep.readers.records import (
    Dropped,
    Fields,
    Input,
    Page,
    Read,
    Reading,
    Record,
    Rejected,
    excerpt,
    from_row,
    kind,
    not_utf8,
)

UNEXPECTED_MARK = (
    "Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"
)
INEXACT = 2.0**63
"""orjson makes a float of an integer that 64 bits do not hold; Python keeps all its
digits.
"""
_DECODER = json.JSONDecoder(parse_constant=str)
"""Shared decoder: with `parse_constant`, `json.loads` creates one per record."""


def read_jsonl(item: Input, reading: Reading) -> Iterator[Read]:
    """Read JSON lines, or the elements of a JSON array; lines of white space are not
    records.
    """
    number = 0
    try:
        for number, line in enumerate(
            json_elements(item.path, item.compression), start=1
        ):
            if isinstance(line, bytes):
                if line and not line.isspace():
                    yield _from_line(item, reading, number, line)
            else:
                lost = line.lost(number - 1) if isinstance(line, Damage) else 0
                yield Rejected(number, str(line), lost=lost)
    except CorruptFileError as error:
        yield Rejected(number + 1, str(error), lost=None)


def _from_line(
    item: Input, reading: Reading, number: int, line: bytes
) -> Record | Page | Rejected | Dropped:
    locator = f"{item.name}#{number}"
    row = _exact_row(line, reading)
    if row is not None:
        record = from_row(reading, number, row, locator, 0)
        if not isinstance(record, Rejected):
            return record  # excerpts of the others show all digits of numbers
    replaced = 0
    try:
        try:
            text = line.decode(UTF8)
        except UnicodeDecodeError as error:
            text, replaced = replace_bad(line.decode(UTF8, KEEP_BAD), UTF8)
            is_strict = reading.encoding_errors == "strict"
            if is_strict or replaced > most_replaced(len(line)):
                raise ValueError(not_utf8(error)) from error
        row = parse_json(text)
    except ValueError as error:
        if isinstance(line, Unended):
            return Rejected(
                number,
                f"the file is cut off in its last line: {error}",
                excerpt(line),
                lost=None,
            )
        return Rejected(number, str(error), excerpt(line))
    if not isinstance(row, dict):
        return Rejected(
            number, f"a JSON object was expected, not {kind(row)}", excerpt(line)
        )
    return from_row(reading, number, row, locator, replaced)


def _exact_row(line: bytes, reading: Reading) -> Fields | None:
    """Object of a line if orjson reads it as Python does; otherwise None.

    orjson refuses lone surrogates, NaN and infinities, which Python reads, and rounds
    large integers.
    """
    try:
        row = orjson.loads(line)
    except ValueError:
        return None
    if type(row) is not dict:
        return None
    for value in row.values():
        if type(value) is float and abs(value) >= INEXACT:
            return None
        if reading.is_nested and type(value) in (dict, list):
            return None  # a number in it may be kept
    return row


def parse_json(line: bytes | str) -> Any:
    """Parse one line of JSON. NaN and Infinity, which JSON lacks but Python writes,
    become strings.

    Raises:
        ValueError: not UTF-8, not JSON, or nested too deeply; the message is for the
            user.
    """
    try:
        text = line if isinstance(line, str) else line.decode(UTF8)
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from error
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("not readable JSON: nested too deeply") from error
    except ValueError as error:
        problem = UNEXPECTED_MARK if text.startswith("\ufeff") else error
        raise ValueError(f"not valid JSON: {problem}") from error
