"""Processor time, memory and start of all processes below this one, by part of an
engine.

Processes are sampled from /proc. Orphans become children of this process, so that none
leaves the tree. What a process uses after its last sample counts as `between samples`.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.measuring import process_tree, proportional_bytes
from gristmill.core.processes import descendants_cpu_seconds

PARTS = {
    "Python workers": r"-m worker_bootstrap|gristmill-worker|runners\.worker"
    # the command of a raylet has that of its workers in it
    r"|dask_worker|ray::(gristmill|IDLE)|^\S*python[\d.]* .*default_worker\.py"
    r"|multiprocessing",
    "executors' Java": "CoarseGrainedExecutorBackend|TaskManagerRunner",
    "driver's Python": r"runners\.shared_driver",
    "driver's Java": "SparkSubmit|--artifacts-dir",
    "the cluster itself": r"org\.apache\.(spark\.deploy|flink)|spark-class|dask_scheduler"
    r"|raylet|gcs_server|site-packages/ray/|ray::|ray\.util\.client|bin/ray start",
}
"""Part -> pattern of its processes' command lines; in this order."""
OWN_PART = "the run and its stages"
UNSEEN_PART = "processes between samples"
PR_SET_CHILD_SUBREAPER = 36
"""See prctl(2)."""
SAMPLE_SECONDS, MEMORY_SECONDS = 0.1, 1.0
REST_SECONDS, RESTING_SHARE = 60.0, 0.1


@dataclass(frozen=True)
class Usage:
    """Resources that processes used.

    Attributes:
        seconds: by the clock.
        cpu_seconds: of all processes.
        part_seconds: processor time by part.
        part_processes: number of processes by part.
        peak_bytes: most memory of all together (Pss) beyond what they had before.
        peak_parts: that memory by part.
        first_byte_seconds: until a file below the output's folder had a byte.
    """

    seconds: float
    cpu_seconds: float
    part_seconds: Mapping[str, float]
    part_processes: Mapping[str, int]
    peak_bytes: int
    peak_parts: Mapping[str, int]
    first_byte_seconds: float


def wait_for_rest() -> None:
    """Wait until the processes below this one rest, at most REST_SECONDS: servers have
    started then.
    """
    deadline = time.monotonic() + REST_SECONDS
    used, before = _cpu_seconds(), 0.0
    while used - before > 2 * RESTING_SHARE and time.monotonic() < deadline:
        time.sleep(2.0)
        used, before = _cpu_seconds(), used


class Watch:
    """Background thread that samples the processes below this one.

    Args:
        output: folder whose first byte is awaited.
    """

    def __init__(self, output: Path) -> None:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._output = output
        self._first_byte: float | None = None
        self._used = dict[tuple[int, float], float]()
        self._part = dict[tuple[int, float], str]()
        self._peak_parts = dict[str, int]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._begin, self._cpu = time.perf_counter(), _cpu_seconds()
        self._sample()
        self._before = dict(self._used)
        self._memory_before = self._memory()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()
        self._seconds = time.perf_counter() - self._begin
        self._cpu = _cpu_seconds() - self._cpu

    def usage(self) -> Usage:
        """Return what was used, without this process."""
        seconds = defaultdict[str, float](float)
        processes: Counter[str] = Counter()
        for key, used in self._used.items():
            seconds[self._part[key]] += used - self._before.get(key, 0.0)
            processes[self._part[key]] += 1
        seconds[UNSEEN_PART] = max(self._cpu - sum(seconds.values()), 0.0)
        self._cpu = sum(seconds.values())
        return Usage(
            self._seconds,
            self._cpu,
            seconds,
            processes,
            sum(self._peak_parts.values()),
            self._peak_parts,
            (self._first_byte or time.perf_counter()) - self._begin,
        )

    def _watch(self) -> None:
        memory_time = 0.0
        while not self._stop.wait(SAMPLE_SECONDS):
            self._sample()
            now = time.perf_counter()
            if self._first_byte is None and _has_byte(self._output):
                self._first_byte = now
            if now >= memory_time + MEMORY_SECONDS:
                memory_time = now
                sizes = self._memory()
                sizes.subtract(self._memory_before)
                if sizes.total() > sum(self._peak_parts.values()):
                    self._peak_parts = dict(sizes)

    def _sample(self) -> None:
        for pid in process_tree(os.getpid())[1:]:
            try:
                process = psutil.Process(pid)
                key = pid, process.create_time()
                times = process.cpu_times()
                command = Path(f"/proc/{pid}/cmdline").read_text()
            except (OSError, psutil.NoSuchProcess):
                continue  # it has ended
            self._used[key] = times.user + times.system
            if command or key not in self._part:  # a zombie has none
                self._part[key] = _part_of(command)

    def _memory(self) -> Counter[str]:
        sizes: Counter[str] = Counter()
        for pid in process_tree(os.getpid())[1:]:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text()
            except OSError:
                continue
            sizes[_part_of(command)] += proportional_bytes(pid)
        return sizes


def _part_of(command: str) -> str:
    words = command.replace("\0", " ")
    return next(
        (part for part, pattern in PARTS.items() if re.search(pattern, words)), OWN_PART
    )


def _has_byte(folder: Path) -> bool:
    return any(path.stat().st_size for path in folder.glob("*/data/*"))


def _cpu_seconds() -> float:
    """Return seconds of CPU of all processes below this one, ended ones included."""
    times = os.times()
    ended = times.children_user + times.children_system
    return ended + descendants_cpu_seconds()
