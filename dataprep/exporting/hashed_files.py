"""Files that are written with their checksums."""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from gristmill.core.files import atomic_write

MOST_WAITING = 4
"""Maximum number of writes waiting for the checksum, since they hold memory."""


class HashedSink(io.RawIOBase):
    """Writer of a file and of its SHA-256, which is computed in a thread.

    Attributes:
        size: bytes written.
    """

    def __init__(self, sink: BinaryIO, thread: ThreadPoolExecutor) -> None:
        self._sink = sink
        self._thread = thread
        self._digest = hashlib.sha256()
        self._waiting: deque[Future[None]] = deque()
        self.size = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Append bytes; a memoryview must not change afterwards."""
        content = data if isinstance(data, bytes | memoryview) else bytes(data)
        while len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._digest.update, content))
        self.size += len(content)
        return self._sink.write(content)

    def tell(self) -> int:
        """Number of bytes written."""
        return self.size

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
