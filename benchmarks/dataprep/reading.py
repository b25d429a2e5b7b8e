"""Reading: what the guarded process, a web archive and JSON lines cost, and how much of the right text is kept.

For speed the pages are made up: navigation around an article of 4 kB each, in a plain HTTP response in a WARC file with
one gzip member per record, as crawls are stored.

For quality they are those of trafilatura's own evaluation. Each comes with snippets of its main text, and with snippets
of its boilerplate. A snippet counts as kept where it occurs in the extracted text, white space aside
(adbar/trafilatura, tests/eval_common.py). The pages lie in the folder of labelled data, below `web/trafilatura_cc`: the
ones whose licence lets them be passed on.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import zstandard

from benchmarks.checkout import data_folder
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, fastest, row
from gristmill.core.stage_context import Context
from gristmill.dataprep.reading import ingest
from gristmill.dataprep.reading.extraction import EXTRACTORS, extract
from gristmill.dataprep.reading.extraction_guard import Guard, extract_pages
from gristmill.dataprep.reading.readers import read_file, read_records
from gristmill.dataprep.reading.records import Page, Reading, Record, Records
from gristmill.dataprep.reading.sources import find_files
from gristmill.mixtures.sources import ExtractOptions

PAGES = {"resiliparse": 1000, "trafilatura": 100}
"""Pages that each extractor gets."""
LINKS = 500
"""In the navigation of a page; they bring it to some 40 kB, the size of an ordinary page without its scripts."""
RECORDS = 100_000
"""Lines of JSON, with texts of 400 characters and four fields of metadata: what is short shows what a record costs."""
FIELDS = {"text": "VARCHAR", "url": "VARCHAR", "lang": "VARCHAR", "date": "VARCHAR", "score": "DOUBLE"}
"""Of a line, and their types for DuckDB."""
INGEST_BOUND = 80.0
"""MB of JSONL per second of one core."""
REPEATS = 3
OPTIONS = ExtractOptions().model_dump()
SET = "web/trafilatura_cc"
SETTINGS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "resiliparse": ("resiliparse", {}),
    "trafilatura": ("trafilatura", {}),
    "trafilatura, favor precision": ("trafilatura", {"favor": "precision"}),
}
ALL_TEXT: tuple[str, Mapping[str, Any]] = ("resiliparse", {"favor": "recall"})
"""The peer: everything that a browser would show."""


def speed_rows() -> Iterator[Row]:
    """Pages or records per second, the best of some repeats."""
    pages = make_pages(max(PAGES.values()))
    for extractor, number in PAGES.items():
        name = "extraction_guard_vs_direct" + ("" if extractor == "resiliparse" else f", {extractor}")
        ours, peer = partial(guarded, pages[:number], extractor), partial(direct, pages[:number], extractor)
        yield compare(name, number, ours, peer, "peer: the library in this process, which a bad page would end")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "crawl.warc.gz"
        path.write_bytes(make_warc(pages))
        ours, peer = partial(read_pages, path), partial(iterate, path)
        yield compare("WARC to pages, against fastwarc alone", len(pages), ours, peer, "peer: fastwarc tells no damage")
        yield from jsonl_rows(Path(folder))


def jsonl_rows(folder: Path) -> Iterator[Row]:
    """JSON lines to columns, on one thread, and to document shards, in seconds of one core."""
    content = make_jsonl(RECORDS)
    (folder / "texts.jsonl").write_bytes(content)
    (folder / "texts.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
    for name, suffix in (("JSONL", "jsonl"), ("JSONL with zstd", "jsonl.zst")):
        path = folder / f"texts.{suffix}"
        for peer, reads in (("DuckDB", read_with_duckdb), ("pyarrow.json", read_with_pyarrow)):
            yield compare(
                f"{name} to records, against {peer}",
                RECORDS,
                partial(read_jsonl, path),
                partial(reads, path),
                "peer: five columns, the same; no locators, and a bad line ends it",
                "records/s",
            )
    seconds = min(ingest_seconds(folder / "texts.jsonl", folder / f"out-{repeat}") for repeat in range(REPEATS))
    yield row(
        "JSONL to document shards, of one core",
        len(content) / seconds / 1e6,
        INGEST_BOUND,
        "MB/s",
        "the whole stage; peer: a bound, eight times what a whole chain must reach",
    )


def compare(
    name: str, number: int, ours: Callable[[], int], peer: Callable[[], int], note: str, unit: str = "pages/s"
) -> Row:
    """Time both by turns; each must give all of them."""
    for work in (ours, peer):
        if (done := work()) != number:
            raise RuntimeError(f"{name}: {done} of {number} came out")
    our_seconds, peer_seconds = fastest(REPEATS, ours, peer)
    return row(name, number / our_seconds, number / peer_seconds, unit, note)


def guarded(pages: list[bytes], extractor: str) -> int:
    """Documents out of pages through the guarded process, its start included."""
    items = (Page(number, f"page/{number}", page) for number, page in enumerate(pages))
    with Guard(extractor, OPTIONS) as guard:
        return sum(isinstance(item, Record) for item in extract_pages(items, guard, Reading()))


def direct(pages: list[bytes], extractor: str) -> int:
    """Texts out of pages in this process."""
    return sum(bool(extract(page, "auto", "", EXTRACTORS[extractor], OPTIONS).text) for page in pages)


def read_pages(path: Path) -> int:
    """Pages of a WARC as `ingest` reads them."""
    (file,) = find_files("bench", {"path": str(path)}).files
    return sum(isinstance(item, Page) for item in read_records(file, Reading()))


def iterate(path: Path) -> int:
    """Pages of a WARC as fastwarc reads them by itself."""
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    with path.open("rb") as stream:
        records = ArchiveIterator(stream, record_types=WarcRecordType.response, parse_http=True, auto_decode="all")
        return sum(bool(record.reader.read()) for record in records)


def read_jsonl(path: Path) -> int:
    """Records of a JSONL file as `ingest` reads them."""
    (file,) = find_files("bench", {"path": str(path)}).files
    items = read_file(file, Reading())
    return sum(len(item) if isinstance(item, Records) else isinstance(item, Record) for item in items)


def read_with_duckdb(path: Path) -> int:
    """Records of a JSONL file as DuckDB reads them on one thread."""
    import duckdb

    with duckdb.connect(config={"threads": 1}) as connection:
        found = connection.read_json(str(path), columns=FIELDS, format="newline_delimited")
        return len(found.to_arrow_table())


def read_with_pyarrow(path: Path) -> int:
    """Records of a JSONL file as Arrow reads them on one thread."""
    with pa.input_stream(str(path)) as stream:
        return len(pyarrow.json.read_json(stream, pyarrow.json.ReadOptions(use_threads=False)))


def ingest_seconds(path: Path, out: Path) -> float:
    """Seconds of processor time that the whole stage takes, on one worker."""
    context = Context(work=out / "work", stage="ingest", workers=1, emit=lambda event: None)
    begun = time.process_time()
    ingest.run({}, {"sources": {"bench": {"path": str(path)}}}, out / "data", context)
    return time.process_time() - begun


def make_jsonl(number: int) -> bytes:
    """Lines of JSON, the same in every run."""
    texts = [text[:400] for text in documentation(100)]
    records = (
        {
            "text": f"{at} {texts[at % len(texts)]}",
            "url": f"http://bench.example/{at}",
            "lang": "en",
            "date": "2024-05-01T00:00:00Z",
            "score": at / number,
        }
        for at in range(number)
    )
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def make_pages(number: int) -> list[bytes]:
    """Pages of HTML, the same in every run."""
    source = random.Random(2)
    pages = []
    for title, text in enumerate(documentation(number)):
        words = text.split()
        paragraphs = [" ".join(words[at : at + 80]) + "." for at in range(0, len(words), 80)]
        targets = ((source.random(), source.choice(words), source.choice(words)) for _ in range(LINKS))
        links = "".join(f'<li><a href="/{target}">{one} {two}</a></li>' for target, one, two in targets)
        body = "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
        pages.append(
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Page {title}</title></head><body>'
            f"<nav><ul>{links}</ul></nav><article><h1>Page {title}</h1>{body}</article></body></html>".encode()
        )
    return pages


def make_warc(pages: list[bytes]) -> bytes:
    """A WARC of a request and a response for each page, each record a gzip member."""
    sink = io.BytesIO()
    for number, page in enumerate(pages):
        response = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page
        for kind, content in (("request", b"GET / HTTP/1.1\r\n\r\n"), ("response", response)):
            header = (
                f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{kind}-{number}>\r\n"
                f"WARC-Target-URI: http://bench.example/{number}\r\nContent-Type: application/http; msgtype={kind}\r\n"
                f"Content-Length: {len(content)}\r\n\r\n"
            )
            sink.write(gzip.compress(header.encode() + content + b"\r\n\r\n", 6))
    return sink.getvalue()


@dataclass(frozen=True)
class Snippets:
    """What should, and what should not, be in a page's text."""

    wanted: Sequence[str]
    unwanted: Sequence[str]


