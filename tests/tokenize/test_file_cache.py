"""The cache of fetched files: bounded, shared between processes, and consistent after a
crash.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from gristmill.tokenize.streaming.file_cache import FileCache

FETCH_AND_HANG = """
import sys, time
from pathlib import Path
from gristmill.tokenize.streaming.file_cache import FileCache

def fetch(sink):
    sink.write(b"half")
    sink.flush()
    print("fetching", flush=True)
    time.sleep(600)

FileCache(Path(sys.argv[1]), 100).get(sys.argv[2], 10, fetch)
"""


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fetcher(
    content: bytes, calls: list[str] | None = None
) -> Callable[[BinaryIO], None]:
    def fetch(sink: BinaryIO) -> None:
        sink.write(content)
        if calls is not None:
            calls.append(sha256_of(content))

    return fetch


def put(cache: FileCache, content: bytes, **options: bool) -> Path | None:
    return cache.get(sha256_of(content), len(content), fetcher(content), **options)


def content_of(folder: Path) -> set[bytes]:
    return {
        file.read_bytes()
        for file in folder.iterdir()
        if not file.name.endswith(".lock")
    }


def test_file_is_fetched_once_per_folder(tmp_path: Path) -> None:
    calls: list[str] = []
    first, second = FileCache(tmp_path, 100), FileCache(tmp_path, 100)
    for cache in (first, first, second):
        path = cache.get(sha256_of(b"tokens"), 6, fetcher(b"tokens", calls))
        assert path is not None
        assert path.read_bytes() == b"tokens"
    assert len(calls) == 1


def test_least_recently_used_file_is_evicted_unless_in_use(tmp_path: Path) -> None:
    old = FileCache(tmp_path, 30)
    paths = [put(old, letter * 10) for letter in (b"a", b"b", b"c")]
    for age, path in enumerate(paths):
        assert path is not None
        os.utime(path, (1000 + age, 1000 + age))
    cache = FileCache(tmp_path, 30)
    assert put(cache, b"d" * 10) is None  # all three are in use
    old.close()
    second = FileCache(tmp_path, 30)
    # the oldest is used again, by another cache
    assert put(second, b"a" * 10) == paths[0]
    assert put(cache, b"d" * 10) is not None
    assert content_of(tmp_path) == {b"a" * 10, b"c" * 10, b"d" * 10}
    assert put(cache, b"e" * 21) is None  # needs the space of files in use
    assert put(cache, b"e" * 21, needed=True) is not None


def test_oversized_file_is_not_fetched(tmp_path: Path) -> None:
    calls: list[str] = []
    assert (
        FileCache(tmp_path, 5).get(sha256_of(b"tokens"), 6, fetcher(b"tokens", calls))
        is None
    )
    assert (
        FileCache(tmp_path, 0).get(sha256_of(b"tokens"), 6, fetcher(b"tokens", calls))
        is None
    )
    assert calls == []
    assert content_of(tmp_path) == set()


def test_full_disk_counts_as_a_full_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert put(FileCache(tmp_path, 100), b"tokens") is None
    assert content_of(tmp_path) == set()
    with pytest.raises(OSError, match="No space left"):
        put(FileCache(tmp_path, 100), b"tokens", needed=True)


def test_failed_fetch_leaves_no_file(tmp_path: Path) -> None:
    def fetch(sink: BinaryIO) -> None:
        sink.write(b"tok")
        raise ConnectionResetError("gone")

    cache = FileCache(tmp_path, 100)
    with pytest.raises(ConnectionResetError):
        cache.get(sha256_of(b"tokens"), 6, fetch)
    assert content_of(tmp_path) == set()
    assert put(cache, b"tokens") is not None


def test_damaged_file_can_be_dropped_and_fetched_again(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 100)
    path = put(cache, b"tokens")
    assert path is not None
    path.write_bytes(b"tokenz")
    cache.drop(sha256_of(b"tokens"))
    again = put(cache, b"tokens")
    assert again is not None
    assert again.read_bytes() == b"tokens"


def test_file_in_use_can_be_fetched_by_another_process(tmp_path: Path) -> None:
    """Waiting for a user that keeps its lock would not end."""
    user, second = FileCache(tmp_path, 100), FileCache(tmp_path, 100)
    path = put(user, b"tokens")
    assert path is not None
    path.unlink()
    assert second.get(sha256_of(b"tokens"), 6, fetcher(b"tokens"), wait=False) == path
    assert path.read_bytes() == b"tokens"


def test_killed_fetch_releases_its_lock_and_space(tmp_path: Path) -> None:
    name, content = sha256_of(b"0123456789"), b"0123456789"
    with subprocess.Popen(
        [sys.executable, "-c", FETCH_AND_HANG, str(tmp_path), name],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"fetching\n"
        cache = FileCache(tmp_path, 15)
        # it is being fetched
        assert cache.get(name, 10, fetcher(content), wait=False) is None
        assert put(cache, b"x" * 10) is None  # and its space is reserved
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / f"{name}.part").exists()
    path = cache.get(name, 10, fetcher(content))
    assert path is not None
    assert path.read_bytes() == content
    assert not (tmp_path / f"{name}.part").exists()


def test_leftover_of_a_killed_process_is_evicted(tmp_path: Path) -> None:
    (tmp_path / f"{sha256_of(b'lost')}.part").write_bytes(b"x" * 90)
    assert put(FileCache(tmp_path, 100), b"tokens" * 5) is not None
    assert content_of(tmp_path) == {b"tokens" * 5}
