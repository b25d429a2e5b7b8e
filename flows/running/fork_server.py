"""Fork server: a process that imports modules once and forks workers from itself;
client and server side.

Server and parent share a socket, over which the parent passes two descriptors per
worker: a socket, the worker's line, and the worker's output. The line carries a request
(JSON, one line) and as answers the process number and, after the worker's end, its exit
code. Closing the line kills the worker; closing the socket, as the parent's end always
does, kills all workers and the server.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn, TypedDict

from gristmill.core.processes import ONE_THREAD, end_with_parent, without_collection


class ForkRequest(TypedDict):
    """Request for a worker: its environment variables, modules to import before the
    fork, working folder, module search path, and arguments.
    """

    environment: dict[str, str]
    modules: list[str]
    folder: str
    path: list[str]
    command: list[str]


class ForkServer:
    """Client of a running fork server.

    Args:
        module: module to run, which gets the descriptor of a socket and serves it with
            `Server`.
        environment: variables added to this process's environment.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._parent = os.getpid()
        self._has_forked = False
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**dict.fromkeys(ONE_THREAD, "1"), **os.environ, **environment},
            )

    @property
    def is_running(self) -> bool:
        """True if it can fork workers: it has not ended, and was started by this very
        process.
        """
        return self._parent == os.getpid() and self._process.poll() is None

    def import_soon(self, modules: Sequence[str]) -> None:
        """Make the server import these modules first when it is idle."""
        line, theirs = socket.socketpair()
        # the server has ended; `start` reports that
        with line, theirs, self._lock, suppress(OSError):
            socket.send_fds(self._socket, [b"m"], [theirs.fileno()])
            line.sendall(json.dumps(list(modules)).encode() + b"\n")

    def start(
        self,
        environment: Mapping[str, str],
        modules: Sequence[str],
        output: int,
        command: Sequence[str] = (),
    ) -> Forked:
        """Fork a worker, without waiting for it.

        Args:
            environment: all of the worker's environment variables.
            modules: modules that the server imports before the fork.
            output: the descriptor of the worker's standard output and error.
            command: arguments of the work, if the server's module needs them.

        Raises:
            ForkServerError: the server has ended.
        """
        folder = os.getcwd()
        request: ForkRequest = {
            "environment": dict(environment),
            "modules": list(modules),
            "folder": folder,
            "path": [folder, *filter(None, sys.path)],
            "command": list(command),
        }
        line, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                self._has_forked = True
                socket.send_fds(self._socket, [b"w"], [theirs.fileno(), output])
            line.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            line.close()
            raise ForkServerError(f"the fork server has ended: {error}") from error
        return Forked(line, self._process)

    def close(self) -> None:
        """End the server and its workers."""
        if self._parent == os.getpid():
            self._socket.close()
            if not self._has_forked:
                self._process.kill()  # it may still be importing
            self._process.wait()


class ForkServerError(RuntimeError):
    """The fork server has ended."""


