"""Benchmarks of dataprep: both sides do the same work, and reported counts are
correct.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bounds import memory_of
from benchmarks.dataprep import (
    decontamination,
    dedup_million,
    duplicates,
    jobs,
    reading,
)
from benchmarks.dataprep.judges import FOLDS, auc, folds
from benchmarks.dataprep.language import accuracy, macro_f1
from benchmarks.dataprep.spans import repeated_bytes, write_shards
from benchmarks.measuring import process_tree
from gristmill.dataprep.dedup.shingles import shingle_sets, similarities
from gristmill.dataprep.documents import write_table
from gristmill.dataprep.readers import ingest
from gristmill.dataprep.readers.sources import find_files
from gristmill.mixtures.schema.sources import Source


def test_planted_pairs_have_their_similarity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "PAIRS_PER_STEP", 20)
    for step in duplicates.STEPS:
        texts = [text for pair in duplicates.plant(step) for text in pair]
        first_rows = np.arange(0, 40, 2)
        measured = similarities(
            shingle_sets(pa.array(texts), 5), first_rows, first_rows + 1
        )
        assert np.abs(measured - step).max() < 0.02


def test_of_planted_copies_those_count_that_stay_beside_one_that_is_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup_million, "SHARD_DOCUMENTS", 50)
    _, originals = dedup_million.generate(tmp_path / "ingest", 200)
    copies = np.flatnonzero(originals >= 0)
    assert len(copies) > 5
    assert (originals[copies] < 50).all()
    assert (originals[:50] < 0).all()

    def count_alike(kept: np.ndarray) -> int:
        for number, part in enumerate(np.split(kept, 4)):
            write_table(
                tmp_path / "out" / f"part-{number:05d}.parquet",
                pa.table({"keep": part}),
            )
        return dedup_million.count_alike(tmp_path, originals)

    assert count_alike(np.ones(200, bool)) == len(copies)
    assert count_alike(originals < 0) == 0
    without_originals = np.ones(200, bool)
    without_originals[originals[copies]] = False
    assert count_alike(without_originals) < len(copies)


def test_planted_pairs_are_found_as_often_as_the_theory_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(duplicates, "PAIRS_PER_STEP", 200)
    *recalls, error = duplicates.planted_rows()
    assert len(recalls) == len(duplicates.STEPS)
    for row in recalls:
        # three standard deviations of a share of 200
        assert abs(row.ours - row.peer) < 0.11
    assert 0.9 < error.ratio < 1.1


def test_pairs_are_found_in_texts_and_by_the_peer() -> None:
    base = " ".join(f"word{number}" for number in range(300))
    texts = [
        base,
        "something else " * 3 + "altogether, which is like nothing",
        base + " and more",
        base,
    ]
    assert duplicates.linked_pairs(texts) == {(0, 2), (0, 3), (2, 3)}
    assert duplicates.linked_by_datasketch(texts) == {(0, 2), (0, 3), (2, 3)}


@pytest.mark.slow
def test_the_rules_are_judged_by_what_goes_for_what() -> None:
    words = [f"w{number}" for number in range(260)]
    # 172 of 220 shingles, 148 of 244
    texts = [" ".join(words[begin : begin + 200]) for begin in (0, 24, 48)]
    assert duplicates.judge_rule(texts, {(0, 1), (1, 2)}, "survivors") == (1.0, 0.0)
    assert (
        duplicates.judge_rule(
            [*texts[:2], texts[2] + " w"], {(0, 1), (1, 2)}, "connected"
        )[1]
        == 0.0
    )


def test_a_job_of_more_shards_than_files_gets_them_again_under_other_names(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(name)
    jobs.repeat_files(tmp_path, 5)
    assert sorted(path.read_text() for path in tmp_path.glob("*.jsonl")) == [
        "a",
        "a",
        "a",
        "b",
        "b",
    ]
    jobs.repeat_files(tmp_path, 3)
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.slow
def test_both_ways_write_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    lines = (
        json.dumps({"text": f"{number} wheels grind corn. " * 20})
        for number in range(200)
    )
    (tmp_path / "texts" / "0.jsonl").write_text("\n".join(lines))
    sources = {"web": Source.model_validate({"path": str(tmp_path / "texts")})}
    listings = {name: find_files(name, source) for name, source in sources.items()}
    tasks = ingest.plan(sources, listings, 1_000_000)
    for work in (jobs.run_with_beam, jobs.run_with_pool):
        out = tmp_path / work.__name__
        work("read", tasks, jobs.reads_jsonl(out), out, False)
    (shard,) = tmp_path.glob("run_with_beam/*.parquet")
    assert (tmp_path / "run_with_pool" / shard.name).read_bytes() == shard.read_bytes()


def test_the_memory_of_a_process_tree_is_that_of_its_members() -> None:
    script = (
        "import subprocess, sys; held = b'x' * 30_000_000; print(flush=True); "
        "sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; "
            f"subprocess.run([sys.executable, '-c', {script!r}])",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    parent.stdout.readline()
    tree = process_tree(parent.pid)
    sizes = [memory_of(pid)[0] for pid in tree]
    parent.communicate()
    assert len(tree) == 2
    assert sizes[0] < 30_000_000 < sizes[1] < 100_000_000
    assert memory_of(parent.pid) == (0, 0)


def test_the_benchmark_of_reading_gets_all_pages_back(tmp_path: Path) -> None:
    pages = reading.make_pages(["one", "two", "three"])
    path = tmp_path / "crawl.warc.gz"
    path.write_bytes(reading.make_warc(pages))
    assert reading.read_pages(path) == reading.iterate(path) == 3
    assert (
        reading.guarded(pages, "resiliparse")
        == reading.direct(pages, "resiliparse")
        == 3
    )


def test_all_ways_of_reading_json_lines_find_all_records(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(reading.make_jsonl(700))
    assert (
        reading.read_jsonl(path)
        == reading.read_with_duckdb(path)
        == reading.read_with_pyarrow(path)
        == 700
    )


def test_accuracy_counts_texts_and_macro_f1_counts_languages() -> None:
    truth, predictions = ["en", "en", "en", "de"], ["en", "en", "de", "de"]
    assert accuracy(predictions, truth) == 0.75
    assert macro_f1(predictions, truth) == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert macro_f1(["fr"] * 4, truth) == 0.0


def test_folds_are_of_about_one_size_and_do_not_depend_on_how_many_there_are() -> None:
    sizes = np.bincount(folds(1000), minlength=FOLDS)
    assert len(sizes) == FOLDS
    assert sizes.min() > 150
    assert folds(1000)[:10].tolist() == folds(10).tolist()


def test_labels_and_scores_are_split_before_they_are_compared() -> None:
    assert (
        auc([(True, "a"), (False, "b"), (True, "c")], np.array([0.9, 0.5, 0.4])) == 0.5
    )


DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40).map(bytes),
    st.sampled_from([2, 4, 8]),
)
def test_the_suffix_array_of_the_peer_finds_what_occurs_twice(
    data: bytes, length: int
) -> None:
    expected = np.zeros(len(data), bool)
    for at in range(len(data) - length + 1):
        if (
            data.find(data[at : at + length]) != at
            or data.find(data[at : at + length], at + 1) >= 0
        ):
            expected[at : at + length] = True
    assert repeated_bytes(data, length).tolist() == expected.tolist()


def test_shards_hold_all_texts_once(tmp_path: Path) -> None:
    plan = write_shards(["one", "two", "three"], tmp_path)
    assert plan.numbering.starts.tolist() == [0, 2, 3]


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the shared data is missing")
def test_leaks_are_found_and_quotations_kept_where_any_ngram_drops_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decontamination, "LEAKS_PER_DISGUISE", 4)
    monkeypatch.setattr(decontamination, "SETS", {"code": decontamination.SETS["code"]})
    monkeypatch.setattr(
        decontamination, "CLEAN", ("text/mixture/redpajama-c4-refined.jsonl",)
    )
    monkeypatch.setattr(decontamination, "CLEAN_ARCHIVES", ())
    rows = {row.name: row for row in decontamination.rows()}
    assert {
        name: row.ours for name, row in rows.items() if name.startswith("innocent")
    } == {
        "innocent kept: clean": 1.0,
        "innocent kept: famous quotes": 1.0,
        "innocent kept: rare quotes": 1.0,
        "innocent kept: famous quotes, 70 % of an item": 1.0,
    }
    assert rows["innocent kept: famous quotes"].peer == 0.0
    for disguise in (
        "verbatim",
        "inside a long document",
        "every 12th word replaced",
        "soft hyphens and the like",
    ):
        assert rows[f"leaks found, code: {disguise}"].ours == 1.0
    assert rows["leaks found, code: soft hyphens and the like"].peer < 0.5
    assert rows["share of dropped documents that are leaks"].ours == 1.0
    assert (
        rows["leaks found, 8-grams, over 40%"].ours
        > rows["leaks found, 13-grams, over 50%"].ours
    )
