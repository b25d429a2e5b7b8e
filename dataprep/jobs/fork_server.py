"""The process from which worker processes are forked, seen by the process that needs them; `worker.py` is its inside.

Importing Beam and numba takes a worker a second. The fork server does it once: for all workers, and for all jobs of
the process that started it. Every job still gets fresh workers, since a fork takes some milliseconds.

Server and parent share a socket, over which the parent passes two more descriptors per worker: a socket of its own,
the worker's line, and where its output goes. Over the line go a request (JSON, one line) and as answers the process
number and, once the worker has ended, its exit code. Closing the line kills the worker; closing the socket, as the
parent's end does whatever ends it, kills all workers and the server.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
"""Thread pools of native libraries: there is a process per core already."""
PACKAGE = "gristmill."
_lock = threading.Lock()
_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """The fork server of this process, which is started where there is none; it goes on importing meanwhile."""
    global _server
    with _lock:
        if _server is None or not _server.is_running:
            _server = ForkServer()
            atexit.register(_server.close)
        return _server


def module_of(function: Callable[..., Any]) -> str:
    """Where a function that may be a `partial` is defined, if that is a module of this package, else empty.

    Only of these it is known that importing them starts no thread, which a fork would lose.
    """
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__module__", None) or ""
    return name if name.startswith(PACKAGE) else ""


class ForkServer:
    """A running fork server.

    Args:
        module: its inside, which is told the descriptor of a socket.
        environment: what its environment has beside that of this process.
    """

    def __init__(
        self, module: str = "gristmill.dataprep.jobs.worker", environment: Mapping[str, str] | None = None
    ) -> None:
        self._parent = os.getpid()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
                env={**dict.fromkeys(ONE_THREAD, "1"), **os.environ, **(environment or {})},
            )  # fmt: skip

    @property
    def is_running(self) -> bool:
        """Whether workers can be had from it: it has not ended, and was started by this very process."""
        return self._parent == os.getpid() and self._process.poll() is None

    def start(
        self, environment: Mapping[str, str], modules: Sequence[str], output: int, command: Sequence[str] = ()
    ) -> Forked:
        """Fork a worker, without waiting for it.

        Args:
            environment: all of the worker's environment variables.
            modules: what the server imports before it forks, unless it has.
            output: the descriptor of the worker's standard output and error.
            command: what it is to do, where the server's inside asks for that.
        """
        line, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"w"], [theirs.fileno(), output])
        folder = os.getcwd()
        request = {
            "environment": dict(environment), "modules": list(modules), "folder": folder,
            "path": [folder, *filter(None, sys.path)], "command": list(command),
        }  # fmt: skip
        line.sendall(json.dumps(request).encode() + b"\n")
        return Forked(line, self._process)

    def close(self) -> None:
        """End the server and what it has forked."""
        if self._parent == os.getpid():
            self._socket.close()
            self._process.wait()


class Forked:
    """A worker process.

    Attributes:
        pid: its number, once `wait` has heard of it.
    """

    def __init__(self, line: socket.socket, server: subprocess.Popen[bytes]) -> None:
        self.pid: int | None = None
        self._line, self._server = line, server

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code (negative: the signal that ended it); for one thread, once.

        Where the server ended, its workers have ended with it; the exit code is the server's.

        Raises:
            TimeoutError: it has not ended after so many seconds; it is killed.
        """
        self._line.settimeout(timeout)
        with self._line, self._line.makefile("rb") as answers:
            for answer in answers:
                number = int(answer)
                if self.pid is not None:
                    return number
                self.pid = number
        return self._server.wait()

    def kill(self) -> None:
        """End it at once."""
        with suppress(OSError):  # it has ended
            self._line.shutdown(socket.SHUT_WR)
