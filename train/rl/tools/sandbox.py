"""Sandbox of bubblewrap for Python programs that a model wrote.

Every program gets:

- its own user, process, network, IPC, mount and host-name namespaces, without
  capabilities or new privileges;
- a read-only root with the interpreter, its standard library and the shared libraries
  of both, and nothing else;
- an empty folder in memory with a limited size, which disappears with the program;
- limits on processor time, address space and open files (`sandbox_program.py`);
- a seccomp filter without processes, threads and sockets (`seccomp_filter.py`);
- no environment but a fixed hash seed.

The kernel is shared with the machine: a kernel bug or a side channel (caches, clocks)
is out of scope.
"""

from __future__ import annotations

import os
import platform
import re
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gristmill.mixtures.objectives.rl_tools import PythonTool
from gristmill.train.rl.tools.seccomp_filter import seccomp_program

PROGRAM = Path(__file__).with_name("sandbox_program.py")
PROGRAM_INSIDE = "/program.py"
ISOLATION = (
    "bwrap --unshare-all --unshare-user --disable-userns --die-with-parent "
    "--new-session --cap-drop ALL --uid 65534 --gid 65534 --hostname sandbox --clearenv "
    "--setenv PYTHONHASHSEED 0 --setenv PYTHONUTF8 1"
)
"""Arguments of bubblewrap that do not depend on the program; the user is nobody."""
WALL_SECONDS_PER_SECOND = 4
"""Wall-clock seconds per second of processor time: other work may hold the processor,
and code may sleep.
"""
MAX_OUTPUT_BYTES = 65_536
"""A program is stopped if it prints more."""
FOLDER_BYTES = 16 << 20
"""Size of the folder in memory."""
GRAPHICAL = "_tkinter"
"""The one standard module that needs a display, and 20 libraries for it."""
SIGNAL_STATUS = 128
"""Bubblewrap exits with this plus the number of the signal that ended the program."""
HOW_TO_INSTALL = (
    "install bubblewrap 0.8 or newer and libseccomp 2.5 or newer (Debian and Ubuntu: "
    "apt-get install bubblewrap libseccomp2) and let it make user namespaces (sysctl "
    "kernel.unprivileged_userns_clone=1 and "
    "kernel.apparmor_restrict_unprivileged_userns=0, where the kernel has these; "
    "docker run --privileged in a container), or remove the tool"
)


class SandboxError(RuntimeError):
    """This machine cannot run sandboxed programs; the message says how to change
    that.
    """


@dataclass(frozen=True)
class ProgramResult:
    """Output of a program, and whether it ended by itself without an error."""

    output: str
    succeeded: bool


@cache
def check_sandbox() -> None:
    """Run a first program.

    Raises:
        SandboxError: it cannot be sandboxed on this machine.
    """
    if platform.system() != "Linux":
        raise SandboxError(
            "the tool python needs Linux, for its sandbox; remove the tool"
        )
    if shutil.which("bwrap") is None:
        raise SandboxError(
            "the tool python needs bubblewrap (bwrap), which is not installed; "
            f"{HOW_TO_INSTALL}"
        )
    result = run_python("print(1)", PythonTool(kind="python"))
    if result != ProgramResult("1", True):
        raise SandboxError(
            f"the tool python cannot be sandboxed here: {result.output}; "
            f"{HOW_TO_INSTALL}"
        )


def run_python(code: str, limits: PythonTool) -> ProgramResult:
    """Run a program; any failure, of the sandbox too, is a result and never an
    exception.

    Args:
        code: source text; the value of a last line that is an expression is printed, as
            in a notebook.
        limits: processor seconds and memory. The program ends within
            `WALL_SECONDS_PER_SECOND` times the seconds.
    """
    try:
        with (
            tempfile.TemporaryFile() as source,
            open(os.memfd_create("seccomp"), "r+b", buffering=0) as seccomp,
        ):
            source.write(code.encode(errors="replace"))
            source.seek(0)
            seccomp.write(seccomp_program())
            seccomp.seek(0)
            process = subprocess.Popen(
                sandbox_command(limits, seccomp.fileno()),
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[seccomp.fileno()],
            )
            with process:
                try:
                    output, timed_out = _read(
                        process, WALL_SECONDS_PER_SECOND * limits.seconds
                    )
                finally:
                    process.kill()
    except OSError as error:
        return ProgramResult(f"the sandbox cannot start: {error}", False)
    if len(output) > MAX_OUTPUT_BYTES:
        text = output[:MAX_OUTPUT_BYTES].decode(errors="replace")
        return ProgramResult(
            f"stopped: it printed more than {MAX_OUTPUT_BYTES} bytes\n{text}", False
        )
    signal_number = process.returncode - SIGNAL_STATUS
    if timed_out or signal_number in (signal.SIGXCPU, signal.SIGKILL):
        # The output up to then depends on the machine's speed; the model must read the
        # same answer on every machine.
        return ProgramResult(
            f"stopped: it computes for more than {limits.seconds} s, or waits", False
        )
    if signal_number > 0:
        return ProgramResult(f"ended by signal {signal_number}", False)
    return ProgramResult(
        output.decode(errors="replace").strip(), process.returncode == 0
    )


def sandbox_command(limits: PythonTool, seccomp: int) -> list[str]:
    """Arguments of bubblewrap that run `PROGRAM` with the code on stdin.

    Args:
        limits: processor seconds and memory.
        seccomp: file descriptor of the seccomp program.
    """
    return [
        *ISOLATION.split(),
        *interpreter_arguments(),
        *("--ro-bind", str(PROGRAM), PROGRAM_INSIDE),
        *f"--size {FOLDER_BYTES} --tmpfs /tmp --chdir /tmp --remount-ro /".split(),
        *f"--seccomp {seccomp} --".split(),
        interpreter(),
        *f"-B -P -s -S {PROGRAM_INSIDE} {limits.seconds} {limits.memory_mb}".split(),
    ]


def interpreter() -> str:
    """Path of the interpreter itself, outside any virtual environment."""
    return os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]


@cache
def interpreter_arguments() -> tuple[str, ...]:
    """Arguments that show the interpreter, its standard library without site-packages,
    and their shared libraries.
    """
    standard_library = Path(sysconfig.get_path("stdlib"))
    modules = [
        path
        for path in standard_library.glob("lib-dynload/*.so")
        if not path.name.startswith(GRAPHICAL)
    ]
    listing = subprocess.run(
        ["ldd", *[interpreter(), *map(str, modules)]], capture_output=True, text=True
    )
    libraries = sorted(set(re.findall(r"(/\S+) \(0x", listing.stdout)))
    arguments = ["--setenv", "PYTHONHOME", sys.base_prefix]
    arguments += [
        "--setenv",
        "LD_LIBRARY_PATH",
        ":".join(sorted({os.path.dirname(path) for path in libraries})),
    ]
    for path in (interpreter(), str(standard_library), *libraries):
        arguments += ["--ro-bind", path, path]
    for packages in ("site-packages", "dist-packages"):
        folder = standard_library / packages
        if folder.exists():
            arguments += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    return tuple(arguments)


def _read(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, bool]:
    """Output of a process, up to a little over `MAX_OUTPUT_BYTES`, and whether its time
    ran out.
    """
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    output = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(output) <= MAX_OUTPUT_BYTES:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not selector.select(remaining):
                return bytes(output), True
            part = os.read(process.stdout.fileno(), MAX_OUTPUT_BYTES)
            if not part:
                break
            output += part
        else:
            return bytes(output), False
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:  # it closed its output and continues
        return bytes(output), True
    return bytes(output), False
