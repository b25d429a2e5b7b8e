"""Compiled kernels: what is kept between runs never outlives its source; the benchmark compares like with like."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gristmill.dataprep import bench, kernels


def test_machine_code_of_changed_kernels_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Path(kernels.__file__).parent
    for name in ("kernels.py", "hashing.py", "repetition.py"):
        shutil.copy(sources / name, tmp_path)
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    before = kernels.cache_folder()
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    assert kernels.cache_folder() == before
    callee = tmp_path / "hashing.py"
    callee.write_text(callee.read_text().replace("0x85EBCA6B", "0x85EBCA6D"))
    assert kernels.cache_folder() != before


def test_the_cache_goes_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert kernels.cache_folder().parent == tmp_path


def test_each_benchmark_measures_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DOCUMENTS", 20)
    monkeypatch.setattr(bench, "PEER_DOCUMENTS", 4)
    measured = list(bench.rows())
    assert [set(row) for row in measured] == [{"name", "ours", "peer", "unit", "ratio"}] * 2
    assert all(row["ratio"] == row["ours"] / row["peer"] > 0 for row in measured)
