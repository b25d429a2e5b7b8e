"""Job servers of portable engines that gristmill starts itself: one for all jobs of a process, gone with it."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.dataprep.jobs.errors import WorkerError
from gristmill.dataprep.processes import kill_child

START_SECONDS = 60.0
"""For a job server to answer: a Java one takes some seconds on a busy machine."""
ENDING = (
    "import os, signal, sys; from gristmill.dataprep.processes import end_with_parent; "
    "end_with_parent(signal.SIGKILL, int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Becomes the program that it is given, which ends with the process that started it, whatever ends that."""

LOOK_SECONDS = 0.05
"""Between two looks at whether its port is open, or it has ended."""
TURN_SECONDS = 1.0
"""So long its answer is waited for at a time."""


@dataclass(frozen=True)
class Server:
    """A job server of this process.

    Attributes:
        process: what was started.
        port: of the loopback address.
        folder: for its files; `log` in it has what it printed.
    """

    process: subprocess.Popen[bytes]
    port: int
    folder: Path

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def answers(self, seconds: float) -> bool:
        """Wait until it does; no longer than so many seconds, nor than it lives.

        Neither that its process is there nor that its port is open says so: one that was killed closes its connections
        a moment before it has ended, and its port, which takes connections until then, may come last.
        """
        deadline = time.monotonic() + seconds
        while not self._listens():  # which is asked more often than gRPC tries to connect
            if self.process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(LOOK_SECONDS)
        return answers(self.address, deadline - time.monotonic(), lambda: self.process.poll() is None)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


_running: dict[str, Server] = {}


def job_server(name: str, make_command: Callable[[int, Path], Sequence[str]]) -> str:
    """The address of a job server of this process, which answers: it is started where there is none that does.

    Args:
        name: of the engine, and whatever tells this server from another one of it.
        make_command: the command that starts it, from its port and a folder for its files.

    Raises:
        WorkerError: it ended, or does not answer; with the last line that it printed.
    """
    if name in _running:
        if _running[name].answers(START_SECONDS):
            return _running[name].address
        _end(name)
    server = _running[name] = _start(make_command)
    atexit.register(_end, name)
    if not server.answers(START_SECONDS):
        how = f"does not answer within {START_SECONDS:g} s" if server.process.poll() is None else "ended"
        said = (server.folder / "log").read_text(errors="replace").splitlines()
        _end(name)
        # What is indented is where an error came from: the last line that is not says what it was.
        last = next((line for line in reversed(said) if line.strip() and not line[0].isspace()), "nothing")
        raise WorkerError(f"the job server of {name} {how}; it said: {last}")
    return server.address


def answers(endpoint: str, seconds: float, lives: Callable[[], bool] = lambda: True) -> bool:
    """Wait until a server answers a call, if only that it knows no such method; whether it did.

    Args:
        endpoint: HOST:PORT.
        seconds: so long at the most.
        lives: asked meanwhile; nobody is waited for who does not.
    """
    import grpc

    deadline = time.monotonic() + seconds
    # Not a connection that Beam has still open: nobody may have noticed yet that it is of no use.
    with grpc.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary("/gristmill/Answer")
        while lives() and (left := deadline - time.monotonic()) > 0:
            try:
                call(b"", timeout=min(left, TURN_SECONDS), wait_for_ready=True)
            except grpc.RpcError as error:
                if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
                    time.sleep(min(left, LOOK_SECONDS))
                    continue
            return True
    return False


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _start(make_command: Callable[[int, Path], Sequence[str]]) -> Server:
    folder, port = Path(tempfile.mkdtemp(prefix="gristmill-engine-")), free_port()
    with open(folder / "log", "wb") as log:
        return Server(
            subprocess.Popen(
                [sys.executable, "-c", ENDING, str(os.getpid()), *make_command(port, folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            ),
            port,
            folder,
        )


def _end(name: str) -> None:
    server = _running.pop(name, None)
    if server is not None:
        kill_child(server.process)
        shutil.rmtree(server.folder, ignore_errors=True)
