"""Folder of files by checksum on a local disk, shared by the processes of a machine and
of limited size.

    <sha256>             a complete file; it appears once its content is checked and on
                         the disk
    <sha256>.part        the same file while it is being fetched, at its full size
    <sha256>.lock        shared lock of every process that uses or fetches the file,
                         exclusive lock of the process that removes it
    <sha256>.fetch.lock  exclusive lock of the process that fetches it
    .lock                exclusive lock while room is made

The kernel releases the locks of a killed process, so no clean-up is necessary: its
unfinished file is fetched again by the next process that needs it, or removed when room
is needed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PART, LOCK, FETCH = ".part", ".lock", ".fetch"


class FileCache:
    """Files that are fetched once and then read from the local disk; the least recently
    used go first.

    Args:
        folder: of the files; created if it is missing.
        limit_bytes: of all files together.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._held: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def get(
        self,
        sha256: str,
        size: int,
        fetch: Callable[[BinaryIO], None],
        wait: bool = True,
        needed: bool = False,
    ) -> Path | None:
        """The path of a file with this content, which stays there until `close`.

        Args:
            sha256: names the content.
            size: bytes.
            fetch: writes the content into an open file, and has checked it when it
                returns.
            wait: for another process that fetches the same file; else None at once.
            needed: keep the file even where that breaks the limit.

        Returns:
            None without room, or if another process fetches the file and
            `wait` is false.
        """
        path = self._folder / sha256
        if sha256 in self._held:
            return path
        with self._opened(f"{sha256}{LOCK}") as used:
            fcntl.flock(used, fcntl.LOCK_SH)
            if not _is_whole(path, size):
                # Fetching has a separate lock: users keep theirs, which would block
                # fetching a dropped file again.
                fcntl.flock(used, fcntl.LOCK_UN)
                with self._opened(f"{sha256}{FETCH}{LOCK}") as fetching:
                    if not _lock(fetching, wait):
                        return None
                    fcntl.flock(used, fcntl.LOCK_SH)
                    if not _is_whole(path, size) and not self._fetch(
                        path, size, fetch, needed
                    ):
                        return None
            os.utime(path)
            # the same lock, which ends with its last descriptor
            self._held[sha256] = os.dup(used)
        return path

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Descriptor of a lock file."""
        descriptor = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def drop(self, sha256: str) -> None:
        """Remove a damaged file; processes that have it open keep their copy."""
        (self._folder / sha256).unlink(missing_ok=True)
        self._release(sha256)

    def close(self) -> None:
        """Release all files, so that they can be evicted."""
        for sha256 in list(self._held):
            self._release(sha256)

    def _release(self, sha256: str) -> None:
        lock = self._held.pop(sha256, -1)
        if lock >= 0:
            os.close(lock)

    def _fetch(
        self, path: Path, size: int, fetch: Callable[[BinaryIO], None], needed: bool
    ) -> bool:
        part = path.with_name(f"{path.name}{PART}")
        with self._opened(LOCK) as alone:
            fcntl.flock(alone, fcntl.LOCK_EX)
            part.unlink(missing_ok=True)
            if not self._make_room(size) and not needed:
                return False
            # Allocated at once, so that no other process takes the space.
            with open(part, "wb") as sink:
                try:
                    os.posix_fallocate(sink.fileno(), 0, max(size, 1))
                    os.truncate(sink.fileno(), size)
                except OSError:  # the disk is full: that is no worse than a full cache
                    part.unlink()
                    if needed:
                        raise
                    return False
        try:
            with open(part, "r+b") as sink:
                fetch(sink)
                sink.flush()
                os.fsync(sink.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        return True

    def _make_room(self, size: int) -> bool:
        files = []
        for file in self._folder.iterdir():
            # another process may have just finished or dropped it
            with suppress(FileNotFoundError):
                if not file.name.endswith(LOCK):
                    status = file.stat()
                    files.append((status.st_mtime_ns, file.name, status.st_size))
        used_bytes = sum(file_size for _, _, file_size in files)
        for _, name, file_size in sorted(files):
            if used_bytes + size <= self._limit:
                break
            with self._opened(f"{name.removesuffix(PART)}{LOCK}") as unused:
                if _lock(unused, wait=False):
                    (self._folder / name).unlink(missing_ok=True)
                    used_bytes -= file_size
        return used_bytes + size <= self._limit


def default_folder() -> Path:
    """Default folder of fetched shards: below the user's cache folder (XDG base
    directories).
    """
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "gristmill"
        / "stream"
    )


def _is_whole(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


def _lock(descriptor: int, wait: bool) -> bool:
    """Take an exclusive lock; False if another process has it and `wait` is false."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
