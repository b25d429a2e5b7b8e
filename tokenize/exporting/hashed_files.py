"""Files that are written with their checksums."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gristmill.core.files import atomic_write

MOST_WAITING = 4
"""Maximum number of writes waiting for the checksum, since they hold memory."""


class HashedSink:
    """Writer of a file and of its SHA-256; the bytes passed to it must not change
    afterwards.
    """

    def __init__(self, sink: BinaryIO, thread: ThreadPoolExecutor) -> None:
        self._sink = sink
        self._thread = thread
        self._digest = hashlib.sha256()
        self._waiting: deque[Future[None]] = deque()

    def write(self, data: bytes | memoryview) -> int:
        """Append some bytes."""
        while len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._digest.update, data))
        return self._sink.write(data)

    def flush(self) -> None:
        """Pass on the buffered bytes."""
        self._sink.flush()

    def sha256(self) -> str:
        """The checksum of all bytes, in hexadecimal."""
        for waiting in self._waiting:
            waiting.result()
        return self._digest.hexdigest()


@contextmanager
def hashed_write(path: Path, checksums: dict[str, str]) -> Iterator[HashedSink]:
    """Write a file atomically and put its SHA-256 into `checksums` under its name."""
    with ThreadPoolExecutor(1) as thread, atomic_write(path) as sink:
        hashed = HashedSink(sink, thread)
        yield hashed
        checksums[path.name] = hashed.sha256()
