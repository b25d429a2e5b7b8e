"""The summary of training content, in the order of the European Commission's template,
from manifest and store.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gristmill.dataprep.readers.pythondocs import DOCSTRINGS, python_listing
from gristmill.flows.report.source_origins import file_days
from tests.commands import call
from tests.jsonl import write_jsonl

WORDS = (
    "The river ran past the old mill and turned its wheel all day long, and "
    "nobody had to look after it."
)
MANIFEST = """
name: mine
sources:
  web: {path: web.jsonl}
  books: {path: books, licence: public domain}
prepare:
  - filter: {rules: {gopher_quality: {min_words: 5}}}
examples:
  taught: {data: [{path: seeds.jsonl}], model: {endpoint: "http://127.0.0.1:9/v1", model: writer}}
"""


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    pages = [
        {"text": f"{number} {WORDS}", "url": f"https://www.{host}.org/{number}"}
        for number, host in enumerate(["mill"] * 3 + ["river"])
    ]
    write_jsonl(
        Path("web.jsonl"), [*pages, {"text": "Short.", "url": "https://short.org"}]
    )
    Path("seeds.jsonl").write_text(json.dumps({"prompt": "What does a mill do?"}))
    Path("books").mkdir()
    Path("books/one.txt").write_text(WORDS)
    Path("m.yaml").write_text(MANIFEST)
    return tmp_path


def report(*arguments: str) -> str:
    outcome = call("report", "m.yaml", *arguments)
    return Path(outcome.output.strip()).read_text()


@pytest.mark.slow
def test_summary_fills_in_sources_domains_licences_and_steps(
    prepared: Path,
) -> None:
    outcome = call("report", "m.yaml", "--training-summary", code=2)
    assert "no documents are read yet" in outcome.output
    call("run", "m.yaml", "--no-ui", "--until", "filter")
    lines = report("--training-summary", "--format", "md").splitlines()
    titles = [line for line in lines if line.startswith("##")]
    assert titles == [
        "## 1. General information",
        "## 2. Sources of data",
        "### 2.1 and 2.2 Data sets, public and private",
        "### 2.3 Data crawled and scraped from online sources",
        "### 2.4 User data",
        "### 2.5 Synthetic data",
        "## Licences of the sources of data",
        "## 3. Aspects of data processing",
        "### 3.1 Reservations of rights (text and data mining opt-outs)",
        "### 3.2 Removal of illegal content, and all other steps",
    ]
    crawled, books = (
        next(line for line in lines if line.startswith(f"| {name} "))
        for name in ("web", "books")
    )
    assert lines.index(books) < lines.index(titles[3]) < lines.index(crawled)
    public_domain = "LicenseRef-scancode-public-domain"
    collected = f"{datetime.now(UTC).date().isoformat()} (dates of the files)"
    for row, documents, licence in ((crawled, 4, "unknown"), (books, 1, public_domain)):
        assert row.endswith(
            f"| {documents} | 0.00 |  |  | not recorded 100.0% | {licence} 100.0% | "
            f"{collected} |  |"
        )
    assert any(line.startswith(f"| books | {public_domain} | 1 |") for line in lines)
    assert [line for line in lines if ".org |" in line] == [
        "| mill.org | 3 | 0.00 |",
        "| river.org | 1 | 0.00 |",
    ]
    assert r"| filter | 6 | 5 | gopher\_quality/min\_words |" in lines
    (taught,) = (line for line in lines if line.startswith("| taught "))
    assert taught.endswith("/seeds.jsonl | writer |")
    assert "| models that it depends on | text written by writer |" in lines
    assert (
        "| provider, authorised representative | to be filled in by the provider |"
        in lines
    )
    assert "<td>mill.org</td>" in report("--training-summary")
    assert "# mine" in report("--format", "md")
    # the file's suffix chooses the format by default
    assert report("--out", "written.md").startswith("# mine")
    assert report("--out", "other.md", "--format", "html").startswith("<!doctype html>")


CRAWL = """WARC/1.0
WARC-Type: warcinfo
WARC-Date: 2024-05-17T23:31:22Z
Content-Length: {size}

{fields}

