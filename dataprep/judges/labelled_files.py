"""Labelled texts from files beside the sources: JSON lines or Parquet (field `text`), or one text a line.

Lines may be in fastText's training format: labels at their beginning are taken off, since the class is known from
where the file is named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gristmill.dataprep.files import as_path
from gristmill.dataprep.reading.compression import CorruptFileError, RecordTooLongError, read_lines
from gristmill.dataprep.reading.readers import read_records
from gristmill.dataprep.reading.records import Page, Reading, Record, Rejected
from gristmill.dataprep.reading.sources import SourceFile, find_files

LABELS = re.compile(r"^(?:__label__\S+\s+)+")


class LabelledFileError(ValueError):
    """A file of labelled texts that cannot be read whole."""


def expand_files(key: str, paths: Sequence[str]) -> list[SourceFile]:
    """The files that paths, globs or folders name, in the order of the paths and then of the names.

    Raises:
        gristmill.dataprep.reading.sources.SourceError: a path matches nothing, or a file's format is not known.
    """
    return [file for path in paths for file in find_files(key, {"path": path}).files]


def read_labelled(file: SourceFile) -> Iterator[str]:
    """The texts of a file; blank lines are none.

    Raises:
        LabelledFileError: a record cannot be read; training on part of a file would look like training on it.
    """
    if file.format == "text":
        yield from _read_lines(file)
        return
    for record in read_records(file, Reading(encoding_errors="strict")):
        if isinstance(record, Rejected):
            raise LabelledFileError(f"{file.location}, record {record.number}: {record.error}; correct or remove it")
        if isinstance(record, Page):
            raise LabelledFileError(f"{file.location}, record {record.number}: it is HTML; name a file of its text")
        if isinstance(record, Record):
            yield record.text


def _read_lines(file: SourceFile) -> Iterator[str]:
    read = 0
    try:
        for line in read_lines(as_path(file.location), file.compression):
            if isinstance(line, RecordTooLongError):
                raise line
            text = LABELS.sub("", line.decode("utf-8")).strip()
            read += 1
            if text:
                yield text
    except (CorruptFileError, RecordTooLongError, UnicodeDecodeError) as error:
        raise LabelledFileError(f"{file.location}, line {read + 1}: {error}; correct or remove it") from error
