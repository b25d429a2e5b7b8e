"""Texts of sites (robots.txt, ai.txt, tdmrep.json) from WARC files and tables: a table
per file, sorted by host.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit

import pyarrow as pa

from gristmill.core.files import as_path
from gristmill.core.stage_context import Context
from gristmill.dataprep.decontamination.evaluation_sets import read_items
from gristmill.dataprep.documents import write_table
from gristmill.dataprep.readers.compression import split_compression
from gristmill.dataprep.readers.records import Input, Reading, Record
from gristmill.dataprep.readers.sources import FORMAT_OF, outside_files
from gristmill.dataprep.readers.warc import read_warc
from gristmill.dataprep.row_groups import read_matching
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks

KINDS = ("robots_txt", "ai_txt", "tdmrep")
PATHS = {"/robots.txt": "robots_txt", "/ai.txt": "ai_txt"}
"""Path of a response in a WARC file -> its kind."""
SCHEMA = pa.schema([(name, pa.string()) for name in ("host", "kind", "date", "text")])
"""Texts of sites; an unknown date is empty."""
ROW_GROUP_ROWS = 500
SiteTexts = Mapping[tuple[str, str], Sequence[tuple[str, str]]]
"""(host, kind) -> texts with their dates, in ascending order."""


class SiteTextError(ValueError):
    """A file does not hold texts of sites."""


class OfFile(TypedDict):
    """Payload of a task that reads a file."""

    name: str
    location: str


def gather_site_texts(paths: Sequence[str], context: Context) -> list[Path]:
    """Write the texts of each file as a table, and return the tables.

    Raises:
        SiteTextError: a table has no texts of sites.
        gristmill.dataprep.readers.sources.SourceError: a path matches nothing.
    """
    files = [
        OfFile(name=name, location=location)
        for number, path in enumerate(paths)
        for name, location in outside_files(f"opt_outs.files.{number}", path)
    ]
    tasks = [Task(f"{number:05d}", file) for number, file in enumerate(files)]
    folder = context.work / "site_texts"
    if tasks:
        run_tasks("files", tasks, partial(write_site_texts, folder=folder), context)
    return [folder / f"{task.name}.parquet" for task in tasks]


def write_site_texts(task: Task[OfFile], folder: Path) -> Done:
    """Write the texts of one file as a table."""
    name, path = task.payload["name"], as_path(task.payload["location"])
    extension, compression = split_compression(name)
    is_warc = FORMAT_OF.get(extension) == "warc"
    item = Input(name, path, compression)
    rows = warc_texts(item) if is_warc else table_texts(name, path)
    table = pa.Table.from_pylist([*rows], SCHEMA).sort_by("host")
    written = folder / f"{task.name}.parquet"
    write_table(written, table, ROW_GROUP_ROWS, repeating=())
    return Done([written])


def warc_texts(item: Input) -> Iterator[dict[str, str]]:
    """Yield the texts of sites in a WARC file; its other records are ignored."""
    for record in read_warc(item, Reading(extract="none")):
        if isinstance(record, Record):
            metadata = json.loads(record.metadata)
            parts = urlsplit(metadata.get("url", ""))
            if parts.path in PATHS and parts.hostname:
                yield {
                    "host": parts.hostname,
                    "kind": PATHS[parts.path],
                    "date": metadata.get("date", ""),
                    "text": record.text,
                }


def table_texts(name: str, path: Path) -> Iterator[dict[str, str]]:
    """Yield the texts of sites in a table, by its columns."""
    for item in read_items(name, path):
        texts = {kind: item[kind] for kind in KINDS if kind in item}
        if "host" not in item or not texts:
            raise SiteTextError(
                f"{path}: the columns are {', '.join(item)}; a table of sites has "
                f"`host` and at least one of {', '.join(KINDS)}"
            )
        host, date = str(item["host"]).strip().lower(), str(item.get("date") or "")
        for kind, text in texts.items():
            if text:
                text = text if isinstance(text, str) else json.dumps(text)
                yield {"host": host, "kind": kind, "date": date, "text": text}


def read_site_texts(tables: Sequence[Path], hosts: Collection[str]) -> SiteTexts:
    """Read the texts of some hosts, and of their names without `www.`."""
    names = {*hosts, *(host.removeprefix("www.") for host in hosts)}
    texts: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for table in tables:
        for row in read_matching(table, "host", [*names]).to_pylist():
            texts[row["host"], row["kind"]].append((row["date"], row["text"]))
    return {place: sorted(dated) for place, dated in texts.items()}


def site_text(texts: SiteTexts, host: str, kind: str, date: str) -> str | None:
    """Return the last text of a site up to a date, else its first one; None without
    any. A host without a text has that of its name without `www.`.
    """
    dated = texts.get((host, kind)) or texts.get((host.removeprefix("www."), kind))
    if not dated:
        return None
    place = bisect_right(dated, date, key=itemgetter(0))
    return dated[max(place - 1, 0)][1]
