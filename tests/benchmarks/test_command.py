"""The command `gristmill bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gristmill.mixtures
from benchmarks import areas
from benchmarks.areas import AREAS, MEASURES, measuring
from benchmarks.checkout import ROOT
from benchmarks.measuring import row
from tests.commands import call


def test_every_area_names_functions_that_measure() -> None:
    for name in {name for names in AREAS.values() for name in names}:
        assert callable(measuring(name)), name


def test_every_page_names_the_folders_that_it_measures() -> None:
    assert {f"bench-{area}.md" for area in MEASURES} == {
        path.name for path in (ROOT / "docs").glob("bench-*.md")
    }
    for path in {path for paths in MEASURES.values() for path in paths}:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("ours", "peer", "floor", "below"),
    [
        (9, 10, 0.95, True),
        (9, 10, 0.9, False),
        (9, 10, None, False),
        (9, None, 2, False),
    ],
)
def test_a_row_falls_below_its_floor_alone(
    ours: float, peer: float | None, floor: float | None, below: bool
) -> None:
    assert row("a", ours, peer, "MB/s", floor=floor).is_below_floor is below


@pytest.mark.parametrize(("ours", "code"), [(2.0, 0), (1.0, 1)])
def test_floors_fail_if_a_row_fell_and_skip_absent_peers(
    ours: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(name: str) -> Any:
        if name == "absent":
            raise ModuleNotFoundError(name="kenlm")
        return lambda **options: iter(
            [row("speed", ours, options["peer"], "MB/s", floor=1.5)]
        )

    monkeypatch.setattr(areas, "FLOORS", {"absent": {}, "present": {"peer": 1}})
    monkeypatch.setitem(AREAS, "floors", ("absent", "present"))
    monkeypatch.setattr(areas, "measuring", measure)
    page = tmp_path / "floors.md"
    process = call("bench", "floors", "--markdown", page, code=code)
    assert ("fell: speed" in process.output) == bool(code)
    assert "kenlm" in process.output
    assert page.read_text().splitlines()[4:] == [
        "| name | ours | peer | unit | ratio | floor | note |",
        "| --- | ---: | ---: | --- | ---: | ---: | --- |",
        f"| speed | {ours:.4g} | 1 | MB/s | {ours:.2f} | 1.50 |  |",
    ]


def test_it_finds_the_benchmarks_of_its_checkout_from_any_folder(
    tmp_path: Path,
) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "gristmill.flows.cli.main", "bench", "tran"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert "no such area: 'tran', did you mean 'train'?" in " ".join(
        process.stderr.split()
    )


def test_without_a_checkout_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gristmill.mixtures, "__path__", [str(tmp_path / "gristmill" / "mixtures")]
    )
    process = call("bench", "train", code=2)
    assert "needs a checkout" in process.output
