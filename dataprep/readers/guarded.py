"""A child process for work that a bad input may crash, hang or drive out of memory: its
start and its protocol.

The process gets its settings as its only argument, in JSON, and pickled requests from
its standard input; it sends pickled answers to its standard output. It ends with its
parent, or at the end of its requests. It limits its own memory, and its time per
answer, with timers whose signals end it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Self

from gristmill.core.files import CHUNK_BYTES, as_path, is_local
from gristmill.core.processes import end_with_parent, kill_child

SLEEP_FACTOR = 6
"""Wall-clock limit of an answer, as a multiple of its CPU limit."""
OUT_OF_MEMORY = signal.SIGUSR1
"""Signal by which the process ends if a request needs more memory than it has."""
BUFFER_BYTES = 1 << 16
"""Buffered answers: a switch between two processes costs as much as some hundred of
them.
"""


class EndedError(Exception):
    """The process ended without an answer; the message says how."""


class GuardedProcess(ABC):
    """The parent's side of a process, which the context manager kills.

    To be used by the thread that created it (Linux ends the process with that thread).
    """

    _child: subprocess.Popen[bytes] | None = None
    _to_child: Connection
    _from_child: Connection
    _time_outs: Mapping[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def begin(
        self,
        module: str,
        settings: Mapping[str, object],
        time_outs: Mapping[int, str],
    ) -> None:
        """Start `main` of a module in the process.

        Args:
            time_outs: signal of a limit -> description of the end.
        """
        self._time_outs = time_outs
        arguments = json.dumps({**settings, "parent": os.getpid()})
        requests, self._to_child = Pipe(duplex=False)
        self._from_child, answers = Pipe(duplex=False)
        with requests, answers:
            self._child = subprocess.Popen(
                [sys.executable, "-c", f"from {module} import main; main()", arguments],
                stdin=requests.fileno(),
                stdout=answers.fileno(),
            )

    @abstractmethod
    def start(self) -> None:
        """Start the process by `begin`."""

    def answers(self, request: object, is_buffered: bool = False) -> Iterator[Any]:
        """Yield the answers to a request; starts the process if it does not run, and
        kills it unless all were read.

        Earlier requests may have corrupted a process that ends, and it loses its
        buffer. A fresh process without a buffer then repeats the request, so that the
        answers depend on the request alone.

        Raises:
            EndedError: the fresh process ended, too.
            OSError, ValueError: raised by the process.
        """
        num_read = 0
        while True:
            is_last_try = self._child is None and not is_buffered
            try:
                answers = self._exchange(request, is_buffered)
                for answer in islice(answers, num_read, None):
                    num_read += 1
                    yield answer
                return
            except EndedError:
                if is_last_try:
                    raise
                is_buffered = False

    def _exchange(self, request: object, is_buffered: bool) -> Iterator[Any]:
        is_complete = False
        try:
            if self._child is None:
                self.start()
            self.send(pickle.dumps((request, is_buffered)))
            while not is_complete:
                message = self.receive()
                stream = io.BytesIO(message)
                while stream.tell() < len(message):
                    answer = pickle.load(stream)
                    if isinstance(answer, Exception):
                        raise answer
                    is_complete = answer is None
                    if not is_complete:
                        yield answer
        finally:
            if not is_complete:
                self.kill()

    def send(self, message: bytes) -> None:
        """Send a message; a process that ended is reported by its missing answer."""
        with contextlib.suppress(BrokenPipeError):
            self._to_child.send_bytes(message)

    def receive(self) -> bytes:
        """Wait for a message.

        Raises:
            EndedError: the process ended; the error describes how, such as `crashed
                (signal 11)`.
        """
        assert self._child is not None
        try:
            return self._from_child.recv_bytes()
        except (EOFError, OSError):  # the end, or one in the middle of a message
            status = self._child.wait()
            way = f"ended (status {status})"
            if status < 0:
                way = self._time_outs.get(-status, f"crashed (signal {-status})")
            raise EndedError(way) from None

    def kill(self) -> None:
        """Kill the process, if it runs."""
        if self._child is not None:
            kill_child(self._child)
            self._child = None
            self._to_child.close()
            self._from_child.close()


@contextlib.contextmanager
def local_copy(location: str | Path) -> Iterator[Path]:
    """Yield a local path: the file itself, or a temporary copy of a remote file with
    the same name, without a URL's query.
    """
    path = as_path(location)
    if is_local(path):
        # a file:// URL has its path in `path`
        yield Path(getattr(path, "path", "") or path)
        return
    with tempfile.TemporaryDirectory(prefix="gristmill-read-") as folder:
        # the query of a signed URL is too long for a file name
        copy = Path(folder) / (path.name.partition("?")[0] or path.name)
        with path.open("rb") as stream, copy.open("wb") as sink:
            shutil.copyfileobj(stream, sink, CHUNK_BYTES)
        yield copy


def begin() -> tuple[Any, Iterator[bytes], Connection]:
    """Set up the child process; returns its settings, its requests, and the connection
    for its answers.
    """
    settings = json.loads(sys.argv[1])
    end_with_parent(signal.SIGKILL, settings["parent"])
    requests = Connection(os.dup(0), writable=False)
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # output of libraries must not mix with answers
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit_resource(resource.RLIMIT_CORE, 0)
    return settings, _messages(requests), answers


def serve(
    requests: Iterator[bytes],
    connection: Connection,
    answer: Callable[[Any], Iterator[object]],
) -> None:
    """Send the answers to each request, with None or the error of `answer` after the
    last one.
    """
    buffer = io.BytesIO()

    def send(value: object, is_buffered: bool = False) -> None:
        pickle.dump(value, buffer)
        if not is_buffered or buffer.tell() >= BUFFER_BYTES:
            connection.send_bytes(buffer.getvalue())
            buffer.seek(0)
            buffer.truncate()

    for message in requests:
        request, is_buffered = pickle.loads(message)
        try:
            for value in answer(request):
                send(value, is_buffered)
        except ValueError as error:
            send(error)
        except OSError as error:  # those of a store's library may not be picklable
            send(OSError(*filter(None, (error.errno, str(error)))))
        else:
            send(None)


class TimeLimited:
    """Time limit: ends the process if a block exceeds its CPU time, or SLEEP_FACTOR
    times that in wall-clock time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        signal.setitimer(signal.ITIMER_REAL, SLEEP_FACTOR * self._seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _messages(connection: Connection) -> Iterator[bytes]:
    """Yield messages until the other side closes the connection."""
    with contextlib.suppress(EOFError):
        while True:
            yield connection.recv_bytes()


def limit_resource(kind: int, amount: int) -> None:
    """Limit a resource of this process, up to its hard limit."""
    _, hard = resource.getrlimit(kind)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(kind, (amount, amount))
