"""Every example of docs/documents.md runs, in page order, in a folder with the files
that it names.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.checkout import ROOT
from tests.flows.doc_pages import BLOCK, run_command
from tests.jsonl import write_jsonl

pytestmark = pytest.mark.slow

GUIDE = ROOT / "docs" / "documents.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the page's commands run."""
    (tmp_path / "data").mkdir()
    (tmp_path / "notes").mkdir()
    texts = [
        f"Letter {number}: " + "the quiet river and the old garden " * (number + 1)
        for number in range(9)
    ]
    texts += [
        "Write to ann@letters.org about the river and the winter.",
        "Too short.",
        texts[8] + "end",
    ]
    write_jsonl(
        tmp_path / "data" / "a.jsonl",
        [
            {"text": text, "url": f"https://letters.org/{number}"}
            for number, text in enumerate(texts)
        ],
    )
    (tmp_path / "notes" / "one.txt").write_text(
        "A note about the river and the garden of the old house."
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRISTMILL_STORE", raising=False)
    return tmp_path


def run_python(text: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(text, GUIDE.name, "exec"), {})
    return output.getvalue()


def test_every_example_of_the_page_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    outputs: dict[str, str] = {}
    for kind, text in BLOCK.findall(GUIDE.read_text()):
        if kind == "yaml":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
        elif kind == "bash":
            outputs |= {line: run_command(line, 60) for line in text.splitlines()}
        elif kind == "python":
            outputs[text] = run_python(text)
    assert len(outputs) == 13
    records = {
        name: json.loads((folder / name / "_documents.json").read_bytes())
        for name in ("kept", "river", "dropped", "for-the-hub")
    }
    assert {name: record["documents"] for name, record in records.items()} == {
        "kept": 11,
        "river": 11,
        "dropped": 2,
        "for-the-hub": 11,
    }
    assert pq.read_table(folder / "dropped")["reason"].to_pylist() == [
        "near_duplicate",
        "gopher_quality/min_words",
    ]
    assert len(pq.read_table(folder / "masked.parquet")) == 1
    [whole] = [text for command, text in outputs.items() if command.endswith("--text")]
    assert "Letter 0: the quiet river and the old garden " in whole
    [duplicates] = [
        text for command, text in outputs.items() if command.endswith("--csv")
    ]
    assert duplicates.splitlines()[0] == "locator,kept"
    assert len(duplicates.splitlines()) == 2
