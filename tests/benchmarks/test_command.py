"""The command `gristmill bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gristmill.mixtures
from benchmarks.areas import AREAS, measuring
from gristmill.flows.cli.main import app


def test_every_area_names_functions_that_measure() -> None:
    for name in {name for names in AREAS.values() for name in names}:
        assert callable(measuring(name)), name


def test_it_finds_the_benchmarks_of_its_checkout_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gristmill.flows.cli.main", "bench", "tran"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no such area: tran, did you mean 'train'?" in " ".join(done.stderr.split())


def test_without_a_checkout_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gristmill.mixtures, "__path__", [str(tmp_path / "gristmill" / "mixtures")])
    done = CliRunner().invoke(app, ["bench", "train"])
    assert done.exit_code == 2
    assert "needs a checkout" in done.output
