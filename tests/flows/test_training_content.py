"""The summary of training content, in the order of the European Commission's template,
from manifest and store.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.flows.cli.main import app

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
    Path("web.jsonl").write_text(
        "\n".join(
            map(json.dumps, [*pages, {"text": "Short.", "url": "https://short.org"}])
        )
    )
    Path("seeds.jsonl").write_text(json.dumps({"prompt": "What does a mill do?"}))
    Path("books").mkdir()
    Path("books/one.txt").write_text(WORDS)
    Path("m.yaml").write_text(MANIFEST)
    return tmp_path


def report(*arguments: str) -> str:
    outcome = CliRunner().invoke(app, ["report", "m.yaml", *arguments])
    assert outcome.exit_code == 0, outcome.output
    return Path(outcome.output.strip()).read_text()


@pytest.mark.slow
def test_summary_fills_in_sources_domains_licences_and_steps(
    prepared: Path,
) -> None:
    outcome = CliRunner().invoke(app, ["report", "m.yaml", "--training-summary"])
    assert outcome.exit_code == 2
    assert "ingest is not committed, so there are no documents" in outcome.output
    assert (
        CliRunner()
        .invoke(app, ["run", "m.yaml", "--no-ui", "--until", "filter"])
        .exit_code
        == 0
    )
    lines = report("--training-summary", "--format", "md").splitlines()
    titles = [line for line in lines if line.startswith("##")]
    assert titles == [
        "## 1. General information",
        "## 2. Sources of data",
        "### 2.1 and 2.2 Data sets, public and private",
        "### 2.3 Data crawled and scraped from online sources",
        "### 2.4 User data",
        "### 2.5 Synthetic data",
        "## 3. Aspects of data processing",
        "### 3.1 Reservations of rights (text and data mining opt-outs)",
        "### 3.2 Removal of illegal content, and all other steps",
    ]
    crawled, books = (
        next(line for line in lines if line.startswith(f"| {name} "))
        for name in ("web", "books")
    )
    assert lines.index(books) < lines.index(titles[3]) < lines.index(crawled)
    assert crawled.endswith(
        "| 4 | 0.00 |  |  | not recorded 100.0% | not recorded 100.0% |"
    )
    assert books.endswith(
        "| 1 | 0.00 |  |  | not recorded 100.0% | public domain 100.0% |"
    )
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
    page = report("--training-summary")
    assert "<td>mill.org</td>" in page
    assert "# mine" in report("--format", "md")
    # the file's suffix chooses the format by default
    assert report("--out", "written.md").startswith("# mine")
    assert report("--out", "other.md", "--format", "html").startswith("<!doctype html>")
