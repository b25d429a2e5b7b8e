"""A child process for work that a bad input may crash, hang or drive out of memory: its
start and its protocol.

Both sides send frames: a length (8 bytes, little-endian) and as many bytes. The process
gets its settings as its only argument, in JSON. It ends with its parent, or at the end
of its requests. It limits its own memory, and its CPU time per answer with an
ITIMER_PROF, whose signal ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, Self

from gristmill.core.files import CHUNK_BYTES, as_path, is_local
from gristmill.core.processes import end_with_parent, kill_child

LENGTH_BYTES = 8
READ_AHEAD_BYTES = 1 << 20
SLEEP_FACTOR = 6
"""Wall-clock limit of an answer, as a multiple of its CPU limit."""


class EndedError(Exception):
    """The process ended without an answer; the message says how."""


class GuardedProcess:
    """The parent's side of a process, which the context manager kills.

    To be used by the thread that created it (Linux ends the process with that thread).
    """

    _child: subprocess.Popen[bytes] | None = None
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
        bufsize: int = -1,
    ) -> None:
        """Start a module in the process.

        Args:
            time_outs: signal of a time limit -> description of the end.
        """
        self._time_outs = time_outs
        self._child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                module,
                json.dumps({**settings, "parent": os.getpid()}),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=bufsize,
        )

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        """Requests and answers of the running process."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        return self._child.stdin, self._child.stdout

    def send(self, content: bytes | Mapping[str, object]) -> None:
        """Send a frame; a process that ended is reported by its missing answer."""
        requests, _ = self.pipes
        with contextlib.suppress(BrokenPipeError):
            requests.write(frame(content))
            requests.flush()

    def receive(self) -> bytes:
        """Wait for a frame.

        Raises:
            EndedError: the process ended.
        """
        content = read_frame(self.pipes[1])
        if content is None:
            raise EndedError(self.describe_end())
        return content

    def describe_end(self) -> str:
        """Describe the end of the process: `crashed (signal 11)`."""
        assert self._child is not None
        status = self._child.wait()
        if -status in self._time_outs:
            return self._time_outs[-status]
        return (
            f"crashed (signal {-status})" if status < 0 else f"ended (status {status})"
        )

    def kill(self) -> None:
        """Kill the process, if it runs."""
        if self._child is not None:
            kill_child(self._child)
            self._child = None


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


def begin() -> tuple[Any, BinaryIO, BinaryIO]:
    """Set up the child process; returns its settings, the request stream and the answer
    stream.
    """
    settings = json.loads(sys.argv[1])
    end_with_parent(signal.SIGKILL, settings["parent"])
    requests = os.fdopen(os.dup(0), "rb", buffering=READ_AHEAD_BYTES)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with answers
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limit_resource(resource.RLIMIT_CORE, 0)
    return settings, requests, answers


def limit_resource(kind: int, amount: int) -> None:
    """Limit a resource of this process, up to its hard limit."""
    _, hard = resource.getrlimit(kind)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(kind, (amount, amount))


def frame(content: bytes | Mapping[str, object]) -> bytes:
    """Content, or its JSON, prefixed with its length."""
    if not isinstance(content, bytes):
        content = json.dumps(content).encode("ascii")
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Content of the next frame; None if the stream ends before its end."""
    length = stream.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    size = int.from_bytes(length, "little")
    content = stream.read(size)
    return content if len(content) == size else None
