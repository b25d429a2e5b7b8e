"""Cost of each engine for a small corpus, with a worker killed meanwhile, against the
local runner.

All times are of the same stages in the same order, from this process, with the engine
already running on the loopback address. They are mostly the time to start: the corpus
has 64 documents. Memory is the largest sum of resident bytes of this process and its
descendants, in which shared pages count for each.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.engines.clusters import ENGINES, running
from benchmarks.engines.recipe import run_stages, write_corpus
from benchmarks.measuring import MemorySampler, Row, resident_bytes, row
from gristmill.core.processes import descendants_cpu_seconds
from gristmill.dataprep.runners.errors import MissingEngineError

SAMPLE_SECONDS = 0.5
KILLED_IN = "annotate"
MEGABYTE = 1e6


class Run(NamedTuple):
    """A run of all stages: SHA-256 of each output file, and seconds by the clock and of
    all processors.
    """

    sums: dict[str, str]
    seconds: float
    cpu_seconds: float


def rows() -> Iterator[Row]:
    """Measure seconds of wall and CPU against a local worker, memory, and equality of
    the bytes.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        manifest = write_corpus(folder / "corpus")
        run_stages(manifest, folder / "warm", workers=1)  # compiles kernels
        local = timed(lambda: run_stages(manifest, folder / "local", workers=1))
        for name in ENGINES:
            yield from engine_rows(name, manifest, folder / name, local)


def engine_rows(name: str, manifest: Path, folder: Path, local: Run) -> Iterator[Row]:
    """Measure an engine."""
    folder.mkdir()
    kill_file = manifest.with_name("kill")

    def kill_worker(stage: str) -> None:
        if stage == KILLED_IN:
            kill_file.touch()

    sampler = MemorySampler(os.getpid(), resident_bytes, SAMPLE_SECONDS)
    try:
        with running(name, folder) as cluster, sampler:
            run = timed(
                lambda: run_stages(manifest, folder, kill_worker, **cluster.engine)
            )
    except MissingEngineError as error:
        yield row(f"{name}: all stages", None, local.seconds, "s", str(error))
        return
    verdict = "the same bytes" if run.sums == local.sums else "OTHER BYTES"
    happened = (
        f"a worker was killed in {KILLED_IN}; {verdict}"
        if not kill_file.exists()
        else "no worker was killed"
    )
    stages_row = row(
        f"{name}: all stages", run.seconds, local.seconds, "s", cluster.description
    )
    yield replace(stages_row, happened=happened)
    yield row(f"{name}: all stages, of CPU", run.cpu_seconds, local.cpu_seconds, "s")
    yield row(f"{name}: memory of all processes", sampler.peak / MEGABYTE, None, "MB")


def timed(run: Callable[[], dict[str, str]]) -> Run:
    """Time a run of all stages."""
    start, cpu_start = time.perf_counter(), cpu_seconds()
    sums = run()
    return Run(sums, time.perf_counter() - start, cpu_seconds() - cpu_start)


def cpu_seconds() -> float:
    """Return seconds of CPU of this process and its descendants."""
    own = os.times()
    return (
        own.user
        + own.system
        + own.children_user
        + own.children_system
        + descendants_cpu_seconds(os.getpid())
    )
