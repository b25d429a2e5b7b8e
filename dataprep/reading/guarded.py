"""A child process for work that a bad input may crash, hang or drive out of memory: its
start and its protocol.

Both sides send frames: a length (8 bytes, little-endian) and as many bytes. The process
gets its settings as its only argument, in JSON. It ends with its parent, or at the end
of its requests. It limits its own memory, and its CPU time per answer with an
ITIMER_PROF, whose signal ends it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from gristmill.core.processes import end_with_parent

LENGTH_BYTES = 8
READ_AHEAD_BYTES = 1 << 20


def start(
    module: str, settings: Mapping[str, object], bufsize: int = -1
) -> subprocess.Popen[bytes]:
    """Start a module in a child process; to be used by the calling thread (Linux ends
    the process with it).
    """
    argument = json.dumps({**settings, "parent": os.getpid()})
    return subprocess.Popen(
        [sys.executable, "-m", module, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=bufsize,
    )


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


def limit_resource(what: int, amount: int) -> None:
    """Limit a resource of this process, up to its hard limit."""
    _, hard = resource.getrlimit(what)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(what, (amount, amount))


def frame(content: bytes | Mapping[str, object]) -> bytes:
    """Content, or its JSON, prefixed with its length."""
    if not isinstance(content, bytes):
        content = json.dumps(content).encode("ascii")
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def read_frame(stream: BinaryIO) -> bytes | None:
    """Content of the next frame; None if the stream ends before its end."""
    length = stream.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    size = int.from_bytes(length, "little")
    content = stream.read(size)
    return content if len(content) == size else None
