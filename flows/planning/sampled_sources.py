"""Sample of a manifest's sources, copied to measure the cost of the whole."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.core.files import as_path
from gristmill.dataprep.readers.sources import OWN, SourceFile, find_files
from gristmill.mixtures.base import OutsidePath
from gristmill.mixtures.manifest import Manifest

DOCUMENTS_OF_PYTHON = 300
"""Number of documents sampled from a source without files."""
UNCUTTABLE = (".zip", ".tar", ".arrow", ".tgz")
"""Extensions of files that cannot be truncated and are copied whole."""


@dataclass(frozen=True)
class Sample:
    """A smaller manifest over copies of parts of the sources.

    Attributes:
        manifest: manifest that reads the copies.
        bytes_taken: source -> bytes copied from its files; 0 for a source without
            files.
        bytes_in_all: source -> bytes of all its files.
    """

    manifest: Manifest
    bytes_taken: Mapping[str, int]
    bytes_in_all: Mapping[str, int]

    def factor(self, source: str) -> float:
        """Return the size of the whole source as a multiple of the sample."""
        bytes_taken = self.bytes_taken[source]
        return self.bytes_in_all[source] / bytes_taken if bytes_taken else 1.0


def take_sample(
    manifest: Manifest, folder: Path, sample_bytes: int, whole_python: bool
) -> Sample:
    """Copy about `sample_bytes` of the sources' files, each source in proportion to its
    size.

    Files are chosen by the hash of their names, so a larger sample contains a smaller
    one. A file larger than the remaining budget is truncated: the record at the cut is
    lost, which the sample's manifest allows.

    Args:
        folder: receives the copies.
        whole_python: read sources without files completely, instead of
            DOCUMENTS_OF_PYTHON documents.

    Raises:
        gristmill.dataprep.readers.sources.SourceError: a source's path matches nothing.
    """
    listings = {
        name: find_files(name, source).files
        for name, source in manifest.document_sources.items()
    }
    total_bytes = {
        name: sum(file.size for file in files) for name, files in listings.items()
    }
    total = max(sum(total_bytes.values()), 1)
    sources, copied_bytes = {}, {}
    for name, source in manifest.document_sources.items():
        update: dict[str, object] = {}
        if total_bytes[name]:
            budget = max(int(sample_bytes * total_bytes[name] / total), 1)
            copied_bytes[name] = _copy(listings[name], folder / name, budget)
            path = OutsidePath(folder / name / "**" / "*")
            update = {"path": path, "list": None, "limit": None}
        else:
            copied_bytes[name] = 0
            if not whole_python:
                limit = source.limit or DOCUMENTS_OF_PYTHON
                update = {"limit": min(limit, DOCUMENTS_OF_PYTHON)}
        sources[name] = source.model_copy(update=update)
    ingest = manifest.ingest.model_copy(update={"max_quarantined": 1.0})
    return Sample(
        manifest.model_copy(update={"sources": sources, "ingest": ingest}),
        copied_bytes,
        total_bytes,
    )


def _copy(files: Sequence[SourceFile], folder: Path, budget: int) -> int:
    """Copy files, and the beginning of the last one, up to the budget; return the bytes
    used.
    """
    used = 0
    by_hash = {hashlib.sha256(file.name.encode()).digest(): file for file in files}
    for _, file in sorted(by_hash.items()):
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        room = budget - used
        if file.size > room and file.format == "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            from gristmill.dataprep.documents import open_parquet

            with open_parquet(as_path(file.location)) as table:
                rows = table.metadata.num_rows
                num_rows = max(1, rows * room // file.size)
                first = next(
                    table.iter_batches(batch_size=num_rows, use_threads=False), None
                )
                copied = file.size
                if first is not None:
                    head = pa.Table.from_batches([first])
                    pq.write_table(head, str(target), compression="zstd")
                    copied = file.size * len(first) // rows
                used += max(copied, 1)
        else:
            is_whole = file.format == OWN or file.name.endswith(UNCUTTABLE)
            with as_path(file.location).open("rb") as stream, target.open("wb") as sink:
                if is_whole:
                    shutil.copyfileobj(stream, sink)
                else:
                    sink.write(stream.read(room))
            used += max(target.stat().st_size, 1)
        if used >= budget:
            break
    return used
