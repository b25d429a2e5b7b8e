"""Reading: cost of the guarded process, of a web archive and of JSON lines.

The pages are made up: navigation around an article of 4 kB each, in a plain HTTP
response in a WARC file with one gzip member per record, as crawls are stored.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.json
import zstandard

from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, fastest, row
from gristmill.core.stage_context import Context
from gristmill.dataprep.readers import ingest
from gristmill.dataprep.readers.extraction_guard import Guard, extract_pages
from gristmill.dataprep.readers.html import EXTRACTORS, extract
from gristmill.dataprep.readers.readers import read_file, read_records
from gristmill.dataprep.readers.records import Page, Reading, Record
from gristmill.dataprep.readers.sources import find_files
from gristmill.mixtures.schema.sources import DocumentFiles, ExtractOptions

PAGES = {"resiliparse": 1000, "trafilatura": 100}
"""Extractor -> number of its pages."""
LINKS = 500
"""Links in the navigation of a page, for some 40 kB, the size of an ordinary page
without its scripts.
"""
RECORDS = 100_000
"""Lines of JSON, with texts of 400 characters and four fields of metadata: short ones
show the cost of a record.
"""
FIELDS = {
    "text": "VARCHAR",
    "url": "VARCHAR",
    "lang": "VARCHAR",
    "date": "VARCHAR",
    "score": "DOUBLE",
}
"""Fields of a line, and their types for DuckDB."""
INGEST_BOUND = 80.0
"""MB of JSONL per second of one core."""
REPEATS = 3
OPTIONS = ExtractOptions().model_dump()


def speed_rows() -> Iterator[Row]:
    """Measure pages or records per second."""
    pages = make_pages(documentation(max(PAGES.values())))
    for extractor, number in PAGES.items():
        name = "extraction_guard_vs_direct" + (
            "" if extractor == "resiliparse" else f", {extractor}"
        )
        ours, peer = (
            partial(guarded, pages[:number], extractor),
            partial(direct, pages[:number], extractor),
        )
        yield compare(
            name,
            number,
            ours,
            peer,
            "peer: the library in this process, which a bad page would end",
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "crawl.warc.gz"
        path.write_bytes(make_warc(pages))
        ours, peer = partial(read_pages, path), partial(iterate, path)
        yield compare(
            "WARC to pages, against fastwarc alone",
            len(pages),
            ours,
            peer,
            "peer: fastwarc tells no damage",
        )
        yield from jsonl_rows(Path(folder))


def jsonl_rows(folder: Path) -> Iterator[Row]:
    """Measure JSON lines to columns, on one thread, and to document shards, in seconds
    of one core.
    """
    content = make_jsonl(RECORDS)
    (folder / "texts.jsonl").write_bytes(content)
    (folder / "texts.jsonl.zst").write_bytes(
        zstandard.ZstdCompressor().compress(content)
    )
    for name, suffix in (("JSONL", "jsonl"), ("JSONL with zstd", "jsonl.zst")):
        path = folder / f"texts.{suffix}"
        for peer, read in (
            ("DuckDB", read_with_duckdb),
            ("pyarrow.json", read_with_pyarrow),
        ):
            yield compare(
                f"{name} to records, against {peer}",
                RECORDS,
                partial(read_jsonl, path),
                partial(read, path),
                "peer: five columns, the same; no locators, and a bad line ends it",
                "records/s",
            )
    seconds = min(
        ingest_seconds(folder / "texts.jsonl", folder / f"out-{repeat}")
        for repeat in range(REPEATS)
    )
    yield row(
        "JSONL to document shards, of one core",
        len(content) / seconds / 1e6,
        INGEST_BOUND,
        "MB/s",
        "the whole stage; peer: a bound, eight times what a whole chain must reach",
    )


def compare(
    name: str,
    number: int,
    ours: Callable[[], int],
    peer: Callable[[], int],
    note: str,
    unit: str = "pages/s",
) -> Row:
    """Time both sides by turns.

    Raises:
        RuntimeError: a side does not return all items.
    """
    for work in (ours, peer):
        count = work()
        if count != number:
            raise RuntimeError(f"{name}: {count} of {number} came out")
    our_seconds, peer_seconds = fastest(REPEATS, ours, peer)
    return row(name, number / our_seconds, number / peer_seconds, unit, note)


def guarded(pages: list[bytes], extractor: str) -> int:
    """Count documents extracted by the guarded process, including its start."""
    items = (Page(number, f"page/{number}", page) for number, page in enumerate(pages))
    with Guard(extractor, OPTIONS) as guard:
        return sum(
            isinstance(item, Record) for item in extract_pages(items, guard, Reading())
        )


def direct(pages: list[bytes], extractor: str) -> int:
    """Count texts extracted in this process."""
    return sum(
        bool(extract(page, "auto", "", EXTRACTORS[extractor], OPTIONS).parts[0].strip())
        for page in pages
    )


def read_pages(path: Path) -> int:
    """Count pages of a WARC, read as by `ingest`."""
    (file,) = find_files(
        "bench", DocumentFiles.model_validate({"path": str(path)})
    ).files
    return sum(isinstance(item, Page) for item in read_records(file, Reading()))


def iterate(path: Path) -> int:
    """Count pages of a WARC, read by fastwarc alone."""
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    with path.open("rb") as stream:
        records = ArchiveIterator(
            stream,
            record_types=WarcRecordType.response,
            parse_http=True,
            auto_decode="all",
        )
        return sum(bool(record.reader.read()) for record in records)


def read_jsonl(path: Path) -> int:
    """Count records of a JSONL file, read as by `ingest`."""
    (file,) = find_files(
        "bench", DocumentFiles.model_validate({"path": str(path)})
    ).files
    items = read_file(file, Reading())
    return sum(isinstance(item, Record) for item in items)


def read_with_duckdb(path: Path) -> int:
    """Count records of a JSONL file, read by DuckDB on one thread."""
    import duckdb

    with duckdb.connect(config={"threads": 1}) as connection:
        records = connection.read_json(
            str(path), columns=FIELDS, format="newline_delimited"
        )
        return len(records.to_arrow_table())


def read_with_pyarrow(path: Path) -> int:
    """Count records of a JSONL file, read by Arrow on one thread."""
    with pa.input_stream(str(path)) as stream:
        return len(
            pyarrow.json.read_json(stream, pyarrow.json.ReadOptions(use_threads=False))
        )


def ingest_seconds(path: Path, out: Path) -> float:
    """Return seconds of processor time of the whole stage, on one worker."""
    context = Context(work=out / "work", stage="ingest", emit=lambda event: None)
    start = time.process_time()
    ingest.run({}, {"sources": {"bench": {"path": str(path)}}}, out / "data", context)
    return time.process_time() - start


def make_jsonl(number: int) -> bytes:
    """Return lines of JSON, the same in every run."""
    texts = [text[:400] for text in documentation(100)]
    records = (
        {
            "text": f"{line} {texts[line % len(texts)]}",
            "url": f"http://bench.example/{line}",
            "lang": "en",
            "date": "2024-05-01T00:00:00Z",
            "score": line / number,
        }
        for line in range(number)
    )
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def make_pages(texts: Iterable[str]) -> list[bytes]:
    """Return a page of HTML for each text, the same in every run."""
    source = random.Random(2)
    pages = []
    for title, text in enumerate(texts):
        words = text.split()
        paragraphs = [
            " ".join(words[start : start + 80]) + "."
            for start in range(0, len(words), 80)
        ]
        links = "".join(
            f'<li><a href="/{source.random()}">{source.choice(words)} '
            f"{source.choice(words)}</a></li>"
            for _ in range(LINKS)
        )
        body = "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
        pages.append(
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Page '
            f"{title}</title></head><body>"
            f"<nav><ul>{links}</ul></nav><article><h1>Page "
            f"{title}</h1>{body}</article></body></html>".encode()
        )
    return pages


def make_warc(pages: list[bytes]) -> bytes:
    """Return a WARC of a request and a response for each page, each record a gzip
    member.
    """
    sink = io.BytesIO()
    for number, page in enumerate(pages):
        response = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page
        )
        for kind, content in (
            ("request", b"GET / HTTP/1.1\r\n\r\n"),
            ("response", response),
        ):
            header = (
                f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: "
                f"<urn:uuid:{kind}-{number}>\r\n"
                f"WARC-Target-URI: http://bench.example/{number}\r\nContent-Type: "
                f"application/http; msgtype={kind}\r\n"
                f"Content-Length: {len(content)}\r\n\r\n"
            )
            sink.write(gzip.compress(header.encode() + content + b"\r\n\r\n", 6))
    return sink.getvalue()
