"""Files whose checksum is computed while they are written, in a thread beside the one that writes."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gristmill.dataprep.files import atomic_write

MOST_WAITING = 4
"""Writes that may wait for the checksum: they hold memory."""


class HashedSink:
    """Takes bytes for a file and for its SHA-256; what was given must not be changed afterwards."""

    def __init__(self, sink: BinaryIO, thread: ThreadPoolExecutor) -> None:
        self._sink, self._thread, self._digest = sink, thread, hashlib.sha256()
        self._waiting: deque[Future[None]] = deque()

    def write(self, data: bytes | memoryview) -> int:
        """Append some bytes."""
        while len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._digest.update, data))
        return self._sink.write(data)

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._sink.flush()

    def sha256(self) -> str:
        """The checksum of all bytes, in hexadecimal."""
        while self._waiting:
            self._waiting.popleft().result()
        return self._digest.hexdigest()


@contextmanager
def hashed_write(path: Path, checksums: dict[str, str], name: str) -> Iterator[HashedSink]:
    """Write a file atomically and put its SHA-256 into `checksums` under a name."""
    with ThreadPoolExecutor(1) as thread, atomic_write(path) as sink:
        hashed = HashedSink(sink, thread)
        yield hashed
        checksums[name] = hashed.sha256()