@dataclass(frozen=True)
class Score:
    """Shares of snippets: of those kept that are wanted, of those wanted that are kept, and their harmonic mean."""

    precision: float
    recall: float
    f1: float


def quality_rows() -> Iterator[Row]:
    """One row per extractor and score; the peer keeps all text of the page."""
    folder = data_folder() / SET
    if not (folder / "evaldata.json").exists():
        yield row("main text extraction", None, None, "", f"{folder} has no labelled pages")
        return
    labelled = read_labels(folder / "evaldata.json")
    everything = score(labelled, extract_all(folder, *ALL_TEXT))
    for name, (extractor, options) in SETTINGS.items():
        found = score(labelled, extract_all(folder, extractor, options))
        for what in ("precision", "recall", "f1"):
            yield row(
                f"{name}: {what}",
                getattr(found, what),
                getattr(everything, what),
                "share",
                f"{len(labelled)} pages; peer: all text of the page",
            )


def read_labels(path: Path) -> dict[str, Snippets]:
    """The snippets by the name of the page's file."""
    entries = json.loads(path.read_text("utf-8")).values()
    return {entry["file"]: Snippets(entry["with"], entry["without"]) for entry in entries}


def extract_all(folder: Path, extractor: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The text of every page by the name of its file, read and extracted as `ingest` does it."""
    (file,) = find_files("pages", {"path": str(folder / "html.tar.zst")}).files
    reading = Reading(extract=extractor)
    with Guard(extractor, ExtractOptions.model_validate(options).model_dump()) as guard:
        records = list(extract_pages(read_records(file, reading), guard, reading))
    return {record.locator.rpartition("/")[2]: record.text for record in records if isinstance(record, Record)}


def score(labelled: Mapping[str, Snippets], texts: Mapping[str, str]) -> Score:
    """Count snippets over all pages; a page without text keeps none."""
    kept = wrongly_kept = wanted = 0
    for name, snippets in labelled.items():
        text = _plain(texts.get(name, ""))
        kept += sum(_plain(snippet) in text for snippet in snippets.wanted)
        wrongly_kept += sum(_plain(snippet) in text for snippet in snippets.unwanted)
        wanted += len(snippets.wanted)
    precision = kept / (kept + wrongly_kept) if kept else 0.0
    recall = kept / wanted if wanted else 0.0
    return Score(precision, recall, 2 * precision * recall / (precision + recall) if kept else 0.0)


def _plain(text: str) -> str:
    return " ".join(text.split())
