"""JSON lines and arrays: one document per line or element, read as columns by a kernel or one by one in Python.

`_from_line` defines the meaning of a line. The kernel (`json_columns.py`) returns the same for the lines that it
supports, many times as fast, and leaves the others to Python: bad lines, texts that are empty or have NULs, repeated
keys, and numbers that Python writes in another form.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from gristmill.dataprep.reading.charsets import KEEP_BAD, UTF8, most_replaced, replace_bad
from gristmill.dataprep.reading.compression import (
    BLOCK_BYTES,
    CorruptFileError,
    Damage,
    RecordTooLongError,
    Unended,
    lines_of,
)
from gristmill.dataprep.reading.jsonl.json_array import json_blocks
from gristmill.dataprep.reading.records import (
    Dropped,
    Input,
    Page,
    Reading,
    Record,
    Records,
    Rejected,
    excerpt,
    from_row,
    kind,
    not_utf8,
)

Parts = Iterator[Records | tuple[int, bytes]]
"""Documents as columns, and between them the lines left to Python, each with its number."""
UNEXPECTED_MARK = "Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"
MOST_BYTES = 4 * BLOCK_BYTES
"""Longest block read as columns: a longer one has a long line, whose cost is that of its bytes."""
FEWEST_BYTES = 1 << 18
"""Shortest block for which the kernel is loaded, which takes as long as Python for some megabytes of lines."""
KERNEL = "gristmill.dataprep.reading.jsonl.json_columns"
FEWEST_LINE_BYTES = 10
"""Shortest line with a document, including its end, such as `{"":"a"}`."""
FEWEST_NUMBER_BYTES = 6
"""Shortest member with a float, such as `"":0.5`."""
MOST_DIGITS = 20
"""Digits of a line's number."""
_DECODER = json.JSONDecoder(parse_constant=str)
"""Shared decoder: with `parse_constant`, `json.loads` creates one per record."""


def read_jsonl(item: Input, reading: Reading) -> Iterator[Record | Records | Page | Rejected | Dropped]:
    """Read JSON lines, or the elements of a JSON array; lines of white space are not records."""
    columns = Columns.of(item, reading)
    number = 0
    try:
        for block in json_blocks(item.path, item.compression):
            if isinstance(block, RecordTooLongError):
                number += 1
                yield Rejected(number, str(block))
                continue
            if isinstance(block, Damage):
                number += 1
                yield Rejected(number, str(block), lost=block.lost(number - 1))
                continue
            number, parts = _cut(block, number, columns)
            for part in parts:
                if isinstance(part, Records):
                    yield part
                elif part[1] and not part[1].isspace():
                    yield _from_line(item, reading, *part)
    except CorruptFileError as error:
        yield Rejected(number + 1, str(error), lost=None)


def _cut(block: bytes, number: int, columns: Columns | None) -> tuple[int, Parts]:
    """Number of a block's last line, and the block's parts."""
    is_small = len(block) < FEWEST_BYTES and KERNEL not in sys.modules
    if columns is not None and len(block) <= MOST_BYTES and not is_small and not isinstance(block, Unended):
        line_and_parts = columns.read(block, number)
        if line_and_parts is not None:
            return line_and_parts
    lines = [block] if isinstance(block, Unended) else list(lines_of(block))
    return number + len(lines), enumerate(lines, start=number + 1)


