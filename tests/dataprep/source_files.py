"""Files of a source and their records, by the path of the source alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gristmill.dataprep.readers.pythondocs import ListedFile
from gristmill.dataprep.readers.readers import read_records
from gristmill.dataprep.readers.records import Read, Reading, Record, Rejected
from gristmill.dataprep.readers.sources import (
    SourceFile,
    SourceListing,
    find_files,
    listing,
)
from gristmill.mixtures.schema.sources import Source


def find(path: object, name: str = "s", **keys: Any) -> SourceListing:
    """Listing of a source."""
    return find_files(name, Source.model_validate({"path": str(path), **keys}))


def files_of(path: object, **keys: Any) -> Sequence[SourceFile]:
    """Files of a source."""
    return find(path, **keys).files


def listed(path: object, verify: bool = False, **keys: Any) -> list[ListedFile]:
    """Fingerprint of a source."""
    return listing("s", Source.model_validate({"path": str(path), **keys}), verify)


def read(
    path: Path, content: bytes, reading: Reading | None = None, **keys: Any
) -> list[Read]:
    """Records of a source of one file with a content."""
    path.write_bytes(content)
    (file,) = files_of(path, **keys)
    return list(read_records(file, reading or Reading()))


def texts(records: Iterable[Read]) -> list[str]:
    """Texts of the documents among some records."""
    return [record.text for record in records if isinstance(record, Record)]


def errors(records: Iterable[Read]) -> dict[int, str]:
    """Errors of the rejected ones among some records, by their numbers."""
    return {item.number: item.error for item in records if isinstance(item, Rejected)}
