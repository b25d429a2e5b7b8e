"""From a stream of records to document shards of bounded size, and to files of what was quarantined, dropped or lost.

Records that nobody read are in no ledger; a file of 2,000 that was cut to 200 would count as one bad record. So the
records that it lost are estimated, from the first of these that is known:

1. the reader's own knowledge (a table says in its footer how many rows it has);
2. its bytes: damage behind a third of them lost twice the records before it;
3. the other files of its source (for a member: the other members): it held as many records as they do in the mean, or
   as many for its bytes, whichever is more;
4. nothing: as many as were read, as if it had been cut in its middle. That exceeds every sane limit, on purpose: of a
   source that is one file which ends early, nobody knows how much is missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.counts import Counts, add_counts
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, QUARANTINE_SCHEMA, hash_document, hash_documents, write_table
from gristmill.dataprep.reading.records import Dropped, Ended, Read, Record, Records, Rejected, Skipped, excerpt
from gristmill.dataprep.secrets import mask_text

SHOWN_DAMAGED = 20
"""Damaged files that a summary lists, those that lost most first."""


@dataclass(frozen=True)
class Damaged:
    """A file, or a member of an archive, of which records are lost.

    Attributes:
        source, file: where it is.
        error: why it could not be read on.
        records: that were read of it.
        stored_bytes, read_bytes: its size, and what was read of it.
        member: whether it lies in an archive.
        lost: records that are lost; None where the reader does not know.
    """

    source: str
    file: str
    error: str
    records: int
    stored_bytes: int
    read_bytes: int
    member: bool
    lost: int | None

    @property
    def kind(self) -> str:
        """What it is compared with."""
        return "members" if self.member else "files"


def estimate_losses(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each damaged file of a stage lost: `source`, `file`, `records` (read), `lost`, `error`; most lost first.

    Args:
        results: of the tasks, with `source`, `damaged` (Damaged as dictionaries) and `whole`: of the files that were
            read to their end, `files` and `members`, the `number`, `records` and `bytes`.
    """
    whole = add_counts({result["source"]: result["whole"]} for result in results)
    found = []
    for one in (Damaged(**entry) for result in results for entry in result["damaged"]):
        lost = lost_records(one, whole[one.source].get(one.kind, {}))
        found.append({"source": one.source, "file": one.file, "records": one.records, "lost": lost, "error": one.error})
    return sorted(found, key=lambda entry: (-entry["lost"], entry["source"], entry["file"]))


def lost_records(file: Damaged, whole: Mapping[str, int]) -> int:
    """How many records a damaged file lost, at least 1; see the module.

    Args:
        whole: `number`, `records` and `bytes` of the files of its source that were read to their end.
    """
    if file.lost is not None:
        return file.lost
    if file.records and 0 < file.read_bytes < file.stored_bytes:
        return math.ceil(file.records * (file.stored_bytes / file.read_bytes - 1))
    number, records, size = (whole.get(key, 0) for key in ("number", "records", "bytes"))
    expected = max(records / number if number else 0, file.stored_bytes * records / size if size else 0)
    return max(math.ceil(expected - file.records) if expected > file.records else file.records, 1)


def describe_loss(loss: Mapping[str, Any]) -> str:
    """One sentence about a damaged file, an entry of `estimate_losses`."""
    return (
        f"source {loss['source']!r}: {loss['file']} could not be read to its end: {loss['error']}; "
        f"{loss['records']:,} records of it were read, about {loss['lost']:,} are lost"
    )


MAX_SHARD_ROWS = 100_000
"""Rows after which a shard ends whatever its size, so that short documents do not pile up in memory."""
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
"""Quarantined records that a summary lists."""


@dataclass
class _Rows:
    """Rows of a table that are not written yet, and where it goes."""

    folder: str
    schema: pa.Schema
    held: list[dict[str, Any]] = field(default_factory=list)
    files: int = 0


