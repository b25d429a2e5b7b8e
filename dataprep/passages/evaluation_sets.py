"""Evaluation sets as items with texts, read from files of several formats.

An unreadable evaluation set stops the stage, so that unchecked contamination is not
reported as clean.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gristmill.core.files import as_path
from gristmill.dataprep.reading.charsets import UndecodableError, decode
from gristmill.dataprep.reading.compression import (
    CorruptFileError,
    RecordTooLongError,
    read_whole,
    split_compression,
)
from gristmill.dataprep.reading.records import Fields
from gristmill.dataprep.reading.sources import outside_files
from gristmill.dataprep.reading.tables import table_rows
from gristmill.mixtures.steps.decontaminate import EvaluationSet

SEPARATORS = {".csv": ",", ".tsv": "\t"}
TEXT = "text"
"""Name of the only field in a line of a text file."""


LABELS = (
    "question",
    "q",
    "context",
    "passage",
    "article",
    "document",
    "background",
    "story",
    "text",
    "title",
    "premise",
    "hypothesis",
    "sentence",
    "statement",
    "problem",
    "task",
    "goal",
    "query",
    "instruction",
    "instructions",
    "input",
    "output",
    "choices",
    "options",
    "answer",
    "a",
    "solution",
    "response",
)
"""Labels of an item's fields in prompts of evaluation harnesses, before a colon at the
beginning of a line.
"""
_NAMES = rf"[ \t]*(?:#+[ \t]*)?(?:{'|'.join(LABELS)})(?:[ \t]*\d+)?[ \t]*:"
_LABEL = re.compile(rf"^{_NAMES}[ \t]*", re.IGNORECASE | re.MULTILINE)
_LABEL_AT_END = re.compile(rf"^{_NAMES}\s*\Z", re.IGNORECASE | re.MULTILINE)
_CHOICE = re.compile(r"^[ \t]*\(?[A-J][).:][ \t]+|(?<!\S)\([A-J]\)[ \t]+", re.MULTILINE)
"""Letter of a choice: `A.`, `A)`, `A:`, `(A)` at the beginning of a line, `(A)` also
within it.
"""
WITHOUT_LABELS = ", labels removed"
"""Suffix of `Part.field` for a text from which the labels are removed."""


class EvaluationSetError(ValueError):
    """Error of an evaluation set that cannot be read or has no text to search for."""


@dataclass(frozen=True)
class Part:
    """Text of an evaluation item.

    Attributes:
        set: name of the evaluation set.
        item: number of the item in its set, from 1.
        field: field of the item with the text.
        text: text to search for.
    """

    set: str
    item: int
    field: str
    text: str


def read_parts(sets: Sequence[EvaluationSet]) -> tuple[list[Part], dict[str, int]]:
    """Read all texts to search for.

    Returns:
        the parts, in the order of the sets and their items; and set -> number of its
        items.

    Raises:
        EvaluationSetError: a file cannot be read, no item has a field of `text_fields`,
            or two sets share a name.
        gristmill.dataprep.reading.sources.SourceError: a path does not match any file.
    """
    parts: list[Part] = []
    items: dict[str, int] = {}
    for number, section in enumerate(sets):
        files = outside_files(f"decontaminate.against.{number}.path", section.path)
        for name, location in files:
            set_name = _set_name(section, name, len(files))
            if set_name in items:
                raise EvaluationSetError(
                    f"decontaminate.against.{number}: two evaluation sets are called "
                    f"{set_name!r}; give each its own `name`, or list a file once"
                )
            new_parts, items[set_name] = _read_file(
                set_name, name, as_path(location), section.text_fields
            )
            parts += new_parts
    return parts, items


def _set_name(section: EvaluationSet, file: str, files: int) -> str:
    path = PurePosixPath(file)
    stem = path.with_name(path.name.split(".")[0] or path.name).as_posix()
    if section.name is None:
        return stem
    return section.name if files == 1 else f"{section.name}/{stem}"


def _read_file(
    set_name: str, name: str, path: Path, fields: Sequence[str] | None
) -> tuple[list[Part], int]:
    parts: list[Part] = []
    keys: dict[str, None] = {}
    number = 0
    for number, record in enumerate(read_items(name, path), start=1):
        keys.update(dict.fromkeys(record))
        item_fields = (
            [key for key, value in record.items() if isinstance(value, str)]
            if fields is None
            else fields
        )
        for field in item_fields:
            parts += [
                Part(set_name, number, form_path, text)
                for field_path, field_text in _texts(field, record.get(field))
                for form_path, text in forms(field_path, field_text)
            ]
    if not number:
        raise EvaluationSetError(
            f"{path}: the evaluation set is empty; remove it from decontaminate.against"
        )
    missing = [field for field in fields or () if field not in keys]
    if missing:
        raise EvaluationSetError(
            f"{path}: no item has the field {missing[0]!r}; its fields are "
            f"{', '.join(keys)}; correct `text_fields`"
        )
    return parts, number


def _texts(field: str, value: Any) -> Iterator[tuple[str, str]]:
    """Texts of a field that is a string or a list of strings."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, list):
        yield from (
            (f"{field}[{index}]", text)
            for index, text in enumerate(value)
            if isinstance(text, str)
        )


