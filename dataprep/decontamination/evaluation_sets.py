"""Evaluation sets as items with texts, read from files of several formats.

An unreadable evaluation set stops the stage, so that unchecked contamination is not
reported as clean.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gristmill.core.files import as_path
from gristmill.dataprep.readers.charsets import UndecodableError, decode
from gristmill.dataprep.readers.compression import (
    CorruptFileError,
    RecordTooLongError,
    read_whole,
    split_compression,
)
from gristmill.dataprep.readers.json_array import json_lines
from gristmill.dataprep.readers.jsonl import parse_json
from gristmill.dataprep.readers.parquet import table_rows
from gristmill.dataprep.readers.records import Fields
from gristmill.dataprep.readers.sources import outside_files
from gristmill.mixtures.steps.decontaminate import EvaluationSet

JSON = (".json", ".jsonl", ".ndjson")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
TEXT = "text"
"""Name of the only field in a line of a text file."""


LABELS = (
    "question q context passage article document background story text title "
    "premise hypothesis sentence statement problem task goal query instruction "
    "instructions input output choices options answer a solution response "
).split()
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
class SetReport:
    """Items of an evaluation set.

    Attributes:
        items: number of items.
        checked: items with counted n-grams.
        contaminated: items of documents above the thresholds.
        contaminated_share: of the checked items.
    """

    items: int
    checked: int
    contaminated: int
    contaminated_share: float


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
        gristmill.dataprep.readers.sources.SourceError: a path does not match any file.
    """
    parts: list[Part] = []
    items: dict[str, int] = {}
    for number, section in enumerate(sets):
        files = outside_files(f"decontaminate.against.{number}.path", section.path)
        for name, location in files:
            path = PurePosixPath(name)
            stem = path.with_name(path.name.split(".")[0] or path.name).as_posix()
            set_name = stem if section.name is None else section.name
            if section.name is not None and len(files) > 1:
                set_name = f"{section.name}/{stem}"
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


def _read_file(
    set_name: str, name: str, path: Path, fields: Sequence[str] | None
) -> tuple[list[Part], int]:
    parts: list[Part] = []
    keys: dict[str, None] = {}
    number = 0
    for number, record in enumerate(read_items(name, path), start=1):
        keys.update(dict.fromkeys(record))
        texts: dict[str, object] = {}
        for field in record if fields is None else fields:
            value = record.get(field)
            if isinstance(value, list) and fields is not None:
                texts |= {f"{field}[{place}]": text for place, text in enumerate(value)}
            else:
                texts[field] = value
        for field, text in texts.items():
            if isinstance(text, str):
                parts += [Part(set_name, number, *form) for form in forms(field, text)]
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
    """Read the items of a file (Parquet, CSV, JSON lines or a JSON list, lines of
    text; compressed or not).

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
    try:
        if extension in JSON:
            yield from _json_items(path, compression)
            return
        text = decode(read_whole(path, compression), None).text
    except (CorruptFileError, RecordTooLongError, UndecodableError) as error:
        raise EvaluationSetError(f"{path} cannot be read: {error}") from error
    if extension in SEPARATORS:
        rows = csv.DictReader(
            io.StringIO(text, newline=""), delimiter=SEPARATORS[extension]
        )
        try:
            yield from rows
        except csv.Error as error:
            raise EvaluationSetError(
                f"{path}: line {rows.line_num} is not readable CSV: {error}"
            ) from error
    else:
        yield from ({TEXT: line} for line in text.split("\n") if line.strip())


def _json_items(path: Path, compression: str) -> Iterator[Fields]:
    for number, line in enumerate(json_lines(path, compression), start=1):
        if isinstance(line, RecordTooLongError):
            raise line
        if not line or line.isspace():
            continue
        try:
            item = parse_json(line)
        except ValueError as error:
            raise EvaluationSetError(
                f"{path}: line {number}: {error}; write one object per line, or a list "
                "of objects"
            ) from error
        if not isinstance(item, dict):
            raise EvaluationSetError(
                f"{path}: item {number} must be a JSON object, not "
                f"{type(item).__name__}"
            )
        yield item
