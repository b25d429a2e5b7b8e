"""`gristmill try` shows the effects of a function before a manifest uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.commands import call

STEPS = """
import os
def count_word(text: str, word: str = "red") -> dict:
    print("noise")
    return {"magic": text.count(word), "first": text.split()[0], "is_long": len(text) > 40}
def tidy(text: str) -> str:
    return text.replace("  ", " ")
def fails(text: str) -> dict:
    return {"magic": 1 / text.count("red")}
def unsteady(text: str) -> dict:
    return {"magic": int.from_bytes(os.urandom(4))}
def doubled(magic: int) -> dict:
    return {"twice": 2 * magic}
def wrong(text: str, nothing) -> dict: ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files with 40 documents; every fourth contains "red" twice and a double
    space.
    """
    (tmp_path / "steps.py").write_text(STEPS)
    for file in ("a", "b"):
        lines = [
            json.dumps(
                {
                    "text": f"document {number} "
                    + ("red  and red" if number % 4 == 0 else "blue")
                }
            )
            for number in range(20)
        ]
        (tmp_path / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "m.yaml").write_text(
        "name: tried\nsources:\n  lines: {path: '*.jsonl'}\ntokenizer: {}\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tried(*arguments: str) -> dict[str, Any]:
    process = run(*arguments, "--json")
    assert process.exit_code == 0, process.output
    report: dict[str, Any] = json.loads(process.stdout)
    return report


def run(*arguments: str) -> Result:
    return call("try", *arguments, code=None)


def test_an_annotators_columns_and_drops_are_shown(folder: Path) -> None:
    report = tried(
        "./steps.py:count_word",
        "--on=*.jsonl",
        "--max=magic=1",
        "--documents=30",
    )
    assert (report["kind"], report["documents"]) == ("annotate", 30)
    magic, first, is_long = (
        report["columns"][name] for name in ("magic", "first", "is_long")
    )
    assert (magic["min"], magic["median"], magic["max"], magic["missing"]) == (
        0,
        0,
        2,
        0,
    )
    assert magic["bars"][0] == "█"
    assert first["values"] == {"document": 30}
    assert is_long["values"] == {"False": 30}
    assert report["dropped"]["by_reason"] == {"annotate/max_magic": 8}
    assert report["dropped"]["shown"][0]["locator"] == "a.jsonl#1"
    assert report["dropped"]["shown"][0]["values"]["magic"] == 2
    assert (
        tried("./steps.py:count_word", "--on=a.jsonl", "--with=word=blue")["columns"][
            "magic"
        ]["max"]
        == 1
    )


def test_documents_are_sampled_from_several_files(folder: Path) -> None:
    report = tried("./steps.py:count_word", "--on=*.jsonl")
    assert report["documents"] == 40
    assert report["on"].startswith("2 of 2 files")


def test_an_editor_shows_its_edits_as_differences(folder: Path) -> None:
    report = tried("./steps.py:tidy", "--on=a.jsonl", "--as=edit")
    assert (
        report["kind"],
        report["edits"]["changed"],
        report["edits"]["bytes_removed"],
    ) == (
        "edit",
        5,
        report["edits"]["bytes_added"] + 5,
    )
    first_edit = report["edits"]["shown"][0]
    assert first_edit["locator"] == "a.jsonl#1"
    difference = first_edit["differences"][0]
    assert (
        difference["left"] + difference["before"] + difference["right"]
        == "document 0 red  and red"
    )
    assert (
        difference["left"] + difference["after"] + difference["right"]
        == "document 0 red and red"
    )


def test_errors_have_file_and_line_and_nondeterminism_is_reported(
    folder: Path,
) -> None:
    report = tried("./steps.py:fails", "--on=a.jsonl")
    assert report["errors"]["total"] == 15
    assert report["errors"]["shown"][0] == {
        "locator": "a.jsonl#2",
        "error": "ZeroDivisionError: division by zero (steps.py, line 9)",
    }
    assert "two calls" in tried("./steps.py:unsteady", "--on=a.jsonl")["differs"]


@pytest.mark.slow
def test_try_reads_documents_left_by_the_steps_of_a_run(
    folder: Path,
) -> None:
    step = "prepare=[{annotate: {use: './steps.py:count_word', max: {magic: 1}}}]"
    report_before = tried("./steps.py:count_word", "--on=lines", "--manifest=m.yaml")
    assert report_before["documents"] == 40
    command = ["run", "m.yaml", "--until=annotate", "--no-ui", "--set", step]
    subprocess.run(
        [sys.executable, "-m", "gristmill", *command], check=True, capture_output=True
    )
    arguments = (
        "./steps.py:doubled",
        "--on=lines",
        "--manifest=m.yaml",
        "--documents=10",
        "--set",
        step,
    )
    report_after = tried(*arguments)
    assert report_after["documents"] == 10
    assert report_after["on"] == "source 'lines' of the run, as annotate left them"
    assert report_after["columns"]["twice"]["max"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("count_word", "annotate"),
        ("tidy", "edit"),
        ("fails", "annotate"),
        ("unsteady", "annotate"),
    ],
)
def test_output_fits_sixty_columns(
    folder: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    process = run(f"./steps.py:{name}", "--on=a.jsonl", "--as", kind)
    assert process.exit_code == 0, process.output
    assert max(map(len, process.stdout.splitlines())) <= 60
    assert "per second" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["./steps.py:cuont_word", "--on=a.jsonl"],
            "steps.py defines no 'cuont_word', did you mean 'count_word'?",
        ),
        (["./stepz.py:count_word", "--on=a.jsonl"], "there is no file stepz.py"),
        (
            ["https://example.org/x.py:f", "--on=a.jsonl"],
            "code must come from a file beside the manifest",
        ),
        (
            ["./steps.py:wrong", "--on=a.jsonl"],
            "steps.py, line 14: wrong has the parameter 'nothing'",
        ),
        (["./steps.py:count_word", "--on=gone.jsonl"], "gone.jsonl does not exist"),
        (["./steps.py:count_word", "--on=a.jsonl", "--with=wrd=x"], "wrd"),
        (
            ["./steps.py:count_word", "--on=a.jsonl", "--max=magic"],
            "--max 'magic': write --max NAME=VALUE",
        ),
        (
            ["./steps.py:count_word", "--on=a.jsonl", "--max=text=1"],
            "'text' has another meaning for documents",
        ),
        (
            ["./steps.py:count_word", "--on=nowhere", "--manifest=m.yaml"],
            "m.yaml has no source of documents",
        ),
    ],
)
def test_invalid_try_arguments_are_rejected_with_one_sentence(
    folder: Path, arguments: list[str], says: str
) -> None:
    process = run(*arguments)
    assert process.exit_code == 2
    assert says in " ".join(process.output.split())
