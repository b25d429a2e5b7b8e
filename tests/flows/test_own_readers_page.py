"""Every example of docs/own-readers.md runs and prints the page's output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.checkout import ROOT
from tests.warm_commands import gristmill_command

PAGE = ROOT / "docs" / "own-readers.md"
FILE = re.compile(r"`([\w./]+)`:\n\n```\w+\n(.*?)```", re.DOTALL)
COMMANDS = re.compile(r"```console\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page_folder = tmp_path_factory.mktemp("page")
    for name, content in FILE.findall(PAGE.read_text()):
        (page_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (page_folder / name).write_text(content)
    return page_folder


@pytest.mark.slow
def test_commands_of_the_page_print_the_documented_output(folder: Path) -> None:
    commands = [
        part
        for block in COMMANDS.findall(PAGE.read_text())
        for part in block.split("$ ")[1:]
    ]
    assert len(commands) >= 4
    for command in commands:
        line, _, expected_output = command.partition("\n")
        process = gristmill_command(line.split()[1:], folder)
        assert expected_output.strip() in process.stdout + process.stderr
        assert process.returncode == (
            2 if "planning would run" in expected_output else 0
        ), process.stdout + process.stderr


@pytest.mark.slow
def test_quarantined_error_matches_the_page(folder: Path) -> None:
    import pyarrow.parquet as pq

    (expected_error,) = re.findall(
        r"the third is in quarantine: `(.*?)`", PAGE.read_text()
    )
    gristmill_command(["run", "cards.yaml", "--until", "ingest", "--no-ui"], folder)
    (table,) = folder.glob("gristmill-store/ingest/cards--*/data/quarantine/*.parquet")
    assert pq.read_table(table)["error"].to_pylist() == [expected_error]
