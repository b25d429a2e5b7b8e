"""The cache of fetched files: bounded, shared between processes, and whole whatever happens to them."""

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


def named(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def writer(content: bytes, calls: list[str] | None = None) -> Callable[[BinaryIO], None]:
    def fetch(sink: BinaryIO) -> None:
        sink.write(content)
        if calls is not None:
            calls.append(named(content))

    return fetch


def put(cache: FileCache, content: bytes, **how: bool) -> Path | None:
    return cache.get(named(content), len(content), writer(content), **how)


def content_of(folder: Path) -> set[bytes]:
    return {file.read_bytes() for file in folder.iterdir() if not file.name.endswith(".lock")}


def test_a_file_is_fetched_once_for_all_who_use_the_folder(tmp_path: Path) -> None:
    calls: list[str] = []
    first, second = FileCache(tmp_path, 100), FileCache(tmp_path, 100)
    for cache in (first, first, second):
        path = cache.get(named(b"tokens"), 6, writer(b"tokens", calls))
        assert path is not None
        assert path.read_bytes() == b"tokens"
    assert len(calls) == 1


def test_the_least_recently_used_file_makes_room_and_one_in_use_never_does(tmp_path: Path) -> None:
    old = FileCache(tmp_path, 30)
    paths = [put(old, letter * 10) for letter in (b"a", b"b", b"c")]
    for age, path in enumerate(paths):
        assert path is not None
        os.utime(path, (1000 + age, 1000 + age))
    new = FileCache(tmp_path, 30)
    assert put(new, b"d" * 10) is None  # all three are in use
    old.close()
    user = FileCache(tmp_path, 30)
    assert put(user, b"a" * 10) == paths[0]  # the oldest is used again, by another
    assert put(new, b"d" * 10) is not None
    assert content_of(tmp_path) == {b"a" * 10, b"c" * 10, b"d" * 10}
    assert put(new, b"e" * 21) is None  # can't be had without what is in use
    assert put(new, b"e" * 21, needed=True) is not None


def test_what_does_not_fit_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    calls: list[str] = []
    assert FileCache(tmp_path, 5).get(named(b"tokens"), 6, writer(b"tokens", calls)) is None
    assert FileCache(tmp_path, 0).get(named(b"tokens"), 6, writer(b"tokens", calls)) is None
    assert calls == []
    assert content_of(tmp_path) == set()


def test_a_full_disk_is_a_full_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert put(FileCache(tmp_path, 100), b"tokens") is None
    assert content_of(tmp_path) == set()
    with pytest.raises(OSError, match="No space left"):
        put(FileCache(tmp_path, 100), b"tokens", needed=True)


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fetch(sink: BinaryIO) -> None:
        sink.write(b"tok")
        raise ConnectionResetError("gone")

    cache = FileCache(tmp_path, 100)
    with pytest.raises(ConnectionResetError):
        cache.get(named(b"tokens"), 6, fetch)
    assert content_of(tmp_path) == set()
    assert put(cache, b"tokens") is not None


def test_a_damaged_file_can_be_dropped_and_fetched_anew(tmp_path: Path) -> None:
    cache = FileCache(tmp_path, 100)
    path = put(cache, b"tokens")
    assert path is not None
    path.write_bytes(b"tokenz")
    cache.drop(named(b"tokens"))
    again = put(cache, b"tokens")
    assert again is not None
    assert again.read_bytes() == b"tokens"


def test_who_uses_a_file_keeps_nobody_from_fetching_it(tmp_path: Path) -> None:
    """Another process may have fetched it between two looks, and holds on to it; waiting for that one would not end."""
    user, other = FileCache(tmp_path, 100), FileCache(tmp_path, 100)
    path = put(user, b"tokens")
    assert path is not None
    path.unlink()
    assert other.get(named(b"tokens"), 6, writer(b"tokens"), wait=False) == path
    assert path.read_bytes() == b"tokens"


def test_a_process_that_is_killed_while_it_fetches_stands_in_nobody_s_way(tmp_path: Path) -> None:
    name, content = named(b"0123456789"), b"0123456789"
    with subprocess.Popen([sys.executable, "-c", FETCH_AND_HANG, str(tmp_path), name], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"fetching\n"
        cache = FileCache(tmp_path, 15)
        assert cache.get(name, 10, writer(content), wait=False) is None  # it is being fetched
        assert put(cache, b"x" * 10) is None  # and its room is taken
        other.send_signal(signal.SIGKILL)
    assert (tmp_path / f"{name}.part").exists()
    path = cache.get(name, 10, writer(content))
    assert path is not None
    assert path.read_bytes() == content
    assert not (tmp_path / f"{name}.part").exists()


def test_what_a_killed_process_left_makes_room(tmp_path: Path) -> None:
    (tmp_path / f"{named(b'lost')}.part").write_bytes(b"x" * 90)
    assert put(FileCache(tmp_path, 100), b"tokens" * 5) is not None
    assert content_of(tmp_path) == {b"tokens" * 5}
