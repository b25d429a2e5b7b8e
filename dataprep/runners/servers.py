"""Job servers of portable engines, started by gristmill: one for all stages of a run,
or for all jobs of a process, with which it ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.core.processes import kill_child
from gristmill.dataprep.runners.connections import PROBED_VARIABLE
from gristmill.dataprep.runners.errors import WorkerError

VARIABLE = "GRISTMILL_JOB_SERVER"
"""Environment variable of a stage's process with the address of the run's job
server.
"""
START_SECONDS = 60.0
"""Timeout for a job server's start; one in Java takes some seconds on a busy
machine.
"""
ENDING = (
    "import os, signal, sys; from gristmill.core.processes import end_with_parent; "
    "end_with_parent(signal.SIGKILL, int(sys.argv[1])); os.execvp(sys.argv[2], "
    "sys.argv[2:])"
)
"""Python code that executes a program which ends with its parent process, however that
ends.
"""

LOOK_MS = 50
"""Interval between attempts to connect to a server."""
TURN_SECONDS = 1.0
"""Timeout of one attempt to get an answer."""
SHARED_SECONDS = 10.0
"""Timeout for an answer of the run's job server, which has answered before."""


@dataclass(frozen=True)
class Server:
    """Running job server; see `shared_driver.SharedProcess`.

    Attributes:
        process: process of the server.
        port: port of the loopback address.
        folder: folder for its files, with its output in `log`.
    """

    process: subprocess.Popen[bytes]
    port: int
    folder: Path

    @property
    def address(self) -> str:
        """Address as HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def answers(self, seconds: float) -> bool:
        """Wait until the server answers; False after `seconds`, or if its process ends.

        A running process or an open port does not suffice: a killed server closes its
        connections shortly before its process ends, and its port may accept connections
        until then.
        """
        return answers(self.address, seconds, self.is_running)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables by which a stage's process finds it."""
        return {VARIABLE: self.address, PROBED_VARIABLE: str(self.folder / "probed")}

    def is_running(self) -> bool:
        """Test if its process runs."""
        return self.process.poll() is None

    def cancel(self, pid: int) -> None:
        """Leave the jobs of a process to the engine, which runs them to their end."""

    def close(self) -> None:
        """Kill it."""
        kill_child(self.process)
        shutil.rmtree(self.folder, ignore_errors=True)


_running: dict[str, Server] = {}


def job_server(name: str, make_command: Callable[[int, Path], Sequence[str]]) -> str:
    """Return the address of the run's job server, or of one of this process, which is
    started if necessary.

    Args:
        name, make_command: see `start_server`.

    Raises:
        WorkerError: see `start_server`.
    """
    shared = os.environ.get(VARIABLE)
    if shared is not None and answers(shared, SHARED_SECONDS):
        return shared
    if name in _running:
        if _running[name].answers(START_SECONDS):
            return _running[name].address
        _end(name)
    server = _running[name] = start_server(name, make_command)
    atexit.register(_end, name)
    return server.address


def start_server(
    name: str, make_command: Callable[[int, Path], Sequence[str]]
) -> Server:
    """Start a job server, which ends with the thread that starts it.

    Args:
        name: name of the engine, with everything that distinguishes this server from
            others.
        make_command: makes the command of the server from its port and a folder for its
            files.

    Raises:
        WorkerError: the server ended or does not answer; the message has its last line
            of output.
    """
    folder = Path(tempfile.mkdtemp(prefix="gristmill-engine-"))
    port = free_port()
    command = [sys.executable, "-c", ENDING, str(os.getpid())]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [*command, *make_command(port, folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    server = Server(process, port, folder)
    if server.answers(START_SECONDS):
        return server
    failure = (
        f"does not answer within {START_SECONDS:g} s"
        if server.is_running()
        else "ended"
    )
    log_lines = (folder / "log").read_text(errors="replace").splitlines()
    server.close()
    # Indented lines belong to a traceback; the last other line has the error.
    messages = [line for line in log_lines if line.strip() and not line[0].isspace()]
    last = messages[-1] if messages else "nothing"
    raise WorkerError(f"the job server of {name} {failure}; it said: {last}")


def answers(
    endpoint: str, seconds: float, lives: Callable[[], bool] = lambda: True
) -> bool:
    """Wait until a server answers a call, even with an error about the method; False if
    it does not.

    Args:
        endpoint: HOST:PORT.
        seconds: timeout.
        lives: function that returns False once the server is dead, which ends the wait.
    """
    import grpc

    deadline = time.monotonic() + seconds
    options = [
        # Use a new connection: one that Beam still has open may be broken without
        # anyone having noticed.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", LOOK_MS),
        ("grpc.max_reconnect_backoff_ms", LOOK_MS),
    ]
    with grpc.insecure_channel(endpoint, options=options) as channel:
        call = channel.unary_unary("/gristmill/Answer")
        while lives() and (remaining := deadline - time.monotonic()) > 0:
            try:
                call(b"", timeout=min(remaining, TURN_SECONDS), wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() in (
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    grpc.StatusCode.UNAVAILABLE,
                ):
                    time.sleep(min(remaining, LOOK_MS / 1000))
                    continue
            return True
    return False


def free_port() -> int:
    """Find a free port of the loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _end(name: str) -> None:
    if name in _running:
        _running.pop(name).close()
