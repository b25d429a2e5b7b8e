"""A small copy of a manifest's sources, to measure what the whole would cost."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.core.files import as_path
from gristmill.dataprep.reading.sources import OWN, SourceFile, find_files
from gristmill.mixtures.base import OutsidePath
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.sources import Source

DOCUMENTS_OF_PYTHON = 300
"""Sources that have no files are sampled by a number of documents."""
UNCUTTABLE = (".zip", ".tar", ".arrow", ".tgz")
"""A part of such a file is not a file of its kind: it is taken whole."""


@dataclass(frozen=True)
class Sample:
    """A smaller manifest over copies of parts of the sources.

    Attributes:
        manifest: reads the copies.
        bytes_taken: source -> bytes of its files that were copied; 0 for a source without files.
        bytes_in_all: source -> bytes of all its files.
    """

    manifest: Manifest
    bytes_taken: Mapping[str, int]
    bytes_in_all: Mapping[str, int]

    def factor(self, source: str) -> float:
        """How many times the sample the whole source is."""
        taken = self.bytes_taken[source]
        return self.bytes_in_all[source] / taken if taken else 1.0


def take_sample(manifest: Manifest, folder: Path, sample_bytes: int, whole_python: bool) -> Sample:
    """Copy about so many bytes of the sources' files, each source in proportion to its size.

    Files are chosen by the hash of their names, so that a larger sample contains a smaller one. A file that is larger
    than what is wanted is cut: the record at the cut is lost, which the sample's manifest allows.

    Args:
        folder: receives the copies.
        whole_python: read all of the sources that have no files, instead of DOCUMENTS_OF_PYTHON.

    Raises:
        gristmill.dataprep.reading.sources.SourceError: a source's path matches nothing.
    """
    listings = {name: find_files(name, source.model_dump()).files for name, source in manifest.document_sources.items()}
    in_all = {name: sum(file.size for file in files) for name, files in listings.items()}
    total = max(sum(in_all.values()), 1)
    sources, taken = {}, {}
    for name, source in manifest.document_sources.items():
        if not in_all[name]:
            limit = source.limit if whole_python else min(source.limit or DOCUMENTS_OF_PYTHON, DOCUMENTS_OF_PYTHON)
            sources[name], taken[name] = source.model_copy(update={"limit": limit}), 0
            continue
        budget = max(int(sample_bytes * in_all[name] / total), 1)
        taken[name] = _copy(listings[name], folder / name, budget)
        sources[name] = _over_copies(source, folder / name)
    ingest = manifest.ingest.model_copy(update={"max_quarantined": 1.0})
    return Sample(manifest.model_copy(update={"sources": sources, "ingest": ingest}), taken, in_all)


def _over_copies(source: Source, folder: Path) -> Source:
    return source.model_copy(update={"path": OutsidePath(folder / "**" / "*"), "list": None, "limit": None})


def _copy(files: Sequence[SourceFile], folder: Path, budget: int) -> int:
    """Copy files, or the beginning of one, until the budget is met; returns the bytes of them that were used."""
    used = 0
    for file in sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest()):
        used += _copy_part(file, folder / file.name, budget - used)
        if used >= budget:
            break
    return used


def _copy_part(file: SourceFile, target: Path, budget: int) -> int:
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.size > budget and file.format == "parquet":
        return _copy_rows(file, target, budget)
    wanted = file.size if file.format == OWN or file.name.endswith(UNCUTTABLE) else min(file.size, budget)
    with as_path(file.location).open("rb") as stream, target.open("wb") as sink:
        copied = 0
        while copied < wanted and (chunk := stream.read(min(1 << 20, wanted - copied))):
            sink.write(chunk)  # type: ignore[arg-type]
            copied += len(chunk)
    return max(copied, 1)


def _copy_rows(file: SourceFile, target: Path, budget: int) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from gristmill.dataprep.documents import open_parquet

    with open_parquet(as_path(file.location)) as table:
        rows = table.metadata.num_rows
        wanted = max(1, rows * budget // file.size)
        first = next(table.iter_batches(batch_size=wanted, use_threads=False), None)
        if first is None:
            return max(file.size, 1)
        pq.write_table(pa.Table.from_batches([first]), str(target), compression="zstd")
        return max(file.size * len(first) // rows, 1)
