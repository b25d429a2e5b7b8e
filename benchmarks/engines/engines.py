"""What each engine takes for one small corpus, whole, with a worker that is killed meanwhile; against the local runner.

All times are of the same stages in the same order, from this process, with the engine on the loopback address and
already up. They are of starting, not of work: the corpus has 64 documents. Memory is the largest sum of resident bytes
of this process and of all below it, so that shared pages count for each.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engines.clusters import ENGINES, running
from benchmarks.engines.recipe import run_stages, write_corpus
from benchmarks.measuring import Row, row
from gristmill.core.processes import descendants_cpu_seconds
from gristmill.dataprep.jobs.engine_downloads import MissingEngineError

WATCH_SECONDS = 0.5
KILLED_IN = "annotate"
MEGABYTE = 1e6


class Watch:
    """The most memory that this process and all below it have held, while it is looked at."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(WATCH_SECONDS):
            self.peak = max(self.peak, resident_below(os.getpid()))


def resident_below(parent: int) -> int:
    """Resident bytes of a process and of all below it, from /proc."""
    sizes, children = dict[int, int](), dict[int, list[int]]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            sizes[int(folder.name)] = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(above, []).append(int(folder.name))

    def add(process: int) -> int:
        return sizes.get(process, 0) + sum(add(child) for child in children.get(process, ()))

    return add(parent)


def rows() -> Iterator[Row]:
    """Per engine: seconds of wall and CPU against one local worker, memory, and whether the bytes are the same."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        manifest = write_corpus(folder / "corpus")
        run_stages(manifest, folder / "warm", workers=1)  # compiles kernels
        begun, used = time.perf_counter(), cpu_seconds()
        expected = run_stages(manifest, folder / "local", workers=1)
        local, local_cpu = time.perf_counter() - begun, cpu_seconds() - used
        for name in ENGINES:
            yield from _engine_rows(name, manifest, folder / name, expected, local, local_cpu)


def _engine_rows(
    name: str, manifest: Path, folder: Path, expected: dict[str, str], local: float, local_cpu: float
) -> Iterator[Row]:
    folder.mkdir()
    kill = manifest.with_name("kill")

    def kill_one(stage: str) -> None:
        if stage == KILLED_IN:
            kill.touch()

    try:
        with running(name, folder) as cluster, Watch() as watch:
            begun, used = time.perf_counter(), cpu_seconds()
            files = run_stages(manifest, folder, kill_one, **cluster.engine)
            seconds, cpu = time.perf_counter() - begun, cpu_seconds() - used
    except MissingEngineError as error:
        yield row(f"{name}: all stages", None, local, "s", str(error))
        return
    same = "the same bytes" if files == expected else "OTHER BYTES"
    happened = f"a worker was killed in {KILLED_IN}; {same}" if not kill.exists() else "no worker was killed"
    yield {**row(f"{name}: all stages", seconds, local, "s", cluster.what), "happened": happened}
    yield row(f"{name}: all stages, of CPU", cpu, local_cpu, "s")
    yield row(f"{name}: memory of all processes", watch.peak / MEGABYTE, None, "MB")


def cpu_seconds() -> float:
    """Seconds of CPU that this process and all below it have taken."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + descendants_cpu_seconds(os.getpid())