class Forked:
    """A worker process.

    Attributes:
        pid: process number, once known.
    """

    def __init__(self, line: socket.socket, server: subprocess.Popen[bytes]) -> None:
        self.pid: int | None = None
        self._line = line
        self._server = server
        self._answers = line.makefile("rb")

    def begun(self) -> int:
        """Wait for the worker's start, and return its process number.

        Raises:
            ForkServerError: the server ended first.
        """
        answer = b""
        with suppress(ConnectionResetError):  # if the server had not read the request
            answer = self._answers.readline()
        if not answer:
            raise ForkServerError(
                f"the fork server ended with code {self._server.wait()}"
            )
        self.pid = int(answer)
        return self.pid

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code (negative: the signal that ended
        it). Call it once.

        If the server ended, its workers ended with it, and the exit code is the
        server's.

        Raises:
            TimeoutError: it has not ended in time; it is killed.
        """
        self._line.settimeout(timeout)
        with self._line, self._answers:
            for answer in self._answers:
                number = int(answer)
                if self.pid is not None:
                    return number
                self.pid = number
        return self._server.wait()

    def kill(self) -> None:
        """Kill it."""
        with suppress(OSError):  # it has ended
            self._line.shutdown(socket.SHUT_WR)


def _missing(request: ForkRequest) -> list[str]:
    """Modules of a request that are not imported yet."""
    return [name for name in request["modules"] if name not in sys.modules]


class PendingWorker(NamedTuple):
    """A requested worker whose modules are not imported yet: its line, its output
    descriptor, and its request.
    """

    line: socket.socket
    output: int
    request: ForkRequest


class Server:
    """Forks workers, reports their ends, and kills those whose line was closed.

    Args:
        requests: socket shared with the parent.
        work: function that handles a worker's request; returns its exit code, or None
            for 0.
        later: modules that are imported one by one while idle; missing ones are
            skipped.
    """

    def __init__(
        self,
        requests: socket.socket,
        work: Callable[[ForkRequest], int | None],
        later: Sequence[str] = (),
    ) -> None:
        self._requests = requests
        self._work = work
        self._later = list(later)
        self._workers: dict[int, socket.socket] = {}
        self._pending: list[PendingWorker] = []
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Serve until the parent ends; the workers end too."""
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        # any handler: it makes Python write to `_wake`
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for source in (self._requests, self._woken):
            self._selector.register(source, selectors.EVENT_READ)
        while True:
            events = self._selector.select(0 if self._pending or self._later else None)
            if not events:
                self._import_one()
            for key, _ in events:
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._report_ends()
                elif key.fileobj is not self._requests:
                    for pid, line in self._workers.items():
                        if line is key.fileobj:  # otherwise it has ended by itself
                            self._selector.unregister(line)
                            os.kill(pid, signal.SIGKILL)
                elif not self._answer_request():
                    return
            self._fork_ready_workers()

    def _fork_ready_workers(self) -> None:
        """Fork the workers whose modules are all imported; a worker never waits for the
        modules of another.
        """
        server = os.getpid()
        for worker in list(self._pending):
            if _missing(worker.request):
                continue
            self._pending.remove(worker)
            pid = os.fork()
            if not pid:
                self._become_worker(server, worker)
            self._workers[pid] = worker.line
            self._selector.register(worker.line, selectors.EVENT_READ)
            _send_number(worker.line, pid)
            os.close(worker.output)

    def _import_one(self) -> None:
        """Import a module of the first pending worker, otherwise one of `later`."""
        with without_collection():
            if self._pending:
                importlib.import_module(_missing(self._pending[0].request)[0])
            else:
                with suppress(ImportError):
                    importlib.import_module(self._later.pop(0))
            gc.freeze()  # the next collection would visit all that was imported

    def _answer_request(self) -> bool:
        kind, descriptors, _, _ = socket.recv_fds(self._requests, 1, 2)
        if not descriptors:
            for pid in self._workers:
                os.kill(pid, signal.SIGKILL)
            return False
        line = socket.socket(fileno=descriptors[0])
        with line.makefile("rb") as stream:
            content = stream.readline()
        if not content.endswith(b"\n"):
            return True  # the parent has ended, which the next event shows
        if kind == b"m":
            self._later[:0] = json.loads(content)
            line.close()
            return True
        self._pending.append(PendingWorker(line, descriptors[1], json.loads(content)))
        return True

    def _become_worker(self, server: int, worker: PendingWorker) -> NoReturn:
        code = 1
        try:
            end_with_parent(signal.SIGKILL, server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            lines = (worker.line, *self._workers.values())
            for other_socket in (self._requests, self._woken, self._wake, *lines):
                other_socket.close()
            for pending in self._pending:
                pending.line.close()
                os.close(pending.output)
            for stream in (1, 2):
                os.dup2(worker.output, stream)
            os.close(worker.output)
            code = self._work(worker.request) or 0
        except BaseException:  # noqa: BLE001 - an exception that left here would make the worker a second server
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _report_ends(self) -> None:
        for pid in list(self._workers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._workers.pop(pid) as line:
                    _send_number(line, os.waitstatus_to_exitcode(status))
                    with suppress(KeyError):  # it was killed
                        self._selector.unregister(line)


def _send_number(line: socket.socket, number: int) -> None:
    with suppress(OSError):  # the client has closed the line
        line.sendall(b"%d\n" % number)
