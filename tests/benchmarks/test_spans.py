"""What the benchmarks of repeated text and of decontamination measure is what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.dataprep import bench_decontamination
from benchmarks.dataprep.bench_spans import repeated_bytes, write_shards

DATA = Path(__file__).parents[3] / "shared" / "data"


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40).map(bytes), st.sampled_from([2, 4, 8]))
def test_the_suffix_array_of_the_peer_finds_what_occurs_twice(data: bytes, length: int) -> None:
    expected = np.zeros(len(data), bool)
    for at in range(len(data) - length + 1):
        if data.find(data[at : at + length]) != at or data.find(data[at : at + length], at + 1) >= 0:
            expected[at : at + length] = True
    assert repeated_bytes(data, length).tolist() == expected.tolist()


def test_shards_hold_all_texts_once(tmp_path: Path) -> None:
    plan = write_shards(["one", "two", "three"], tmp_path)
    assert plan.numbering.starts.tolist() == [0, 2, 3]


@pytest.mark.skipif(not DATA.exists(), reason="the shared data is not here")
def test_leaks_are_found_and_quotations_kept_where_any_ngram_drops_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_decontamination, "LEAKS_PER_DISGUISE", 4)
    monkeypatch.setattr(bench_decontamination, "SETS", {"code": bench_decontamination.SETS["code"]})
    monkeypatch.setattr(bench_decontamination, "CLEAN", ("text/mixture/redpajama-c4-refined.jsonl",))
    monkeypatch.setattr(bench_decontamination, "CLEAN_ARCHIVES", ())
    rows = {row["name"]: row for row in bench_decontamination.rows()}
    assert {name: row["ours"] for name, row in rows.items() if name.startswith("innocent")} == {
        "innocent kept: clean": 1.0, "innocent kept: famous quotes": 1.0, "innocent kept: rare quotes": 1.0,
        "innocent kept: famous quotes, 70 % of an item": 1.0,
    }
    assert rows["innocent kept: famous quotes"]["peer"] == 0.0
    for disguise in ("verbatim", "inside a long document", "every 12th word replaced", "soft hyphens and the like"):
        assert rows[f"leaks found, code: {disguise}"]["ours"] == 1.0
    assert rows["leaks found, code: soft hyphens and the like"]["peer"] < 0.5
    assert rows["share of dropped documents that are leaks"]["ours"] == 1.0
    assert rows["leaks found, 8-grams, over 40%"]["ours"] > rows["leaks found, 13-grams, over 50%"]["ours"]


def test_missing_data_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_BENCH_DATA", str(tmp_path))
    (row,) = bench_decontamination.rows()
    assert (row["ours"], row["ratio"]) == (None, None)
    assert "has no evaluation sets" in row["note"]
