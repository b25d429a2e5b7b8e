"""Document shards of bounded size from a stream of records, and tables of quarantined,
dropped and lost records.

Unread records are in no ledger: a file of 2,000 records truncated to 200 would count as
one bad record. The number of lost records is therefore estimated, from the first of
these that is known:

1. the reader's count (a table's footer has its number of rows);
2. the file's bytes: damage after a third of them lost twice the records before it;
3. the other files of its source (for a member: the other members): as many records as
   their mean, or as many for its bytes, whichever is more;
4. without any of these, the number of records read, as if the file had been truncated
   in its middle. That exceeds any sane limit, on purpose: nothing tells how much is
   missing from a source of a single truncated file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.secrets import mask_text
from gristmill.dataprep.conservation import Counted, Counts, SourceCounts, add_counts
from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    QUARANTINE_SCHEMA,
    hash_documents,
    write_table,
)
from gristmill.dataprep.readers.records import (
    Dropped,
    Ended,
    Read,
    Record,
    Rejected,
    Skipped,
    excerpt,
)

SHOWN_DAMAGED = 20
"""Damaged files in a summary, those with most lost records first."""


class Damaged(TypedDict):
    """A file, or a member of an archive, with lost records.

    Attributes:
        error: that ended the reading.
        records: number of records read.
        kind: what it is compared with.
        lost: number of lost records; None if the reader does not know.
    """

    source: str
    file: str
    error: str
    records: int
    stored_bytes: int
    read_bytes: int
    kind: Literal["files", "members"]
    lost: int | None


class QuarantinedRecord(TypedDict):
    """Record that is not a document."""

    source: str
    file: str
    record: int
    """Number in its file."""
    error: str


class SourceTotals(TypedDict, total=False):
    """Counts of items read from a source; empty if it has no files.

    Attributes:
        skipped: items that are not documents, by kind; outside the counts.
        skipped_candidates: those of a kind that may be a document.
        replaced: number of `records` with invalid bytes, and of their `places`.
        too_long: number of `records` with a text beyond the limit, and their `bytes`.
    """

    read: int
    shards: int
    skipped: dict[str, int]
    skipped_candidates: dict[str, int]
    replaced: dict[str, int]
    too_long: dict[str, int]


class ReadFiles(Counted):
    """Result of reading the files of a task, all of one source.

    Attributes:
        quarantined: the first ones.
        whole: `number`, `records` and `bytes` of intact `files` and `members`.
        crawls: statements of `warcinfo` records.
    """

    source: str
    totals: SourceTotals
    crawls: list[Mapping[str, str]]
    quarantined: list[QuarantinedRecord]
    warnings: list[str]
    whole: dict[str, dict[str, int]]
    damaged: list[Damaged]


@dataclass(frozen=True)
class Loss:
    """Records lost in a damaged file.

    Attributes:
        source, file: location.
        records: number of records read.
        lost: estimated number of records lost.
        error: that ended the reading.
    """

    source: str
    file: str
    records: int
    lost: int
    error: str

    def describe(self) -> str:
        """Sentence for a warning."""
        return (
            f"source {self.source!r}: {self.file} could not be read to its end: "
            f"{self.error}; about {self.lost:,} records are lost after record "
            f"{self.records:,}"
        )


def estimate_losses(results: Sequence[ReadFiles]) -> list[Loss]:
    """Losses of a stage's damaged files, most lost first."""
    intact = add_counts({result["source"]: result["whole"]} for result in results)
    losses = [
        Loss(
            file["source"],
            file["file"],
            file["records"],
            lost_records(file, intact[file["source"]].get(file["kind"], {})),
            file["error"],
        )
        for result in results
        for file in result["damaged"]
    ]
    return sorted(losses, key=lambda loss: (-loss.lost, loss.source, loss.file))


def lost_records(file: Damaged, whole: Mapping[str, int]) -> int:
    """Estimated number of records that a damaged file lost, at least 1; see the
    module's docstring.

    Args:
        whole: `number`, `records` and `bytes` of the intact files of its source.
    """
    if file["lost"] is not None:
        return file["lost"]
    num_read = file["records"]
    stored_bytes = file["stored_bytes"]
    if num_read and 0 < file["read_bytes"] < stored_bytes:
        return math.ceil(num_read * (stored_bytes / file["read_bytes"] - 1))
    number, records, size = (
        whole.get(key, 0) for key in ("number", "records", "bytes")
    )
    expected = max(
        records / number if number else 0,
        stored_bytes * records / size if size else 0,
    )
    return max(math.ceil(expected - num_read) if expected > num_read else num_read, 1)


