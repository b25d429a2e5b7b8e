"""The benchmarks of deduplication: they measure what they say, at a small size."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.areas import AREAS
from benchmarks.dataprep import bench_dedup, bench_duplicates, bench_minhash
from gristmill.dataprep.documents import DOCUMENT_SCHEMA
from gristmill.dataprep.duplicates.shingles import shingle_sets, similarities


def test_the_million_is_generated_the_same_each_time_and_deduplicated_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_dedup, "DOCUMENTS", 600)
    monkeypatch.setattr(bench_dedup, "SHARD_DOCUMENTS", 200)
    monkeypatch.setattr(bench_dedup, "VOCABULARY", 3000)
    text_bytes, copies = bench_dedup.generate(tmp_path / "a", 600)
    assert bench_dedup.generate(tmp_path / "b", 600) == (text_bytes, copies)
    tables = [pq.read_table(path) for path in sorted((tmp_path / "a").iterdir())]
    assert [len(table) for table in tables] == [200] * 3
    assert pa.concat_tables(tables).schema.equals(DOCUMENT_SCHEMA)
    assert 20 < copies < 60
    assert text_bytes / 600 > 1000
    seconds, memory, dropped = bench_dedup.rows()
    assert (seconds["unit"], seconds["peer"], seconds["ratio"]) == ("s", 0.18, 0.18 / seconds["ours"])
    assert (memory["unit"], memory["peer"], memory["ratio"]) == ("GiB", 4.0, 4.0 / memory["ours"])
    assert 0.8 < dropped["ours"] <= 1.0


def test_planted_pairs_have_their_similarity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_duplicates, "PAIRS_PER_STEP", 20)
    for step in bench_duplicates.STEPS:
        texts = [text for pair in bench_duplicates.plant(step) for text in pair]
        left = np.arange(0, 40, 2)
        found = similarities(shingle_sets(pa.array(texts), 5), left, left + 1)
        assert np.abs(found - step).max() < 0.02


def test_planted_pairs_are_found_as_often_as_the_theory_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_duplicates, "PAIRS_PER_STEP", 200)
    *recalls, error = bench_duplicates.planted_rows()
    assert len(recalls) == len(bench_duplicates.STEPS)
    for row in recalls:
        assert abs(row["ours"] - row["peer"]) < 0.11  # three standard deviations of a share of 200
    assert 0.9 < error["ratio"] < 1.1


def test_pairs_are_found_in_texts_and_by_the_peer() -> None:
    base = " ".join(f"word{number}" for number in range(300))
    texts = [base, "something else " * 3 + "altogether, which is like nothing", base + " and more", base]
    assert bench_duplicates.found_pairs(texts) == {(0, 2), (0, 3), (2, 3)}
    assert bench_duplicates.found_by_datasketch(texts) == {(0, 2), (0, 3), (2, 3)}


def test_a_peer_that_is_not_installed_gives_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_minhash, "find_spec", lambda name: None)
    monkeypatch.setattr(bench_minhash, "DOCUMENTS", 10)
    for row, peer in zip(bench_minhash.rows(), ("datasketch", "rensa"), strict=True):
        assert (row["peer"], row["ratio"], row["note"]) == (None, None, f"{peer} is not installed")
        assert row["ours"] > 0


def test_each_benchmark_of_minhash_measures_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rensa")
    monkeypatch.setattr(bench_minhash, "DOCUMENTS", 20)
    monkeypatch.setattr(bench_minhash, "PEER_DOCUMENTS", 4)
    for row in bench_minhash.rows():
        assert row["ratio"] == row["ours"] / row["peer"] > 0


def test_every_area_names_modules_with_rows() -> None:
    for module in (name for modules in AREAS.values() for name in modules if "dedup" in name or "duplicates" in name):
        assert callable(importlib.import_module(module).rows)


def test_the_rules_are_judged_by_what_goes_for_what() -> None:
    words = [f"w{number}" for number in range(260)]
    texts = [" ".join(words[begin : begin + 200]) for begin in (0, 24, 48)]  # 172 of 220 shingles, 148 of 244
    assert bench_duplicates.judge_rule(texts, {(0, 1), (1, 2)}, "survivors") == (1.0, 0.0)
    assert bench_duplicates.judge_rule([*texts[:2], texts[2] + " w"], {(0, 1), (1, 2)}, "connected")[1] == 0.0