WARC/1.0
WARC-Type: conversion
WARC-Target-URI: https://mill.org/wheel
WARC-Date: 2024-05-18T01:58:10Z
WARC-Record-ID: <urn:uuid:292f457d-203c-42f2-a1b5-69a4dabefd4f>
Content-Type: text/plain
Content-Length: {length}

{text}

"""
FIELDS = "software: Nutch 1.19\r\noperator: A. Person\r\nrobots: checked\r\n"


@pytest.fixture
def crawled(prepared: Path) -> Path:
    """A run over a crawl and text files beside a licence, up to the tokens."""
    text = f"{WORDS} " * 20
    Path("crawl.warc").write_text(
        CRAWL.format(fields=FIELDS, size=len(FIELDS), text=text, length=len(text)),
        newline="\r\n",
    )
    for number in range(30):
        Path(f"books/{number}.txt").write_text(f"{number} {WORDS} " * 20)
    Path("books/package.json").write_text('{"license": "MIT"}')
    Path("m.yaml").write_text(
        "name: mine\nsources:\n  web: {path: crawl.warc}\n"
        "  books: {path: 'books/*.txt'}\nprepare: [licences]\n"
        "tokenizer: {vocab_size: 300}\n"
    )
    call(*["run", "m.yaml", "--no-ui", "--until", "tokenize"])
    return prepared


@pytest.mark.slow
def test_licences_by_source_with_the_unknown_share(crawled: Path) -> None:
    answer = json.loads(call("licences", "m.yaml", "--json").output)
    assert answer["basis"] == "tokens"
    assert set(answer["licences"]) == {"MIT", "unknown"}
    (unknown,) = (row for row in answer["shares"] if row["licence"] == "unknown")
    assert unknown["source"] == "web"
    total = sum(row["tokens"] for row in answer["shares"])
    assert answer["unknown"] == unknown["share"] == unknown["tokens"] / total


@pytest.mark.slow
def test_versions_of_a_source_without_files_are_no_days() -> None:
    assert file_days(python_listing(DOCSTRINGS)) == []


def test_cards_state_the_collection_and_the_licences(crawled: Path) -> None:
    call("publish", "m.yaml", "--cards", "cards")
    assert {path.name for path in Path("cards").iterdir()} == {
        "README.md",
        "croissant.json",
        "licences.json",
        "training-content.md",
    }
    metadata = json.loads(Path("cards/croissant.json").read_text())
    today = datetime.now(UTC).date().isoformat()
    assert metadata["rai:dataCollectionTimeframe"] == ["2024-05-18", today]
    assert metadata["rai:dataCollectionType"] == ["Web Scraping"]
    assert metadata["rai:hasSyntheticData"] is False
    collection = (
        "web: web crawl, 2024-05-18 (WARC-Date), software: Nutch 1.19; robots.txt: "
        "checked"
    )
    assert collection in metadata["rai:dataCollection"]
    assert "Person" not in metadata["rai:dataCollection"]
    shares = json.loads(Path("cards/licences.json").read_text())
    row = f"| books | MIT | 31 | {shares['shares'][0]['text_bytes']:,} bytes |"
    assert row in Path("cards/README.md").read_text()
    summary = Path("cards/training-content.md").read_text()
    assert "| 2024-05-18 (WARC-Date) | software: Nutch 1.19; " in summary
    assert f"| latest date of acquisition | {today} (dates of the files) |" in summary


@pytest.mark.slow
def test_cards_beside_an_export_describe_its_files(crawled: Path) -> None:
    export = ["export-documents", "m.yaml", "--format", "hf", "--out", "set"]
    publish = ["publish", "m.yaml", "--cards", "set"]
    for command in (export, publish, publish):
        call(*command)
    (file, _) = json.loads(Path("set/croissant.json").read_text())["distribution"]
    assert file["name"] == "data/train-00000-of-00001.parquet"
    dataset = pytest.importorskip("mlcroissant").Dataset("set/croissant.json")
    assert not dataset.metadata.ctx.issues.errors
    assert len(list(dataset.records("documents"))) == 32
    Path("other").mkdir()
    Path("other/README.md").write_text("mine")
    Path("plain").mkdir()
    Path("plain/_documents.json").write_text('{"format": "parquet"}')
    for folder in ("other", "plain"):
        call("publish", "m.yaml", "--cards", folder, code=2)