MAX_SHARD_ROWS = 100_000
"""Rows after which a shard ends whatever its size, so that short documents do not fill
the memory.
"""
PENDING_ROWS, PENDING_CHARACTERS = 1024, 1 << 20
"""Documents that are converted to columns at once, and characters of their texts."""
MAX_QUARANTINE_ROWS = 20_000
DROPPED_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("file", pa.string()),
        ("record", pa.int64()),
        ("locator", pa.string()),
        ("reason", pa.string()),
    ]
)
ROW_SCHEMAS = {"quarantine": QUARANTINE_SCHEMA, "dropped": DROPPED_SCHEMA}
"""Folder -> schema of its tables."""
SHOWN_QUARANTINED = 20
"""Quarantined records in a summary."""


@dataclass
class ShardWriter:
    """Writer of the shards and the quarantine of one task, with bounded memory.

    Attributes:
        out: folder of the stage's output.
        task: number of the task, part of its files' names.
        source: source of the task's records.
        shard_bytes: text bytes (UTF-8) after which a shard ends.
        max_document_bytes: longest document; longer ones are quarantined.
        limit: number of documents to keep; None for all.
        files: files written so far.
        first_quarantined: first quarantined records, for the summary.
    """

    out: Path
    task: str
    source: str
    shard_bytes: int
    max_document_bytes: int
    limit: int | None = None
    files: list[Path] = field(default_factory=list)
    first_quarantined: list[QuarantinedRecord] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Records without text, by reason."""
    totals: dict[str, Counter[str]] = field(
        default_factory=lambda: {
            "skipped": Counter(),
            "skipped_candidates": Counter(),
            "replaced": Counter(records=0, places=0),
            "too_long": Counter(records=0, bytes=0),
        }
    )
    """Counts of `SourceTotals`."""
    whole: dict[str, Counter[str]] = field(
        default_factory=lambda: {"files": Counter(), "members": Counter()}
    )
    """`number`, `records` and `bytes` of intact files with records, and of intact
    archive members.
    """
    damaged: list[Damaged] = field(default_factory=list)
    """Files and members with lost records."""
    crawls: list[Mapping[str, str]] = field(default_factory=list)
    """Distinct statements of `warcinfo` records."""
    kept: int = 0
    quarantined: int = 0
    shards: int = 0
    text_bytes: int = 0
    _buffered_bytes: int = 0
    _buffered_rows: int = 0
    _tables: list[pa.Table] = field(default_factory=list)
    """Buffered documents."""
    _pending: list[tuple[str, Record]] = field(default_factory=list)
    """Files and documents after those of `_tables`."""
    _pending_characters: int = 0
    _rows: dict[str, list[Mapping[str, object]]] = field(
        default_factory=lambda: {folder: [] for folder in ROW_SCHEMAS}
    )
    """Buffered rows by folder."""
    _row_files: Counter[str] = field(default_factory=Counter)

    @property
    def read(self) -> int:
        """Number of records so far."""
        self._settle()
        return self.kept + self.dropped.total() + self.quarantined

    @property
    def bytes_taken(self) -> int:
        """Text bytes so far, written or buffered."""
        self._settle()
        return self.text_bytes + self._buffered_bytes

    @property
    def is_full(self) -> bool:
        """True if the limit of documents is reached."""
        if self.limit is None or self.kept + len(self._pending) < self.limit:
            return False
        self._settle()
        return self.kept == self.limit

    def add(self, file: str, record: Read) -> None:
        """Add a record read from `file`; pages must have been extracted."""
        if self.is_full:
            return
        if isinstance(record, Record):
            self._pending.append((file, record))
            self._pending_characters += len(record.text)
            if (
                self._pending_characters >= PENDING_CHARACTERS
                or len(self._pending) >= PENDING_ROWS
            ):
                self._settle()
        elif isinstance(record, Rejected):
            self._settle()  # may reject documents before it
            self._reject(file, record)
        elif isinstance(record, Dropped):
            self.dropped[record.reason] += 1
            row = {
                "source": self.source,
                "file": _place(file, record.part),
                "record": record.number,
                "locator": record.locator,
                "reason": record.reason,
            }
            self._note("dropped", row)
        elif isinstance(record, Skipped):
            self.totals["skipped"][record.reason] += 1
            if record.crawl and record.crawl not in self.crawls:
                self.crawls.append(record.crawl)
            if record.candidate:
                self.totals["skipped_candidates"][record.reason] += 1
        elif isinstance(record, Ended):
            kind: Literal["files", "members"] = "members" if record.part else "files"
            if record.error:
                self.damaged.append(
                    Damaged(
                        source=self.source,
                        file=_place(file, record.part),
                        error=record.error,
                        records=record.records,
                        stored_bytes=record.stored_bytes,
                        read_bytes=record.read_bytes,
                        kind=kind,
                        lost=record.lost,
                    )
                )
            elif record.records:
                self.whole[kind].update(
                    number=1, records=record.records, bytes=record.stored_bytes
                )
        else:
            raise TypeError(f"{type(record).__name__} is not a result of reading")

    def _settle(self) -> None:
        """Convert pending documents to columns, and write the shards that they fill."""
        if not self._pending:
            return
        files, records = zip(*self._pending, strict=True)
        self._pending = []
        self._pending_characters = 0
        numbers, *columns, replaced = zip(*records, strict=True)
        locators, texts, metadata = map(
            pa.array, columns, (pa.string(), pa.large_string(), pa.string())
        )
        sizes = pc.binary_length(texts).to_numpy()
        ids = hash_documents(self.source.encode("utf-8"), locators, texts)
        source = pa.DictionaryArray.from_arrays(
            np.zeros(len(files), np.int32), [self.source]
        )
        table = pa.table(
            [ids, source, locators, texts, metadata], schema=DOCUMENT_SCHEMA
        )
        places = np.array(replaced)
        if sizes.max() > self.max_document_bytes:
            fits = sizes <= self.max_document_bytes
            for row in np.flatnonzero(~fits).tolist():
                size = int(sizes[row])
                self.totals["too_long"].update(records=1, bytes=size)
                error = (
                    f"{excerpt(columns[0][row])}: the text has {size:,} bytes, more "
                    f"than ingest.max_document_bytes = {self.max_document_bytes:,}; "
                    "split it, or raise that"
                )
                text = excerpt(columns[1][row])
                self._reject(files[row], Rejected(numbers[row], error, text))
            table = table.filter(pa.array(fits))
            sizes, places = sizes[fits], places[fits]
        self.totals["replaced"].update(
            records=int(np.count_nonzero(places)), places=int(places.sum())
        )
        while len(table):
            free_bytes = self.shard_bytes - self._buffered_bytes
            filling = int(np.searchsorted(np.cumsum(sizes), free_bytes)) + 1
            rows = min(len(table), filling, MAX_SHARD_ROWS - self._buffered_rows)
            self._tables.append(table.slice(0, rows))
            self.kept += rows
            self._buffered_rows += rows
            self._buffered_bytes += int(sizes[:rows].sum())
            table, sizes = table.slice(rows), sizes[rows:]
            if (
                self._buffered_bytes >= self.shard_bytes
                or self._buffered_rows >= MAX_SHARD_ROWS
            ):
                self._write_shard()

    def close(self) -> None:
        """Write all buffered rows."""
        self._settle()
        if self._buffered_rows:
            self._write_shard()
        for folder, rows in self._rows.items():
            if rows:
                self._write_rows(folder)

    def counts(self) -> Counts:
        """Ledger of the task, in total and for its source."""
        counts = SourceCounts(
            read=self.read,
            kept=self.kept,
            dropped=dict(sorted(self.dropped.items())),
            quarantined=self.quarantined,
            bytes_read=self.text_bytes,
            bytes_kept=self.text_bytes,
        )
        return {**counts, "sources": {self.source: counts}}

    def _reject(self, file: str, record: Rejected) -> None:
        row = QuarantinedRecord(
            source=self.source,
            file=_place(file, record.part),
            record=record.number,
            error=mask_text(record.error),
        )
        if len(self.first_quarantined) < SHOWN_QUARANTINED:
            self.first_quarantined.append(row)
        self.quarantined += 1
        self._note("quarantine", {**row, "excerpt": record.excerpt})

    def _note(self, folder: str, row: Mapping[str, object]) -> None:
        self._rows[folder].append(row)
        if len(self._rows[folder]) >= MAX_QUARANTINE_ROWS:
            self._write_rows(folder)

    def _write_shard(self) -> None:
        table = pa.concat_tables(self._tables).combine_chunks()
        self._tables = []
        self._write(f"part-{self.task}-{self.shards:03d}.parquet", table)
        self.shards += 1
        self.text_bytes += self._buffered_bytes
        self._buffered_rows = self._buffered_bytes = 0

    def _write_rows(self, folder: str) -> None:
        table = pa.Table.from_pylist(self._rows[folder], schema=ROW_SCHEMAS[folder])
        self._write(
            f"{folder}/{self.task}-{self._row_files[folder]:03d}.parquet", table
        )
        self._row_files[folder] += 1
        self._rows[folder] = []

    def _write(self, name: str, table: pa.Table) -> None:
        write_table(self.out / name, table)
        self.files.append(self.out / name)


def _place(file: str, part: str) -> str:
    return f"{file}/{part}" if part else file
