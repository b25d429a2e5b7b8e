"""JSON lines and arrays: a document per line or element, in columns where a kernel is certain of it, else one by one.

`_from_line` is what a line means. The kernel (`json_columns.py`) gives the same for the lines that it takes, many times
as fast, and leaves the others: bad ones, texts without content or with NULs, keys that come twice, numbers that Python writes in
another form than the line has.
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

from gristmill.dataprep.reading.compression import (
    BLOCK_BYTES,
    CorruptFileError,
    Damage,
    RecordTooLongError,
    Unended,
    lines_of,
)
from gristmill.dataprep.reading.encoding import KEEP_BAD, UTF8, most_replaced, replace_bad
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
"""Documents in columns, and between them the lines that are left to Python, each with its number."""
UNEXPECTED_MARK = "Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"
MOST_BYTES = 4 * BLOCK_BYTES
"""Of a block that becomes columns: a longer one has a long line, which costs what its bytes cost."""
FEWEST_BYTES = 1 << 18
"""Of a block for which the kernel is loaded, which takes as long as Python for some megabytes of lines."""
KERNEL = "gristmill.dataprep.reading.jsonl.json_columns"
FEWEST_LINE_BYTES = 10
"""Of a document and the line's end, such as `{"":"a"}`."""
FEWEST_NUMBER_BYTES = 6
"""Of a member with a float, such as `"":0.5`."""
MOST_DIGITS = 20
"""Of a line's number."""
_DECODER = json.JSONDecoder(parse_constant=str)
"""Made once: with `parse_constant`, `json.loads` makes one for every record."""


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
    """The number of the last line of a block, and what is in it."""
    few = len(block) < FEWEST_BYTES and KERNEL not in sys.modules
    if columns is not None and len(block) <= MOST_BYTES and not few and not isinstance(block, Unended):
        found = columns.read(block, number)
        if found is not None:
            return found
    lines = [block] if isinstance(block, Unended) else list(lines_of(block))
    return number + len(lines), enumerate(lines, start=number + 1)


@dataclass
class Columns:
    """Blocks of lines as columns.

    Attributes:
        prefix: of the locators of lines without an id.
        text, id: names of fields; the latter is empty where there is none.
        metadata: names of the fields that are kept; None for all scalar ones.
    """

    prefix: bytes
    text: bytes
    id: bytes
    metadata: list[bytes] | None

    @classmethod
    def of(cls, item: Input, reading: Reading) -> Columns | None:
        """None where all lines are left to Python: pages, fields inside of others, and where that is asked for."""
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
        """The number of the last line of a block, and what is in it; None where it is not UTF-8.

        Args:
            block: whole lines, at most MOST_BYTES.
            number: of the line before the first.
        """
        try:
            block.decode(UTF8)
        except UnicodeDecodeError:
            return None
        lines, found, left = self._scan(block, number)
        return number + lines, self._parts(block, found, left)

    def _parts(self, block: bytes, found: Records, left: np.ndarray) -> Parts:
        places = np.searchsorted(found.numbers, left[:, 0])
        done = 0
        for place, (line, begin, end) in zip(places.tolist(), left.tolist(), strict=True):
            if place > done:
                yield found.part(done, place)
            done = place + int(place < len(found) and found.numbers[place] == line)
            yield line, block[begin:end].removesuffix(b"\r")
        if done < len(found):
            yield found.part(done, len(found))

    def _scan(self, block: bytes, number: int) -> tuple[int, Records, np.ndarray]:
        """How many lines a block has, what the kernel makes of them, and number, begin and end (int64 of shape (n, 3))
        of those that are left.

        A line may be in both; then Python's result counts.
        """
        from gristmill.dataprep.reading.jsonl.json_columns import read_objects
        from gristmill.dataprep.reading.jsonl.json_members import SLACK

        size, wanted = len(block) + SLACK, self.metadata or []
        most = size // FEWEST_LINE_BYTES
        texts, metadata = np.empty(size, np.uint8), np.empty(2 * size, np.uint8)
        locators = np.empty(size + most * (len(self.prefix) + MOST_DIGITS), np.uint8)
        rows, left = np.empty((most, 6), np.int64), np.empty((size // 2, 3), np.int64)
        doubtful = np.empty((size // FEWEST_NUMBER_BYTES, 3), np.int64)
        lines, num_rows, num_left, num_doubtful = read_objects(
            _bytes_of(block + b"\n" * SLACK),
            number,
            _bytes_of(self.text),
            _bytes_of(self.id),
            _bytes_of(b"".join(wanted)),
            np.array([0, *accumulate(map(len, wanted))], np.int64),
            self.metadata is None,
            _bytes_of(self.prefix + bytes(SLACK)),
            texts,
            locators,
            metadata,
            rows,
            left,
            doubtful,
        )
        rows, left = rows[:num_rows], left[:num_left]
        other = [
            row
            for row, begin, end in doubtful[:num_doubtful].tolist()
            if repr(float(token := metadata[begin:end].tobytes())).encode() != token
        ]
        size = int(rows[-1, 3]) if num_rows else 0
        if np.count_nonzero(texts[:size]) < size:
            other += np.searchsorted(rows[:, 3], np.flatnonzero(texts[:size] == 0), side="right").tolist()
        if other:
            left = np.concatenate([left, rows[sorted(set(other)), :3]])
            left = left[np.argsort(left[:, 0])]
        return (
            lines,
            Records(
                rows[:, 0].copy(),
                _strings(pa.string(), locators, rows[:, 4]),
                _strings(pa.large_string(), texts, rows[:, 3]),
                _strings(pa.string(), metadata, rows[:, 5]),
            ),
            left,
        )


def _bytes_of(content: bytes) -> np.ndarray:
    return np.frombuffer(content, np.uint8)


def _strings(type: pa.DataType, content: np.ndarray, ends: np.ndarray) -> pa.Array:
    """Strings that lie one behind the other, copied out of a larger array."""
    offsets = np.zeros(len(ends) + 1, np.int32 if type == pa.string() else np.int64)
    offsets[1:] = ends
    data = content[: offsets[-1]].tobytes()
    return pa.Array.from_buffers(type, len(ends), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


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
    """A line as text, and how many bad sequences became U+FFFD."""
    try:
        return line.decode(UTF8), 0
    except UnicodeDecodeError as error:
        text, replaced = replace_bad(line.decode(UTF8, KEEP_BAD), UTF8)
        if reading.encoding_errors == "strict" or replaced > most_replaced(len(line)):
            raise ValueError(not_utf8(error)) from error
        return text, replaced


def parse_json(line: bytes | str) -> Any:
    """Parse one line of JSON. NaN and Infinity, which JSON does not have but Python writes, become strings.

    Raises:
        ValueError: not UTF-8, not JSON, or nested too deeply; the message is a reason for a person.
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
        why = UNEXPECTED_MARK if text.startswith("\ufeff") else error
        raise ValueError(f"not valid JSON: {why}") from error
