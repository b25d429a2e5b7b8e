"""Texts of sites (robots.txt, ai.txt, tdmrep.json) from WARC files and tables, as one
table sorted by host.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict, get_args
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from gristmill.core.files import as_path, atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.decontamination.evaluation_sets import read_items
from gristmill.dataprep.documents import read_table, write_table
from gristmill.dataprep.readers.compression import split_compression
from gristmill.dataprep.readers.records import Input, Reading, Record
from gristmill.dataprep.readers.sources import FORMAT_OF, outside_files
from gristmill.dataprep.readers.warc import read_warc
from gristmill.dataprep.row_groups import read_matching
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks

SiteText = Literal["robots_txt", "ai_txt", "tdmrep"]
SITE_TEXTS: tuple[SiteText, ...] = get_args(SiteText)
PATHS: Mapping[str, SiteText] = {"/robots.txt": "robots_txt", "/ai.txt": "ai_txt"}
"""Path of a response in a WARC file -> its kind."""
SCHEMA = pa.schema([(name, pa.string()) for name in ("host", "kind", "date", "text")])
ROW_GROUP_ROWS = 500
LIMITS = {"threads": 1, "memory_limit": "1GB"}
"""Limits of the database that sorts, which then spills to a temporary folder."""


class SiteTextError(ValueError):
    """A file does not hold texts of sites."""


class Row(NamedTuple):
    """A text of a site; `date` is empty if unknown."""

    host: str
    kind: str
    date: str
    text: str


class OfFile(TypedDict):
    """Payload of a task that reads a file."""

    name: str
    location: str


@dataclass
class Site:
    """Texts of a host by kind, each with its dates in ascending order."""

    texts: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def text(self, kind: SiteText, date: str) -> str | None:
        """The last text up to a date, else the first one; None without any."""
        dated = self.texts.get(kind)
        if not dated:
            return None
        place = bisect_right(dated, date, key=lambda entry: entry[0])
        return dated[max(place - 1, 0)][1]


def gather_site_texts(paths: Sequence[str], context: Context) -> Path | None:
    """Write the texts of all files as one table, sorted by host; None without files.

    Raises:
        SiteTextError: a table has no texts of sites.
        gristmill.dataprep.readers.sources.SourceError: a path matches nothing.
    """
    tasks = [
        Task(f"{number:03d}-{place:05d}", OfFile(name=name, location=location))
        for number, path in enumerate(paths)
        for place, (name, location) in enumerate(
            outside_files(f"opt_outs.files.{number}", path)
        )
    ]
    if not tasks:
        return None
    folder = context.work / "site_texts"
    run_tasks("files", tasks, partial(read_site_texts, folder=folder), context)
    table = folder / "sorted.parquet"
    sort_texts([folder / f"{task.name}.parquet" for task in tasks], table)
    return table


def read_site_texts(task: Task[OfFile], folder: Path) -> Done:
    """Write the texts of one file as a table."""
    name, path = task.payload["name"], as_path(task.payload["location"])
    extension, compression = split_compression(name)
    if FORMAT_OF.get(extension) == "warc":
        rows = list(warc_texts(Input(name, path, compression)))
    else:
        rows = list(table_texts(name, path))
    columns = zip(*rows, strict=True) if rows else [[]] * len(SCHEMA)
    table = pa.table(list(map(pa.array, columns)), schema=SCHEMA)
    written = folder / f"{task.name}.parquet"
    write_table(written, table, repeating=())
    return Done([written])


def warc_texts(item: Input) -> Iterator[Row]:
    """Texts of sites in a WARC file; its other records are ignored."""
    for record in read_warc(item, Reading(extract="none")):
        if isinstance(record, Record):
            metadata = json.loads(record.metadata)
            parts = urlsplit(metadata.get("url", ""))
            kind = PATHS.get(parts.path)
            if kind is not None and parts.hostname:
                yield Row(parts.hostname, kind, metadata.get("date", ""), record.text)


def table_texts(name: str, path: Path) -> Iterator[Row]:
    """Texts of sites in a table, by its columns."""
    for item in read_items(name, path):
        kinds = [kind for kind in SITE_TEXTS if kind in item]
        if "host" not in item or not kinds:
            raise SiteTextError(
                f"{path}: the columns are {', '.join(item)}; a table of sites has "
                f"`host` and at least one of {', '.join(SITE_TEXTS)}"
            )
        for kind in kinds:
            text = item[kind]
            if text is None or text == "":
                continue
            if not isinstance(text, str):  # JSON inside JSON
                text = json.dumps(text)
            date = str(item.get("date") or "")
            yield Row(str(item["host"]).strip().lower(), kind, date, text)


def sort_texts(parts: Sequence[Path], path: Path) -> None:
    """Write the rows of all parts, sorted by host, without holding them in memory."""
    import duckdb

    def batches() -> Iterator[pa.RecordBatch]:
        for part in parts:
            yield from read_table(part).to_batches()

    with (
        tempfile.TemporaryDirectory() as folder,
        duckdb.connect(config={**LIMITS, "temp_directory": folder}) as connection,
        atomic_write(path) as sink,
        pq.ParquetWriter(
            sink, SCHEMA, compression="zstd", write_page_checksum=True
        ) as writer,
    ):
        connection.register(
            "rows", pa.RecordBatchReader.from_batches(SCHEMA, batches())
        )
        rows = connection.sql("SELECT DISTINCT * FROM rows ORDER BY ALL")
        for batch in rows.to_arrow_reader(ROW_GROUP_ROWS):
            writer.write_batch(batch.cast(SCHEMA))


def read_sites(path: Path, hosts: Sequence[str]) -> dict[str, Site]:
    """Texts of some hosts; a host without any has those of its name without `www.`."""
    names = {name for host in hosts for name in (host, host.removeprefix("www."))}
    sites: dict[str, Site] = {}
    for row in read_matching(path, "host", sorted(names)).to_pylist():
        texts = sites.setdefault(row["host"], Site()).texts
        texts.setdefault(row["kind"], []).append((row["date"], row["text"]))
    nothing = Site()
    return {
        host: sites.get(host) or sites.get(host.removeprefix("www.")) or nothing
        for host in hosts
    }
