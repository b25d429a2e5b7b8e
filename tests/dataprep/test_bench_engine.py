"""The benchmarks of jobs and of memory, at a size that shows no more than that they measure what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.dataprep.benchmarks import bench_jobs, bench_memory
from gristmill.dataprep.reading import ingest
from gristmill.dataprep.reading.sources import find_files
from gristmill.mixtures.sources import Source


def test_each_job_is_measured_both_ways() -> None:
    rows = list(bench_jobs.rows(files=2, documents_per_file=20))
    names = [row["name"] for row in rows]
    assert names[:3] == [
        "read JSONL on 2 workers, against multiprocessing.Pool",
        "filter on 2 workers, against ThreadPool",
        "sketch on 2 workers, against ThreadPool",
    ]
    assert all(row["ratio"] == pytest.approx(row["ours"] / row["peer"]) and row["ratio"] > 0 for row in rows)


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
