"""Rows of a packed set in a faulty object store: correct, or an error that names the
object.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gristmill.core import object_stores
from gristmill.core.files import as_path
from gristmill.core.object_stores import StoreUnavailableError
from gristmill.mixtures.schema.engine import Stream
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.streaming.read_ahead import ReadAhead
from gristmill.tokenize.streaming.remote_rows import shards_that_fit
from tests.packed_sets import write_packed_set

LENGTH = 16
ROWS = np.random.default_rng(5).integers(0, 1000, (60, LENGTH))
ROWS_PER_SHARD = 20
SHARD_BYTES = ROWS_PER_SHARD * LENGTH * 2
TOKENIZER = {"vocab_size": 1000, "eos": 0, "pad": 1, "sha256": ""}


Range = tuple[str, int | None, int | None]
"""Name of an object, start and end."""
Fault = Callable[[str, int | None, int | None, bytes], bytes]
Open = Callable[..., PackedSet]


class Store:
    """Counts requests to the in-memory store, and corrupts answers by `fault`: (path,
    start, end, content).
    """

    def __init__(self) -> None:
        self.requests: list[Range] = []
        self.fault: Fault = lambda path, start, end, content: content
        self.away = threading.Event()

    def read(
        self, path: str, start: int | None, end: int | None, content: bytes
    ) -> bytes:
        self.requests.append((path.rpartition("/")[2], start, end))
        if self.away.is_set():
            raise ConnectionRefusedError("the store is away")
        return self.fault(path, start, end, content)

    def requests_for(self, suffix: str) -> list[Range]:
        return [request for request in self.requests if request[0].endswith(suffix)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store_, original = Store(), MemoryFileSystem.cat_file

    def cat_file(
        self: Any,
        path: str,
        start: int | None = None,
        end: int | None = None,
        **more: Any,
    ) -> bytes:
        return store_.read(path, start, end, original(self, path, start, end))

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(object_stores, "LONGEST_PAUSE_SECONDS", 0.002)
    monkeypatch.setattr(object_stores, "FIRST_PAUSE_SECONDS", 0.001)
    return store_


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 rows of 16 tokens in three shards, in memory."""
    local, folder = tmp_path_factory.mktemp("set"), as_path("memory://faulty-set")
    write_packed_set(
        local,
        ROWS,
        {"prose": 45, "code": 15},
        TOKENIZER,
        {"prose": ROWS[:2]},
        shard_rows=ROWS_PER_SHARD,
    )
    for path in local.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def opened(remote: Path, tmp_path: Path) -> Iterator[Open]:
    """Open the set with its own cache; all sets are closed at the end."""
    sets: list[PackedSet] = []

    def opened(warnings: list[str] | None = None, **keys: Any) -> PackedSet:
        messages = [] if warnings is None else warnings
        stream = Stream.model_validate(
            {"cache_folder": str(tmp_path / "cache"), "retry_seconds": 60.0, **keys}
        )
        sets.append(PackedSet(remote, stream, messages.append))
        return sets[-1]

    yield opened
    for packed in sets:
        packed.close()


def wait_for_shards(packed: PackedSet) -> list[int]:
    """Return the shards on the local disk after all that fit have been fetched."""
    rows = packed.elsewhere()
    assert rows._filling is not None
    rows._filling.join(30)
    return sorted(rows._here)


def faults(
    *corruptions: Callable[[bytes], bytes],
) -> Fault:
    """Corrupt the first answers to every request, each differently; the next one is
    correct.
    """
    attempts: dict[Range, int] = {}
    lock = threading.Lock()

    def fault(path: str, start: int | None, end: int | None, content: bytes) -> bytes:
        with lock:
            number = attempts[path, start, end] = (
                attempts.get((path, start, end), -1) + 1
            )
        return corruptions[number](content) if number < len(corruptions) else content

    return fault


def raising(error: Exception) -> Callable[[bytes], bytes]:
    def spoil(content: bytes) -> bytes:
        raise error

    return spoil


