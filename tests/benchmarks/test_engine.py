"""The benchmarks of jobs and of memory, at a size that shows no more than that they measure what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.dataprep import bench_jobs, bench_memory
from gristmill.dataprep.reading import ingest
from gristmill.dataprep.reading.sources import find_files
from gristmill.mixtures.sources import Source


def test_jobs_are_measured_both_ways_and_the_first_of_a_process_in_a_fresh_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_jobs, "REPEATS", 1)
    monkeypatch.setattr(bench_jobs, "jobs", lambda *folders: first_and_last(list(every_job(*folders))))
    rows = list(bench_jobs.rows(files=2, documents_per_file=20, seconds={"beam_vs_multiprocessing": 0.0}))
    assert [row["name"] for row in rows] == [
        "beam_vs_multiprocessing, read JSONL, first job of a process",
        "beam_vs_multiprocessing, sketch",
    ]
    assert all(row["ratio"] == pytest.approx(row["ours"] / row["peer"]) and row["ratio"] > 0 for row in rows)
    assert all("in 2 shards, 2 workers; peer: " in row["note"] for row in rows)


every_job = bench_jobs.jobs


def first_and_last(jobs: list[bench_jobs.Job]) -> list[bench_jobs.Job]:
    """Of the jobs, the one of a fresh process, and one of threads."""
    assert [job.name for job in jobs[:4]] == ["read JSONL, first job of a process", "read JSONL", "filter", "sketch"]
    return [jobs[0], jobs[3]]


def test_a_job_of_more_shards_than_files_gets_them_again_under_other_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(name)
    bench_jobs.repeat_files(tmp_path, 5)
    assert sorted(path.read_text() for path in tmp_path.glob("*.jsonl")) == ["a", "a", "a", "b", "b"]
    bench_jobs.repeat_files(tmp_path, 3)
    assert len(list(tmp_path.iterdir())) == 5


def test_both_ways_write_the_same_files(tmp_path: Path) -> None:
    bench_memory.write_corpus(tmp_path / "texts", 100_000)
    sources = {"web": Source.model_validate({"path": str(tmp_path / "texts")})}
    listings = {name: find_files(name, source.model_dump()) for name, source in sources.items()}
    tasks = ingest.plan(sources, listings, 1_000_000)
    for work in (bench_jobs.run_with_beam, bench_jobs.run_with_pool):
        out = tmp_path / work.__name__
        work("read", tasks, bench_jobs.reads_jsonl(out), out, False)
    (shard,) = tmp_path.glob("run_with_beam/*.parquet")
    assert (tmp_path / "run_with_pool" / shard.name).read_bytes() == shard.read_bytes()


def test_the_memory_of_a_process_tree_is_that_of_its_members() -> None:
    script = "import subprocess, sys; held = b'x' * 30_000_000; print(flush=True); sys.stdin.read()"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}])"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert parent.stdout is not None
    parent.stdout.readline()
    tree = bench_memory.process_tree(parent.pid)
    sizes = [bench_memory.anonymous_bytes(pid) for pid in tree]
    parent.communicate()
    assert len(tree) == 2
    assert sizes[0] < 30_000_000 < sizes[1] < 100_000_000
    assert bench_memory.anonymous_bytes(parent.pid) == 0


def test_the_rows_of_memory_say_what_was_prepared_under_which_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([400_000_000, 600_000_000])
    monkeypatch.setattr(bench_memory, "measure", lambda folder, limit_bytes: next(peaks))
    monkeypatch.setattr(bench_memory, "write_corpus", lambda folder, size: size)
    growth, held = bench_memory.rows(corpus_bytes=1_000_000_000, limit_bytes=2_000_000_000)
    assert growth["name"] == "peak memory of preparing 3000 MB of text, against that of preparing 1000 MB"
    assert growth["note"] == "ingest, filter and dedup on 2 workers under a limit of 2000 MB"
    assert (growth["ours"], growth["peer"], growth["ratio"]) == (600, 400, 1.5)
    assert held["name"] == "text prepared under a limit of 2000 MB of memory, against that limit"
    assert held["note"] == "the peak was 600 MB; past the limit the process is ended"
    assert (held["ours"], held["peer"], held["ratio"]) == (3000, 2000, 1.5)


def test_a_preparation_that_needs_more_than_the_limit_is_ended(tmp_path: Path) -> None:
    bench_memory.write_corpus(tmp_path / "texts", 1000)
    with pytest.raises(MemoryError, match=r"under a limit of 1000000 bytes took .* exit code -9"):
        bench_memory.measure(tmp_path, 1_000_000)


def test_the_corpus_repeats_some_documents_and_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert 400_000 <= bench_memory.write_corpus(tmp_path / name, 400_000) < 410_000
    (first,), (second,) = tmp_path.glob("a/*"), tmp_path.glob("b/*")
    lines = first.read_text().splitlines()
    assert first.read_bytes() == second.read_bytes()
    assert 0 < len(lines) - len(set(lines)) < len(lines) / 5
