"""Rows of a benchmark, timing of sides that take turns, and memory of processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A measurement beside a named peer or bound; None stands for a value that was not
    measured.

    Attributes:
        name: unique within its area.
        ours, peer: measured values.
        unit: of both.
        ratio: of the two, over 1 if ours is better; see `row` and `cost_row`.
        note: circumstances, in words.
        floor: least ratio that `gristmill bench floors` accepts; its source stands in a
            comment beside it.
        promised, happened: required and observed outcome of a fault.
    """

    name: str
    ours: float | None
    peer: float | None
    unit: str
    ratio: float | None
    note: str = ""
    floor: float | None = None
    promised: str = ""
    happened: str = ""

    @property
    def is_below_floor(self) -> bool:
        """True if both the floor and the ratio are known, and the ratio is lower."""
        return (
            self.floor is not None
            and self.ratio is not None
            and self.ratio < self.floor
        )


def row(
    name: str,
    ours: float | None,
    peer: float | None,
    unit: str,
    note: str = "",
    floor: float | None = None,
) -> Row:
    """Return a row whose ratio is ours over the peer's: for rates and shares."""
    ratio = None if ours is None or not peer else ours / peer
    return Row(name, ours, peer, unit, ratio, note, floor)


def cost_row(
    name: str,
    ours: float,
    peer: float,
    unit: str,
    note: str = "",
    floor: float | None = None,
) -> Row:
    """Return a row whose ratio is the peer's over ours: for seconds, bytes and
    errors.
    """
    return Row(name, ours, peer, unit, peer / ours if ours else None, note, floor)


def fastest(
    repeats: int,
    *works: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], object] = lambda: None,
    warmups: int = 0,
) -> list[float]:
    """Return the least seconds of each side over some rounds; sides take turns, so that
    all meet the same other load.

    Args:
        repeats: rounds that count.
        works: sides.
        clock: `time.process_time` if all work is done in this process: other load
            hardly counts then.
        before: called before each side, outside the time.
        warmups: rounds before those that count.
    """
    rounds: list[list[float]] = []
    for _ in range(warmups + repeats):
        rounds.append([])
        for work in works:
            before()
            start = clock()
            work()
            rounds[-1].append(clock() - start)
    return [min(seconds) for seconds in zip(*rounds[warmups:], strict=True)]


def text_megabytes(texts: Iterable[str]) -> float:
    """Return MB of UTF-8."""
    return sum(len(text.encode()) for text in texts) / 1e6


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    tree = [pid]
    for parent in tree:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                tree.extend(
                    map(
                        int,
                        Path(f"/proc/{parent}/task/{task}/children")
                        .read_text()
                        .split(),
                    )
                )
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
    return tree


def proportional_bytes(pid: int) -> int:
    """Return memory of a process with its share of common pages (Pss); 0 after its
    end.
    """
    try:
        usage = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next(
        (
            int(line.split()[1]) * 1024
            for line in usage.splitlines()
            if line.startswith("Pss:")
        ),
        0,
    )


def resident_bytes(pid: int) -> int:
    """Return resident memory of a process, common pages whole; 0 after its end."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    except OSError:
        return 0


def added_bytes(work: Callable[[], object]) -> int:
    """Return the most resident memory of this process during a call, beyond what it had
    before.
    """
    before = resident_bytes(os.getpid())
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    work()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 - before


class MemorySampler:
    """Background thread that samples the memory of a process and its descendants.

    Args:
        pid: the process.
        bytes_of: memory of one process.
        interval_seconds: time between samples.

    Attributes:
        peak: most bytes of all of them together.
    """

    def __init__(
        self, pid: int, bytes_of: Callable[[int], int], interval_seconds: float
    ) -> None:
        self.peak = 0
        self._pid, self._bytes_of, self._interval_seconds = (
            pid,
            bytes_of,
            interval_seconds,
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self.peak = max(
                self.peak, sum(map(self._bytes_of, process_tree(self._pid)))
            )
