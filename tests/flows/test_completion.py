"""Shell completion of stages and manifests: fast, and only valid values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.flows.cli.completion import (
    complete_manifest,
    complete_stage,
)

MANIFEST = "name: tiny\nsources:\n  notes: {path: 'notes/*.txt'}\n"


def test_stages_are_completed_in_execution_order() -> None:
    assert complete_stage("de") == [
        "dedup",
        "dedup_semantic",
        "dedup_lines",
        "dedup_substrings",
        "decontaminate",
    ]
    assert complete_stage("")[:4] == ["generate", "ingest", "clean", "filter"]
    assert complete_stage("nonsense") == []


def test_manifests_and_folders_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mixtures").mkdir()
    for name in (
        "mixtures/demo.yaml",
        "mixtures/notes.txt",
        "mine.yml",
        ".hidden.yaml",
    ):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert complete_manifest("") == ["mine.yml", "mixtures/"]
    assert complete_manifest("mixtures/") == ["mixtures/demo.yaml"]
    assert complete_manifest(f"{tmp_path}/m") == [
        f"{tmp_path}/mine.yml",
        f"{tmp_path}/mixtures/",
    ]
    assert complete_manifest("absent/x") == []


@pytest.mark.slow
def test_completion_imports_no_heavy_library(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(MANIFEST)
    code = (
        "import atexit, sys; sys.argv[0] = 'gristmill'; "
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
        "from gristmill.flows.cli.main import main; main()"
    )
    for words, completion in (
        ("run tiny.yaml --until de", "dedup"),
        ("stage de", "dedup"),
        ("run ti", "tiny.yaml"),
    ):
        command_line = f"gristmill {words}"
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={
                **os.environ,
                "_GRISTMILL_COMPLETE": "complete_bash",
                "COMP_WORDS": command_line,
                "COMP_CWORD": str(len(command_line.split()) - 1),
            },
        )
        assert run.stdout.split()[0] == completion, run.stderr[-2000:]
        assert (
            set(run.stderr.split())
            & {
                "torch",
                "apache_beam",
                "prefect",
                "numba",
                "pyarrow",
                "numpy",
            }
            == set()
        )
