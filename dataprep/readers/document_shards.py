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
    hash_document,
    hash_documents,
    write_table,
)
from gristmill.dataprep.readers.records import (
    Dropped,
    Ended,
    Read,
    Record,
    Records,
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
            f"{self.error}; {self.records:,} records of it were read, about "
            f"{self.lost:,} are lost"
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
SHOWN_QUARANTINED = 20
"""Quarantined records in a summary."""


@dataclass
class _Rows:
    """Buffered rows of a table, and its destination."""

    folder: str
    schema: pa.Schema
    pending: list[Mapping[str, object]] = field(default_factory=list)
    files: int = 0


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
    skipped: Counter[str] = field(default_factory=Counter)
    """Items that are not documents, by kind; outside the ledger."""
    replaced: Counter[str] = field(default_factory=lambda: Counter(records=0, places=0))
    """Records with invalid bytes, and the number of their U+FFFD."""
    too_long: Counter[str] = field(default_factory=lambda: Counter(records=0, bytes=0))
    """Records with a text beyond `max_document_bytes`, and the bytes of these texts."""
    skipped_candidates: Counter[str] = field(default_factory=Counter)
    """Skipped items of a kind that may be a document."""
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
    _columns: list[list[pa.Array]] = field(default_factory=list)
    """Ids, locators, texts and metadata of buffered documents."""
    _documents: list[tuple[bytes, bytes, bytes, str]] = field(default_factory=list)
    """Documents after `_columns`, as rows."""
    _rejects: _Rows = field(
        default_factory=lambda: _Rows("quarantine", QUARANTINE_SCHEMA)
    )
    _drops: _Rows = field(default_factory=lambda: _Rows("dropped", DROPPED_SCHEMA))

    def __post_init__(self) -> None:
        self._source = self.source.encode("utf-8")

    @property
    def read(self) -> int:
        """Number of records so far."""
        return self.kept + self.dropped.total() + self.quarantined

    @property
    def bytes_taken(self) -> int:
        """Text bytes so far, written or buffered."""
        return self.text_bytes + self._buffered_bytes

    @property
    def is_full(self) -> bool:
        """True if the limit of documents is reached."""
        return self.kept == self.limit

    def add(self, file: str, record: Read) -> None:
        """Add a record read from `file`; pages must have been extracted."""
        if self.is_full:
            return
        if isinstance(record, Records):
            self._keep_all(file, record)
        elif isinstance(record, Record):
            self._keep(file, record)
        elif isinstance(record, Rejected):
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
            self._note(self._drops, row)
        elif isinstance(record, Skipped):
            self.skipped[record.reason] += 1
            if record.crawl and record.crawl not in self.crawls:
                self.crawls.append(record.crawl)
            if record.candidate:
                self.skipped_candidates[record.reason] += 1
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

    def _keep(self, file: str, record: Record) -> None:
        locator = record.locator.encode("utf-8")
        text = record.text.encode("utf-8")
        if len(text) > self.max_document_bytes:
            self.too_long.update(records=1, bytes=len(text))
            error = (
                f"{excerpt(record.locator)}: the text has {len(text):,} bytes, more "
                f"than ingest.max_document_bytes = {self.max_document_bytes:,}; split "
                "it, or raise that"
            )
            self._reject(file, Rejected(record.number, error, excerpt(record.text)))
            return
        self._documents.append(
            (hash_document(self._source, locator, text), locator, text, record.metadata)
        )
        if record.replaced:
            self.replaced.update(records=1, places=record.replaced)
        self._count(1, len(text))

    def _keep_all(self, file: str, records: Records) -> None:
        sizes = pc.binary_length(records.texts).to_numpy()
        if len(sizes) and sizes.max() > self.max_document_bytes:
            for record in records:
                self.add(file, record)
            return
        number = len(records)
        if self.limit is not None:
            number = min(number, self.limit - self.kept)
        ids = hash_documents(self._source, records.locators, records.texts)
        ends = np.cumsum(sizes[:number])
        begin = 0
        self._settle()
        while begin < number:
            before = int(ends[begin - 1]) if begin else 0
            full = before + self.shard_bytes - self._buffered_bytes
            filling = int(np.searchsorted(ends, full)) + 1
            end = min(number, filling, begin + MAX_SHARD_ROWS - self._buffered_rows)
            part = records.part(begin, end)
            columns = [part.locators, part.texts, part.metadata]
            self._columns.append([ids.slice(begin, end - begin), *columns])
            self._count(end - begin, int(ends[end - 1]) - before)
            begin = end

    def _settle(self) -> None:
        """Convert buffered rows to columns."""
        if self._documents:
            types = (
                DOCUMENT_SCHEMA.field("id").type,
                pa.string(),
                pa.large_string(),
                pa.string(),
            )
            columns = zip(*self._documents, strict=True)
            self._columns.append([*map(pa.array, columns, types)])
            self._documents = []

    def _count(self, documents: int, size: int) -> None:
        """Count buffered documents, and write a shard when it is full."""
        self.kept += documents
        self._buffered_rows += documents
        self._buffered_bytes += size
        if (
            self._buffered_bytes >= self.shard_bytes
            or self._buffered_rows >= MAX_SHARD_ROWS
        ):
            self._write_shard()

    def close(self) -> None:
        """Write all buffered rows."""
        if self._buffered_rows:
            self._write_shard()
        for rows in (self._rejects, self._drops):
            if rows.pending:
                self._write_rows(rows)

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
        self._note(self._rejects, {**row, "excerpt": record.excerpt})

    def _note(self, rows: _Rows, row: Mapping[str, object]) -> None:
        rows.pending.append(row)
        if len(rows.pending) >= MAX_QUARANTINE_ROWS:
            self._write_rows(rows)

    def _write_shard(self) -> None:
        self._settle()
        ids, *columns = map(pa.concat_arrays, zip(*self._columns, strict=True))
        source = pa.DictionaryArray.from_arrays(
            pa.array([0] * len(ids), pa.int32()), pa.array([self.source])
        )
        self._columns = []
        table = pa.table([ids, source, *columns], schema=DOCUMENT_SCHEMA)
        self._write(f"part-{self.task}-{self.shards:03d}.parquet", table)
        self.shards += 1
        self.text_bytes += self._buffered_bytes
        self._buffered_rows = self._buffered_bytes = 0

    def _write_rows(self, rows: _Rows) -> None:
        table = pa.Table.from_pylist(rows.pending, schema=rows.schema)
        self._write(f"{rows.folder}/{self.task}-{rows.files:03d}.parquet", table)
        rows.files += 1
        rows.pending = []

    def _write(self, name: str, table: pa.Table) -> None:
        write_table(self.out / name, table)
        self.files.append(self.out / name)


def _place(file: str, part: str) -> str:
    return f"{file}/{part}" if part else file