@dataclass
class Columns:
    """Reader of blocks of lines as columns.

    Attributes:
        prefix: of the locators of lines without an id.
        text, id: names of fields; `id` is empty if there is none.
        metadata: names of the fields to keep; None for all scalar ones.
    """

    prefix: bytes
    text: bytes
    id: bytes
    metadata: list[bytes] | None

    @classmethod
    def of(cls, item: Input, reading: Reading) -> Columns | None:
        """Reader for a file; None if all lines are left to Python: pages, nested fields, or on request."""
        kept = sorted(set(reading.metadata or ()))
        names = [reading.text, *kept, *([] if reading.id is None else [reading.id])]
        nested = any("." in name or not name for name in names)
        if not reading.by_kernel or nested or len(set(names)) < len(names) or reading.extract not in (None, "none"):
            return None
        try:
            return cls(
                f"{item.name}#".encode(),
                reading.text.encode(),
                (reading.id or "").encode(),
                None if reading.metadata is None else [name.encode() for name in kept],
            )
        except UnicodeEncodeError:
            return None

    def read(self, block: bytes, number: int) -> tuple[int, Parts] | None:
        """Number of a block's last line, and the block's parts; None if the block is not UTF-8.

        Args:
            block: complete lines, at most MOST_BYTES.
            number: of the line before the first.
        """
        try:
            block.decode(UTF8)
        except UnicodeDecodeError:
            return None
        lines, records, python_lines = self._scan(block, number)
        return number + lines, self._parts(block, records, python_lines)

    def _parts(self, block: bytes, records: Records, python_lines: np.ndarray) -> Parts:
        places = np.searchsorted(records.numbers, python_lines[:, 0])
        num_yielded = 0
        for place, (line, begin, end) in zip(places.tolist(), python_lines.tolist(), strict=True):
            if place > num_yielded:
                yield records.part(num_yielded, place)
            num_yielded = place + int(place < len(records) and records.numbers[place] == line)
            yield line, block[begin:end].removesuffix(b"\r")
        if num_yielded < len(records):
            yield records.part(num_yielded, len(records))

    def _scan(self, block: bytes, number: int) -> tuple[int, Records, np.ndarray]:
        """Number of lines, the kernel's documents, and number, begin and end (int64 of shape (n, 3)) of the lines left
        to Python.

        For a line in both, Python's result counts.
        """
        from gristmill.dataprep.reading.jsonl.json_columns import read_objects
        from gristmill.dataprep.reading.jsonl.json_members import SLACK

        size, metadata_names = len(block) + SLACK, self.metadata or []
        max_lines = size // FEWEST_LINE_BYTES
        texts, metadata = np.empty(size, np.uint8), np.empty(2 * size, np.uint8)
        locators = np.empty(size + max_lines * (len(self.prefix) + MOST_DIGITS), np.uint8)
        rows, python_lines = np.empty((max_lines, 6), np.int64), np.empty((size // 2, 3), np.int64)
        doubtful = np.empty((size // FEWEST_NUMBER_BYTES, 3), np.int64)
        lines, num_rows, num_python_lines, num_doubtful = read_objects(
            _bytes_of(block + b"\n" * SLACK),
            number,
            _bytes_of(self.text),
            _bytes_of(self.id),
            _bytes_of(b"".join(metadata_names)),
            np.array([0, *accumulate(map(len, metadata_names))], np.int64),
            self.metadata is None,
            _bytes_of(self.prefix + bytes(SLACK)),
            texts,
            locators,
            metadata,
            rows,
            python_lines,
            doubtful,
        )
        rows, python_lines = rows[:num_rows], python_lines[:num_python_lines]
        recheck_rows = [
            row
            for row, begin, end in doubtful[:num_doubtful].tolist()
            if repr(float(token := metadata[begin:end].tobytes())).encode() != token
        ]
        size = int(rows[-1, 3]) if num_rows else 0
        if np.count_nonzero(texts[:size]) < size:
            recheck_rows += np.searchsorted(rows[:, 3], np.flatnonzero(texts[:size] == 0), side="right").tolist()
        if recheck_rows:
            python_lines = np.concatenate([python_lines, rows[sorted(set(recheck_rows)), :3]])
            python_lines = python_lines[np.argsort(python_lines[:, 0])]
        return (
            lines,
            Records(
                rows[:, 0].copy(),
                _strings(pa.string(), locators, rows[:, 4]),
                _strings(pa.large_string(), texts, rows[:, 3]),
                _strings(pa.string(), metadata, rows[:, 5]),
            ),
            python_lines,
        )


def _bytes_of(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def _strings(string_type: pa.DataType, content: np.ndarray, ends: np.ndarray) -> pa.Array:
    """Strings copied out of a buffer in which they are concatenated."""
    offsets = np.zeros(len(ends) + 1, np.int32 if string_type == pa.string() else np.int64)
    offsets[1:] = ends
    data = content[: offsets[-1]].tobytes()
    return pa.Array.from_buffers(string_type, len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _from_line(item: Input, reading: Reading, number: int, line: bytes) -> Record | Page | Rejected | Dropped:
    try:
        text, replaced = _line_text(line, reading)
        row = parse_json(text)
    except ValueError as error:
        if isinstance(line, Unended):
            return Rejected(number, f"the file is cut off in its last line: {error}", excerpt(line), lost=None)
        return Rejected(number, str(error), excerpt(line))
    if not isinstance(row, dict):
        return Rejected(number, f"a JSON object was expected, not {kind(row)}", excerpt(line))
    return from_row(reading, number, row, f"{item.name}#{number}", replaced)


def _line_text(line: bytes, reading: Reading) -> tuple[str, int]:
    """Line as text, and the number of U+FFFD put for invalid bytes."""
    try:
        return line.decode(UTF8), 0
    except UnicodeDecodeError as error:
        text, replaced = replace_bad(line.decode(UTF8, KEEP_BAD), UTF8)
        if reading.encoding_errors == "strict" or replaced > most_replaced(len(line)):
            raise ValueError(not_utf8(error)) from error
        return text, replaced


def parse_json(line: bytes | str) -> Any:
    """Parse one line of JSON. NaN and Infinity, which JSON lacks but Python writes, become strings.

    Raises:
        ValueError: not UTF-8, not JSON, or nested too deeply; the message is for the user.
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
