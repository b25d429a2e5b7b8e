"""Runs Python that a model wrote: a process of its own, which computes and prints, and can do little else.

What holds the process, all of it before the first line of the code (see `sandbox_child.py`):

- limits of the kernel on seconds of computing, memory, size and number of files; no core dump;
- a seccomp filter, under which starting processes or threads, sockets, signals to others, and every call that changes
  the machine fail;
- Landlock, under which it reads the standard library and nothing else, and writes in an empty folder that is removed;
- a network namespace of its own, where the kernel gives one to everybody;
- Python without site-packages and without the environment, whose hash seed is fixed.

It is a fence around clumsy programs, not a wall against an attacker: a fault in the kernel, or in what the standard
library does with the files it may read, is open to it, and it shares the machine's processors and caches.
"""

from __future__ import annotations

import os
import platform
import selectors
import signal as signals
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gristmill.mixtures.objectives.rl_tools import PythonTool

CHILD = Path(__file__).with_name("sandbox_child.py")
CLOCK = 4
"""Seconds of the clock for each one of computing: other work may hold the processor, and code may sleep."""
MOST_OUTPUT_BYTES = 65_536
"""Of what a program prints; it is stopped when it prints more."""
LATE, PRINTS = "stopped: it took too long", f"stopped: it printed more than {MOST_OUTPUT_BYTES} bytes"
"""Why a program was stopped."""


class SandboxError(RuntimeError):
    """This machine cannot hold a program as it must be held."""


@dataclass(frozen=True)
class Ran:
    """What a program printed, and whether it ended by itself without an error."""

    output: str
    succeeded: bool


@cache
def check_sandbox() -> None:
    """Run a first program, to see that it can be held here.

    Raises:
        SandboxError: it cannot; says what is missing.
    """
    if platform.system() != "Linux":
        raise SandboxError("rl.tools: python is held by means of Linux, and this is another system: remove the tool")
    found = run_python("print(1)", PythonTool(kind="python"))
    if not found.succeeded:
        raise SandboxError(
            f"rl.tools: python cannot be held here: {found.output}; it needs Linux 5.13 or later with "
            "seccomp and Landlock, on x86_64 or aarch64: remove the tool, or use such a machine"
        )


def run_python(code: str, limits: PythonTool) -> Ran:
    """Run a program in a process of its own; ends within `CLOCK` times its seconds, whatever the program does.

    Args:
        code: of the program; the value of a last line that is an expression is printed, as in a notebook.
        limits: seconds of computing and memory.
    """
    with tempfile.TemporaryDirectory(prefix="gristmill-python-") as folder, tempfile.TemporaryFile() as source:
        source.write(code.encode(errors="replace"))
        source.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", str(CHILD), str(limits.seconds), str(limits.memory_mb), folder],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"},
            start_new_session=True,
        )
        with process:
            try:
                output, stopped = _read(process, CLOCK * limits.seconds)
            finally:
                process.kill()
    status = process.returncode
    if stopped == PRINTS:
        return Ran(f"{stopped}\n{output}", False)
    if stopped or status in (-signals.SIGXCPU, -signals.SIGKILL):
        # How far it came by then depends on the machine, and is not told: a model is to read the same on each.
        return Ran(f"stopped: it computes for more than {limits.seconds} s, or waits", False)
    return Ran(output.strip() if status >= 0 else f"ended by signal {-status}", status == 0)


def _read(process: subprocess.Popen[bytes], seconds: float) -> tuple[str, str]:
    """What a process printed, and why it was stopped ("" where it was not)."""
    assert process.stdout is not None
    deadline, found, stopped = time.monotonic() + seconds, bytearray(), ""
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        while not stopped:
            left = deadline - time.monotonic()
            if left <= 0 or not waiting.select(left):
                stopped = LATE
                break
            part = os.read(process.stdout.fileno(), MOST_OUTPUT_BYTES)
            found += part
            if not part:
                break
            if len(found) > MOST_OUTPUT_BYTES:
                stopped = PRINTS
    if not stopped:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # it closed its output and goes on
            stopped = LATE
    return bytes(found[:MOST_OUTPUT_BYTES]).decode(errors="replace"), stopped
