"""Processes that end with their parent, and their cost."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
"""Variables with the thread counts of native libraries, read at start-up; set to 1 when
there is a process per core.
"""
STAGE_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    # Waiting threads yield their core: as fast on an idle machine, several times faster
    # on a busy one.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Default environment of a stage's process; variables set by the user win."""
PR_SET_PDEATHSIG = 1
"""See prctl(2)."""
KILOBYTE = 1024
"""Linux's unit of ru_maxrss."""


@contextmanager
def in_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable the garbage collector in a block: imports leave no garbage, and spend a
    seventh of their time on it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Ask Linux to send this process a signal when its parent ends, so that a killed
    run leaves no processes.

    Args:
        number: the signal.
        parent: PID of the expected parent; if it has already ended, the signal is sent
            at once.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_after_parent(number: signal.Signals) -> None:
    """Send this process a signal when its parent ends, from a waiting thread.

    Linux's own signal (`end_with_parent`) is sent when the parent *thread* ends that
    started this process, such as a Flink task's thread, which ends long before its
    worker.
    """
    if not sys.platform.startswith("linux"):
        return

    def wait(parent: int) -> None:
        select.select([parent], [], [])
        os.kill(os.getpid(), number)

    with suppress(ProcessLookupError):
        threading.Thread(
            target=wait, args=(os.pidfd_open(os.getppid()),), daemon=True
        ).start()
        return
    os.kill(os.getpid(), number)  # the parent has already ended


def wait_until(is_done: Callable[[], bool], seconds: float, pause: float) -> bool:
    """Wait until a condition is true; False if it is not after some seconds."""
    deadline = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def kill_child(child: subprocess.Popen[bytes]) -> None:
    """Kill a child process, wait for it, and close its pipes."""
    child.kill()
    with suppress(BrokenPipeError), child:  # unsent input is lost with the process
        pass


def end_session(child: subprocess.Popen[bytes], seconds: float) -> None:
    """End a process that leads its own session, and all processes in it: SIGTERM, wait,
    SIGKILL.
    """
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
    """Peak resident memory of this process since its program started.

    Linux's ru_maxrss is not reset by exec: it is at least the peak of the process that
    started this one (fs/exec.c, exec_mmap). VmHWM of proc(5) is the program's own.
    """
    if sys.platform.startswith("linux"):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return KILOBYTE * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else KILOBYTE
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_bytes() -> int:
    """Current resident memory of this process."""
    import psutil

    return psutil.Process().memory_info().rss


class Cost(TypedDict):
    """Cost of an attempt."""

    cpu_seconds: float
    peak_memory_bytes: int


def measure_cost(workers: int, processes: int = 1) -> Cost:
    """CPU seconds and peak memory of this process and its children.

    The kernel counts the CPU time of children that ended and were waited for; that of
    running descendants is added here. It reports the peak of the largest child only, so
    all `workers` are assumed to be that large. Of `processes` that do equal work side
    by side, this process counts as a typical one.
    """
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own_user, own_system, ended_user, ended_system, _ = os.times()
    seconds = own_user + own_system + ended_user + ended_system
    seconds += descendants_cpu_seconds()
    return {
        "cpu_seconds": round(processes * seconds, 3),
        "peak_memory_bytes": processes
        * (peak_resident_bytes() + workers * KILOBYTE * children.ru_maxrss),
    }


def descendants_cpu_seconds() -> float:
    """CPU seconds of all running descendants of this process and of the children they
    waited for.
    """
    import psutil

    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended
            seconds += sum(process.cpu_times()[:4])
    return seconds
