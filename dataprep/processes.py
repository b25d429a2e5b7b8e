"""Processes that do not outlive the one that started them, and what they cost."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
"""Thread pools of native libraries, which look at these when they begin: for where there is a process per core."""
STAGE_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    # Threads that wait give their core to others: as fast on an idle machine, several times faster on a busy one.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What a stage's process finds in its environment unless the user has set it."""
PR_SET_PDEATHSIG = 1
"""See prctl(2)."""
KILOBYTE = 1024
"""Linux's unit of ru_maxrss."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Within it nobody looks for garbage, of which imports leave none: the search takes a seventh of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Ask Linux to send this process a signal when its parent ends, so that a killed run leaves nothing behind.

    Args:
        number: the signal.
        parent: the expected parent; where it has ended already, the signal comes at once.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_after_parent(number: signal.Signals) -> None:
    """Send this process a signal when the process that started it ends, from a thread that waits for that.

    Linux's own signal (`end_with_parent`) comes when the parent's *thread* ends that started this process, as a task's
    thread of Flink does long before its worker is wanted no more.
    """
    if not sys.platform.startswith("linux"):
        return

    def wait(parent: int) -> None:
        select.select([parent], [], [])
        os.kill(os.getpid(), number)

    with suppress(ProcessLookupError):
        threading.Thread(target=wait, args=(os.pidfd_open(os.getppid()),), daemon=True).start()
        return
    os.kill(os.getpid(), number)  # it has ended already


def kill_child(child: subprocess.Popen[bytes]) -> None:
    """End a process that this one started, wait for it, and close the pipes to it."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what it was not told is lost with it
                pipe.close()


def end_session(child: subprocess.Popen[bytes], seconds: float) -> None:
    """End a process that leads a session of its own, and all in it: ask, wait so many seconds, insist."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            break
        try:
            child.wait(seconds)
            break
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def peak_resident_bytes() -> int:
    """The most memory that this process has held since its program began.

    Linux's ru_maxrss does not start over with a program: it is at least what the process held that started this one
    (fs/exec.c, exec_mmap). VmHWM of proc(5) is the program's own.
    """
    if sys.platform.startswith("linux"):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return KILOBYTE * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else KILOBYTE
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_bytes() -> int:
    """The memory that this process holds now; the most that it has held where the system does not say."""
    if not sys.platform.startswith("linux"):
        return peak_resident_bytes()
    with open("/proc/self/statm", "rb", buffering=0) as sizes:
        return int(sizes.read().split()[1]) * resource.getpagesize()


def measure_cost(workers: int, processes: int = 1) -> dict[str, float]:
    """What this process and its children have used: seconds of CPU, and bytes of memory at the peak.

    The kernel adds up the children that have ended and were waited for; those that still run, and what these have
    waited for, are added here. It keeps the peak of the largest child only; where there are children, as many of that
    size as there are workers are assumed. Of `processes` that do the same side by side, this is taken to be one like
    all.
    """
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in (own, children)) + descendants_cpu_seconds(os.getpid())
    return {
        "cpu_seconds": round(processes * seconds, 3),
        "peak_memory_bytes": processes * (peak_resident_bytes() + workers * KILOBYTE * children.ru_maxrss),
    }


def descendants_cpu_seconds(parent: int) -> float:
    """Seconds of CPU of all running processes below one, with those that they have waited for; 0 without /proc.

    Fields of /proc/PID/stat as in proc(5): 4 is the parent, 14 to 17 are the ticks of the process and of its children.
    """
    found: dict[int, list[tuple[int, float]]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        ticks = sum(map(int, fields[11:15]))
        found.setdefault(int(fields[1]), []).append((int(folder.name), ticks / os.sysconf("SC_CLK_TCK")))

    def below(process: int) -> float:
        return sum(seconds + below(child) for child, seconds in found.get(process, ()))

    return below(parent)
