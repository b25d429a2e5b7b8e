"""Turns a stream of records into document shards and quarantine files of bounded size."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from gristmill.dataprep.counts import Counts
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, QUARANTINE_SCHEMA, document_id, write_table
from gristmill.dataprep.readers import Record, Rejected

MAX_SHARD_ROWS = 100_000
"""Rows after which a shard ends whatever its size, so that short documents do not pile up in memory."""
MAX_QUARANTINE_ROWS = 20_000
SHOWN_QUARANTINED = 20
"""Quarantined records that a summary lists."""


@dataclass
class ShardWriter:
    """Fills the shards and the quarantine of one task, a bounded piece at a time.

    Attributes:
        out: folder of the stage's output.
        task: the task's number, which names its files.
        source: the source that the task reads.
        shard_bytes: text bytes (UTF-8) after which a shard ends.
        files: what was written so far.
        shown: the first quarantined records, for the summary.
    """

    out: Path
    task: str
    source: str
    shard_bytes: int
    files: list[Path] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)
    kept: int = 0
    quarantined: int = 0
    shards: int = 0
    text_bytes: int = 0
    _held_bytes: int = 0
    _documents: list[tuple[bytes, str, str, str]] = field(default_factory=list)
    _rejects: list[dict[str, Any]] = field(default_factory=list)
    _reject_files: int = 0

    @property
    def read(self) -> int:
        """Records so far."""
        return self.kept + self.quarantined

    def add(self, file: str, record: Record | Rejected) -> None:
        """Take one record that was read from `file`."""
        if isinstance(record, Rejected):
            self._reject(file, record)
            return
        identity = document_id(self.source, record.locator, record.text)
        self._documents.append((identity, record.locator, record.text, record.metadata))
        self.kept += 1
        self._held_bytes += len(record.text.encode("utf-8"))
        if self._held_bytes >= self.shard_bytes or len(self._documents) >= MAX_SHARD_ROWS:
            self._write_shard()

    def close(self) -> None:
        """Write what is still held."""
        if self._documents:
            self._write_shard()
        if self._rejects:
            self._write_quarantine()

    def counts(self) -> Counts:
        """The task's ledger, in total and for its source."""
        counts = {
            "read": self.read, "kept": self.kept, "dropped": {}, "quarantined": self.quarantined,
            "bytes_read": self.text_bytes, "bytes_kept": self.text_bytes,
        }  # fmt: skip
        return {**counts, "sources": {self.source: counts}}

    def _reject(self, file: str, record: Rejected) -> None:
        row = {"source": self.source, "file": file, "record": record.number, "error": record.error}
        if len(self.shown) < SHOWN_QUARANTINED:
            self.shown.append(row)
        self._rejects.append({**row, "excerpt": record.excerpt})
        self.quarantined += 1
        if len(self._rejects) >= MAX_QUARANTINE_ROWS:
            self._write_quarantine()

    def _write_shard(self) -> None:
        ids, locators, texts, metadata = zip(*self._documents, strict=True)
        source = pa.DictionaryArray.from_arrays(pa.array([0] * len(ids), pa.int32()), pa.array([self.source]))
        columns = [
            pa.array(ids, DOCUMENT_SCHEMA.field("id").type),
            source,
            pa.array(locators),
            pa.array(texts, pa.large_string()),
            pa.array(metadata),
        ]
        self._write(f"part-{self.task}-{self.shards:03d}.parquet", pa.table(columns, schema=DOCUMENT_SCHEMA))
        self.shards += 1
        self.text_bytes += self._held_bytes
        self._documents, self._held_bytes = [], 0

    def _write_quarantine(self) -> None:
        table = pa.Table.from_pylist(self._rejects, schema=QUARANTINE_SCHEMA)
        self._write(f"quarantine/{self.task}-{self._reject_files:03d}.parquet", table)
        self._reject_files += 1
        self._rejects = []

    def _write(self, name: str, table: pa.Table) -> None:
        write_table(self.out / name, table)
        self.files.append(self.out / name)
