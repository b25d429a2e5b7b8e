"""Costs of processes, and their end with the one that started them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gristmill.core.processes import measure_cost, peak_resident_bytes

BALLAST = 300_000_000


def test_peak_memory_is_not_inherited_from_the_parent() -> None:
    ballast = bytearray(BALLAST)
    assert peak_resident_bytes() > BALLAST
    code = (
        "from gristmill.core.processes import peak_resident_bytes\n"
        "less = peak_resident_bytes()\nballast = bytearray(50_000_000)\n"
        "print(less, peak_resident_bytes())"
    )
    less, more = map(int, subprocess.check_output([sys.executable, "-c", code]).split())
    assert less < 100_000_000 < len(ballast)
    assert more - less > 40_000_000


BUSY = "import time\nwhile time.process_time() < 0.5: pass"
SERVER = (
    f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}], "
    "check=True)\n"
    "print('ready', flush=True)\nsys.stdin.read()"
)
STAGE = (
    "import subprocess, sys\nfrom gristmill.core.processes import measure_cost\n"
    f"server = subprocess.Popen([sys.executable, '-c', {SERVER!r}], "
    "stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
    "server.stdout.readline()\nprint(measure_cost(1)['cpu_seconds'])\n"
    "server.communicate()\nprint(measure_cost(1)['cpu_seconds'])"
)


def test_cpu_time_of_ended_workers_is_counted_once() -> None:
    """Like a fork server that runs on after its workers have ended."""
    while_it_runs, after = map(
        float, subprocess.check_output([sys.executable, "-c", STAGE]).split()
    )
    assert while_it_runs > 0.5
    assert after > 0.5
    assert abs(after - while_it_runs) < 0.45, "counted twice, or lost"
    assert measure_cost(1)["cpu_seconds"] > 0


CHILD = (
    "import signal, sys\nfrom gristmill.core.processes import end_after_parent\n"
    "end_after_parent(signal.SIGKILL)\nprint('started', flush=True)\n"
    "for line in sys.stdin: print('heard', line, end='', flush=True)"
)
PARENT = (
    "import os, subprocess, sys, threading\nchildren = []\n"
    "def start(): children.append(subprocess.Popen([sys.executable, '-c', "
    f"{CHILD!r}]))\n"
    "thread = threading.Thread(target=start)\nthread.start()\n"
    "while len(os.listdir('/proc/self/task')) > 1: pass\n"
    "print('the thread has ended', flush=True)\nchildren[0].wait()\nprint('lost', "
    "flush=True)"
)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="asks Linux when a process ends"
)
def test_child_outlives_its_starting_thread_but_not_the_process() -> None:
    """Linux sends its own signal when the thread ends, and Flink's tasks are
    threads.
    """
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert {parent.stdout.readline() for _ in range(2)} == {
            b"started\n",
            b"the thread has ended\n",
        }
        parent.stdin.write(b"on\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"heard on\n"
        parent.kill()
        assert parent.stdout.read() == b"", (
            "the child holds the pipe as long as it lives"
        )