@dataclass
class ShardWriter:
    """Fills the shards and the quarantine of one task, a bounded piece at a time.

    Attributes:
        out: folder of the stage's output.
        task: the task's number, which names its files.
        source: the source that the task reads.
        shard_bytes: text bytes (UTF-8) after which a shard ends.
        max_document_bytes: of the longest document; a longer one is quarantined.
        limit: documents to keep; None for all. What comes behind them is not taken.
        files: what was written so far.
        shown: the first quarantined records, for the summary.
    """

    out: Path
    task: str
    source: str
    shard_bytes: int
    max_document_bytes: int
    limit: int | None = None
    files: list[Path] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    """Records without a text to keep, by reason."""
    skipped: Counter[str] = field(default_factory=Counter)
    """What is not meant as a document, by what it is; outside the ledger."""
    replaced: dict[str, int] = field(default_factory=lambda: {"records": 0, "places": 0})
    """Records with bytes that their encoding does not hold, and how many U+FFFD they have instead."""
    too_long: dict[str, int] = field(default_factory=lambda: {"records": 0, "bytes": 0})
    """Records with a text beyond `max_document_bytes`, and the bytes of these texts."""
    skipped_candidates: Counter[str] = field(default_factory=Counter)
    """Of those, the ones of a kind that documents come from."""
    whole: dict[str, Counter[str]] = field(default_factory=lambda: {"files": Counter(), "members": Counter()})
    """Of the files with records that were read to their end, and of such members of archives: `number`, `records` and
    `bytes`."""
    damaged: list[Damaged] = field(default_factory=list)
    """Files and members of which records are lost."""
    kept: int = 0
    quarantined: int = 0
    shards: int = 0
    text_bytes: int = 0
    _held_bytes: int = 0
    _held_rows: int = 0
    _columns: list[list[pa.Array]] = field(default_factory=list)
    """Identities, locators, texts and metadata of documents that are not written yet."""
    _documents: list[tuple[bytes, bytes, bytes, str]] = field(default_factory=list)
    """The same of documents behind these which came one by one."""
    _rejects: _Rows = field(default_factory=lambda: _Rows("quarantine", QUARANTINE_SCHEMA))
    _drops: _Rows = field(default_factory=lambda: _Rows("dropped", DROPPED_SCHEMA))

    def __post_init__(self) -> None:
        self._source = self.source.encode("utf-8")

    @property
    def read(self) -> int:
        """Records so far."""
        return self.kept + self.dropped.total() + self.quarantined

    @property
    def bytes_taken(self) -> int:
        """Text so far, whether written or held."""
        return self.text_bytes + self._held_bytes

    @property
    def is_full(self) -> bool:
        """Whether it has as many documents as it may."""
        return self.kept == self.limit

    def add(self, file: str, record: Read) -> None:
        """Take what was read from `file`; pages have become something else before."""
        if self.is_full:
            return
        if isinstance(record, Records):
            self._keep_together(file, record)
        elif isinstance(record, Record):
            self._keep(file, record)
        elif isinstance(record, Rejected):
            self._reject(file, record)
        elif isinstance(record, Dropped):
            self._drop(file, record)
        elif isinstance(record, Skipped):
            self.skipped[record.reason] += 1
            if record.candidate:
                self.skipped_candidates[record.reason] += 1
        elif isinstance(record, Ended):
            self._end(file, record)
        else:
            raise TypeError(f"{type(record).__name__} is not a result of reading")

    def _keep(self, file: str, record: Record) -> None:
        locator, text = record.locator.encode("utf-8"), record.text.encode("utf-8")
        if len(text) > self.max_document_bytes:
            self._reject_long(file, record, len(text))
            return
        self._documents.append((hash_document(self._source, locator, text), locator, text, record.metadata))
        if record.replaced:
            self.replaced["records"] += 1
            self.replaced["places"] += record.replaced
        self._count(1, len(text))

    def _keep_together(self, file: str, records: Records) -> None:
        sizes = pc.binary_length(records.texts).to_numpy()
        if len(sizes) and sizes.max() > self.max_document_bytes:
            for record in records:
                self.add(file, record)
            return
        number = len(records) if self.limit is None else min(len(records), self.limit - self.kept)
        ids = hash_documents(self._source, records.locators, records.texts)
        ends, begin = np.cumsum(sizes[:number]), 0
        self._settle()
        while begin < number:
            before = int(ends[begin - 1]) if begin else 0
            filling = int(np.searchsorted(ends, before + self.shard_bytes - self._held_bytes)) + 1
            end = min(number, filling, begin + MAX_SHARD_ROWS - self._held_rows)
            self._columns.append(
                [
                    column.slice(begin, end - begin)
                    for column in (ids, records.locators, records.texts, records.metadata)
                ]
            )
            self._count(end - begin, int(ends[end - 1]) - before)
            begin = end

    def _settle(self) -> None:
        """Make columns of what came one by one."""
        if self._documents:
            types = (DOCUMENT_SCHEMA.field("id").type, pa.string(), pa.large_string(), pa.string())
            columns = zip(*self._documents, strict=True)
            self._columns.append([pa.array(column, type) for column, type in zip(columns, types, strict=True)])
            self._documents = []

    def _count(self, documents: int, size: int) -> None:
        """Count what is held now, and write it where that fills a shard."""
        self.kept += documents
        self._held_rows += documents
        self._held_bytes += size
        if self._held_bytes >= self.shard_bytes or self._held_rows >= MAX_SHARD_ROWS:
            self._write_shard()

    def close(self) -> None:
        """Write what is still held."""
        if self._held_rows:
            self._write_shard()
        for rows in (self._rejects, self._drops):
            if rows.held:
                self._write_rows(rows)

    def counts(self) -> Counts:
        """The task's ledger, in total and for its source."""
        counts = {
            "read": self.read,
            "kept": self.kept,
            "dropped": dict(sorted(self.dropped.items())),
            "quarantined": self.quarantined,
            "bytes_read": self.text_bytes,
            "bytes_kept": self.text_bytes,
        }
        return {**counts, "sources": {self.source: counts}}

    def _reject_long(self, file: str, record: Record, size: int) -> None:
        self.too_long["records"] += 1
        self.too_long["bytes"] += size
        error = (
            f"{excerpt(record.locator)}: the text has {size:,} bytes, more than ingest.max_document_bytes = "
            f"{self.max_document_bytes:,}; split it, or raise that"
        )
        self._reject(file, Rejected(record.number, error, excerpt(record.text)))

    def _reject(self, file: str, record: Rejected) -> None:
        row = {
            "source": self.source,
            "file": _place(file, record.part),
            "record": record.number,
            "error": mask_text(record.error),
        }
        if len(self.shown) < SHOWN_QUARANTINED:
            self.shown.append(row)
        self.quarantined += 1
        self._note(self._rejects, {**row, "excerpt": record.excerpt})

    def _end(self, file: str, end: Ended) -> None:
        place = _place(file, end.part)
        ended = Damaged(
            self.source, place, end.error, end.records, end.stored_bytes, end.read_bytes, bool(end.part), end.lost
        )
        if end.error:
            self.damaged.append(ended)
        elif end.records:
            self.whole[ended.kind].update(number=1, records=end.records, bytes=end.stored_bytes)

    def _drop(self, file: str, record: Dropped) -> None:
        self.dropped[record.reason] += 1
        self._note(
            self._drops,
            {
                "source": self.source,
                "file": _place(file, record.part),
                "record": record.number,
                "locator": record.locator,
                "reason": record.reason,
            },
        )

    def _note(self, rows: _Rows, row: dict[str, Any]) -> None:
        rows.held.append(row)
        if len(rows.held) >= MAX_QUARANTINE_ROWS:
            self._write_rows(rows)

    def _write_shard(self) -> None:
        self._settle()
        ids, *others = map(pa.concat_arrays, zip(*self._columns, strict=True))
        source = pa.DictionaryArray.from_arrays(pa.array([0] * len(ids), pa.int32()), pa.array([self.source]))
        self._columns = []
        table = pa.table([ids, source, *others], schema=DOCUMENT_SCHEMA)
        self._write(f"part-{self.task}-{self.shards:03d}.parquet", table)
        self.shards += 1
        self.text_bytes += self._held_bytes
        self._held_rows = self._held_bytes = 0

    def _write_rows(self, rows: _Rows) -> None:
        table = pa.Table.from_pylist(rows.held, schema=rows.schema)
        self._write(f"{rows.folder}/{self.task}-{rows.files:03d}.parquet", table)
        rows.files += 1
        rows.held = []

    def _write(self, name: str, table: pa.Table) -> None:
        write_table(self.out / name, table)
        self.files.append(self.out / name)


def _place(file: str, part: str) -> str:
    return f"{file}/{part}" if part else file
