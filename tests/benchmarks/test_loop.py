from __future__ import annotations

import math

import pytest

from benchmarks.train import bench_loop
from benchmarks.train.loop_sides import Setting

TINY = Setting(layers=1, width=16, heads=2, vocab=128, rows=2, length=16, warmup_steps=1, steps=3, log_every=2)


def test_both_rows_are_measured_or_say_what_is_not_installed() -> None:
    plain, transformers = bench_loop.measured_rows(TINY, rounds=1)
    assert (plain["name"], transformers["name"]) == ("loop_vs_plain", "loop_vs_transformers")
    for row in (plain, transformers):
        if row["ratio"] is not None:
            assert row["note"].startswith("median of 1 rounds, ")
            assert row["ours"] > 0
            assert row["peer"] > 0
            assert math.isfinite(row["ratio"])
            assert row["ratio"] > 0


def test_a_side_that_fails_says_why() -> None:
    said = r"the loop of (ours|plain|transformers) could not be measured: (.|\n)*width 16 must be"
    with pytest.raises(RuntimeError, match=said):
        bench_loop.measured_rows(Setting(layers=1, width=16, heads=3, vocab=128, rows=2, length=16, steps=1), rounds=1)
