from __future__ import annotations

import math

import pytest

from gristmill.mixtures.model import Model
from gristmill.train.benchmarks import bench_loop


def test_both_rows_are_measured_or_say_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, one_process: None
) -> None:
    for name, value in {"SECTION": Model(layers=1, width=16, heads=2), "VOCAB": 128, "LENGTH": 16, "ROWS": 4,
                        "STEPS": 4, "LOG_EVERY": 4, "ROUNDS": 2}.items():
        monkeypatch.setattr(bench_loop, name, value)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    plain, transformers = bench_loop.measured_rows()
    assert (plain["name"], transformers["name"]) == ("loop_vs_plain", "loop_vs_transformers")
    for row in (plain, transformers):
        if row["ratio"] is not None:
            assert row["note"].startswith("median of 2 rounds; by process time ")
            assert row["ours"] > 0
            assert row["peer"] > 0
            assert math.isfinite(row["ratio"])
            assert row["ratio"] > 0