def flipped(content: bytes) -> bytes:
    """Flip one bit in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


ALL_FAULTS = (
    raising(OSError("500 Internal Server Error")),
    raising(TimeoutError("30 s")),
    raising(ConnectionResetError("reset")),
    lambda content: content[: len(content) // 2],
    flipped,
    lambda content: b"",
)


@pytest.mark.parametrize("cache_bytes", [0, 2 * SHARD_BYTES, 10 * SHARD_BYTES])
def test_rows_are_correct_despite_transport_faults(
    store: Store, opened: Open, cache_bytes: int
) -> None:
    warnings: list[str] = []
    packed = opened(warnings, cache_bytes=cache_bytes)
    store.fault = faults(*ALL_FAULTS)
    order = np.random.default_rng(1).permutation(60)
    for first in range(0, 60, 12):
        batch = order[first : first + 12]
        assert np.array_equal(packed.read(batch), ROWS[batch])
    assert wait_for_shards(packed) == [0, 1, 2][: cache_bytes // SHARD_BYTES]
    assert np.array_equal(packed.read(order), ROWS[order])
    assert np.array_equal(packed.validation("prose"), ROWS[:2])
    assert packed.boundaries(order).filled().tolist() == [LENGTH] * 60
    (warning,) = warnings  # at most one warning per minute
    assert "could not be read" in warning
    assert "trying again" in warning


def test_cached_set_is_fetched_once_and_read_from_disk(
    store: Store, opened: Open
) -> None:
    # like two processes of one machine
    first, second = (opened(cache_bytes=3 * SHARD_BYTES) for _ in range(2))
    for packed in (first, second):
        packed.read(np.arange(1))
        assert wait_for_shards(packed) == [0, 1, 2]
    full_requests = [
        request
        for request in store.requests_for(".bin")
        if request[1:] == (0, SHARD_BYTES)
    ]
    assert sorted(full_requests) == [
        (f"train-{number:05d}.bin", 0, SHARD_BYTES) for number in range(3)
    ]
    # fetches the checksums of all shards
    first.read(np.arange(60)), second.read(np.arange(60))
    store.away.set()
    assert np.array_equal(first.read(np.arange(60)), ROWS)
    assert np.array_equal(second.read(np.arange(60)), ROWS)


def test_uncached_neighbouring_rows_share_a_request(
    store: Store, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gristmill.tokenize.streaming.remote_rows.GAP_BYTES", 2 * LENGTH * 2
    )
    packed, row_bytes = opened(cache_bytes=0), LENGTH * 2
    rows = np.array([3, 59, 0, 7, 21, 4])
    assert np.array_equal(packed.read(rows), ROWS[rows])
    assert sorted(store.requests_for(".bin")) == [
        ("train-00000.bin", 0, 8 * row_bytes),
        ("train-00001.bin", row_bytes, 2 * row_bytes),
        ("train-00002.bin", 19 * row_bytes, 20 * row_bytes),
    ]


def test_training_survives_an_outage(store: Store, opened: Open) -> None:
    packed = opened(cache_bytes=0)
    order = packed.order(3)

    def read(step: int) -> np.ndarray:
        return packed.read(order.rows(np.arange(6 * step, 6 * step + 6)))

    ahead = ReadAhead(read, last_step=10, depth=4, threads=2)
    expected = [
        ROWS[order.rows(np.arange(6 * step, 6 * step + 6))] for step in range(10)
    ]
    assert np.array_equal(ahead.take(0), expected[0])
    with ahead._come:
        assert ahead._come.wait_for(lambda: len(ahead._results) == 4, timeout=30)
    store.away.set()
    for step in (1, 2, 3, 4):
        assert np.array_equal(ahead.take(step), expected[step])
    num_requests = len(store.requests)
    while len(store.requests) < num_requests + 20:  # the next step is retried
        threading.Event().wait(0.001)
    store.away.clear()
    for step in range(5, 10):
        assert np.array_equal(ahead.take(step), expected[step])
    ahead.close()


def test_persistent_outage_is_an_error_naming_the_object(
    store: Store, opened: Open
) -> None:
    packed = opened(cache_bytes=0, retry_seconds=0.05)
    packed.read(np.array([21]))
    store.away.set()
    with pytest.raises(
        StoreUnavailableError,
        match=re.escape("faulty-set/train-00001.bin could not be read in"),
    ) as caught:
        packed.read(np.array([25]))
    assert "ConnectionRefusedError: the store is away" in str(caught.value)
    assert "engine.stream.retry_seconds (0.05)" in str(caught.value)


def test_persistently_corrupt_bytes_are_an_error(store: Store, opened: Open) -> None:
    packed = opened(cache_bytes=0, retry_seconds=0.05)
    packed.read(np.array([21]))
    store.fault = lambda path, start, end, content: flipped(content)
    with pytest.raises(StoreUnavailableError, match=r"row 5 .*checksum"):
        packed.read(np.array([25]))


def test_damaged_cached_copy_is_detected_and_read_again(
    store: Store, opened: Open, tmp_path: Path
) -> None:
    warnings: list[str] = []
    packed = opened(warnings, cache_bytes=10 * SHARD_BYTES)
    packed.read(np.arange(1))
    wait_for_shards(packed)
    sha256 = packed.manifest["train"]["shards"][1]["sha256"]
    with (tmp_path / "cache" / "shards" / sha256).open("r+b") as file:
        file.seek(3 * LENGTH * 2)
        file.write(b"\xff\xff\xff")
    assert np.array_equal(packed.read(np.arange(60)), ROWS)
    (warning,) = warnings
    assert "train-00001.bin: its copy in the cache is damaged" in warning
    assert sorted(packed.elsewhere()._here) == [0, 2]


def test_closing_ends_pending_requests(store: Store, opened: Open) -> None:
    packed = opened(cache_bytes=0)
    packed.read(np.array([25]))
    store.away.set()
    failed: list[BaseException] = []

    def read() -> None:
        try:
            packed.read(np.array([26]))
        except StoreUnavailableError as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    num_requests = len(store.requests)
    while len(store.requests) < num_requests + 3:
        threading.Event().wait(0.001)
    packed.close()
    reader.join(30)
    assert len(failed) == 1


def test_missing_object_is_an_immediate_error(store: Store, opened: Open) -> None:
    def missing(path: str, start: int | None, end: int | None, content: bytes) -> bytes:
        raise FileNotFoundError(path)

    packed = opened(cache_bytes=0)
    packed.read(np.array([41]))
    store.fault = missing
    with pytest.raises(FileNotFoundError, match=r"train-00002\.bin"):
        packed.read(np.array([50]))


def test_cache_keeps_the_first_shards_that_fit() -> None:
    assert shards_that_fit([10, 10, 5, 0], 25) == [0, 1, 2]
    assert shards_that_fit([10, 10, 5], 24) == [0, 1]
    assert shards_that_fit([10, 10, 5], 9) == []