def forms(field: str, text: str) -> Iterator[tuple[str, str]]:
    """Forms of a text to search for: without labels at its ends, and also without inner
    labels if it has any.

    A page with the item may have the labels of this file, those of another harness, or
    none.

    Yields:
        the field of the form, and the form.
    """
    trimmed = _LABEL_AT_END.sub("", text).strip()
    while label := _LABEL.match(trimmed):
        trimmed = trimmed[label.end() :].lstrip()
    yield field, trimmed
    bare = _CHOICE.sub("", _LABEL.sub("", trimmed))
    if bare != trimmed:
        yield field + WITHOUT_LABELS, bare


def read_items(name: str, path: Path) -> Iterator[Fields]:
    """Read the items of a file (Parquet, CSV, JSON lines, JSON, lines of text;
    compressed or not).

    Args:
        name: file name whose extension selects the format.
        path: location of the file.

    Raises:
        EvaluationSetError: the file cannot be read; the message has the line.
    """
    extension, compression = split_compression(name)
    if extension == ".parquet":
        for number, row in table_rows(path):
            if isinstance(row, ValueError):
                raise EvaluationSetError(f"{path}: row {number}: {row}") from row
            yield row
        return
    text = _decoded(path, compression)
    if extension in SEPARATORS:
        yield from _rows(
            path,
            csv.DictReader(
                io.StringIO(text, newline=""), delimiter=SEPARATORS[extension]
            ),
        )
    elif extension in (".jsonl", ".ndjson"):
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield from _objects(path, number, _parsed(path, number, line))
    elif extension == ".json":
        yield from _json_records(path, text)
    else:
        yield from ({TEXT: line} for line in text.splitlines() if line.strip())


def _rows(path: Path, rows: csv.DictReader) -> Iterator[Fields]:
    try:
        yield from rows
    except csv.Error as error:
        raise EvaluationSetError(
            f"{path}: line {rows.line_num} is not readable CSV: {error}"
        ) from error


def _json_records(path: Path, text: str) -> Iterator[Fields]:
    """Items of a JSON list of objects, of JSON lines under another extension, or of a
    single object.

    If all values of a single object are objects, they are the items; otherwise the
    object is one item.
    """
    try:
        value = json.loads(text)
    except ValueError:
        lines = [
            (number, line)
            for number, line in enumerate(text.split("\n"), start=1)
            if line.strip()
        ]
        for number, line in lines:
            yield from _objects(path, number, _parsed(path, number, line))
        return
    is_nested = (
        isinstance(value, dict)
        and value
        and all(isinstance(item, dict) for item in value.values())
    )
    items: Iterable[Any] = (
        value if isinstance(value, list) else value.values() if is_nested else [value]
    )
    for number, item in enumerate(items, start=1):
        yield from _objects(path, number, item)


def _objects(path: Path, number: int, value: Any) -> Iterator[Fields]:
    if not isinstance(value, dict):
        raise EvaluationSetError(
            f"{path}: item {number} must be a JSON object, not {type(value).__name__}"
        )
    yield value


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise EvaluationSetError(
            f"{path}: line {number} is not valid JSON: {error}"
        ) from error


def _decoded(path: Path, compression: str) -> str:
    try:
        return decode(read_whole(path, compression), None).text
    except (CorruptFileError, RecordTooLongError, UndecodableError) as error:
        raise EvaluationSetError(
            f"{path}: the evaluation set cannot be read: {error}"
        ) from error
