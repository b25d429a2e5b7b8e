"""Rows of a packed set in an object store that fails: the rows are right, or an error says which object is missing."""

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
from gristmill.core.files import as_path, read_json, write_json
from gristmill.core.object_stores import StoreUnavailableError
from gristmill.mixtures.engine import Stream
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import PIECES_SCHEMA, PackedSetError
from gristmill.tokenize.packed_writing import write_packed_set, write_rows
from gristmill.tokenize.streaming.read_ahead import ReadAhead
from gristmill.tokenize.streaming.remote_rows import shards_that_fit

LENGTH = 16
ROWS = np.random.default_rng(5).integers(0, 1000, (60, LENGTH))
ROWS_PER_SHARD = 20
SHARD_BYTES = ROWS_PER_SHARD * LENGTH * 2
TOKENIZER = {"vocab_size": 1000, "eos": 0, "pad": 1, "sha256": ""}


class Store:
    """Counts what is asked of the store in memory, and spoils what `fault` says: (path, start, end, content)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int | None, int | None]] = []
        self.fault: Callable[[str, int | None, int | None, bytes], bytes] = lambda path, start, end, content: content
        self.away = threading.Event()

    def read(self, path: str, start: int | None, end: int | None, content: bytes) -> bytes:
        self.asked.append((path.rpartition("/")[2], start, end))
        if self.away.is_set():
            raise ConnectionRefusedError("the store is away")
        return self.fault(path, start, end, content)

    def asked_for(self, suffix: str) -> list[tuple[str, int | None, int | None]]:
        return [request for request in self.asked if request[0].endswith(suffix)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    found, original = Store(), MemoryFileSystem.cat_file

    def cat_file(self: Any, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        return found.read(path, start, end, original(self, path, start, end))

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(object_stores, "LONGEST_PAUSE_SECONDS", 0.002)
    monkeypatch.setattr(object_stores, "FIRST_PAUSE_SECONDS", 0.001)
    return found


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 rows of 16 tokens in three shards, in memory."""
    local, folder = tmp_path_factory.mktemp("set"), as_path("memory://faulty-set")
    write_packed_set(local, ROWS, {"prose": 45, "code": 15}, TOKENIZER, {"prose": ROWS[:2]})
    shards = [
        write_rows(
            local / f"train-{number:05d}.bin",
            ROWS[first : first + ROWS_PER_SHARD].astype("<u2"),
            PIECES_SCHEMA.empty_table(),
            first,
        )
        for number, first in enumerate(range(0, 60, ROWS_PER_SHARD))
    ]
    manifest = read_json(local / "packed.json")
    write_json(local / "packed.json", {**manifest, "train": {**manifest["train"], "shards": shards}})
    for path in local.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def opened(remote: Path, tmp_path: Path) -> Iterator[Callable[..., PackedSet]]:
    """Open the set with a cache of its own; all are closed at the end."""
    sets: list[PackedSet] = []

    def opened(warnings: list[str] | None = None, **keys: Any) -> PackedSet:
        told = [] if warnings is None else warnings
        stream = Stream.model_validate({"cache_folder": str(tmp_path / "cache"), "retry_seconds": 60.0, **keys})
        sets.append(PackedSet(remote, stream, told.append))
        return sets[-1]

    yield opened
    for packed in sets:
        packed.close()


def wait_for_shards(packed: PackedSet) -> list[int]:
    """The shards on the local disk when all that fit have come."""
    rows = packed._shards.elsewhere()
    assert rows._filling is not None
    rows._filling.join(30)
    return rows.shards_here


def faults(*spoil: Callable[[bytes], bytes]) -> Callable[[str, int | None, int | None, bytes], bytes]:
    """Spoil the first answers to every request, each in another way; the next one is right."""
    seen: dict[tuple[str, int | None, int | None], int] = {}
    lock = threading.Lock()

    def fault(path: str, start: int | None, end: int | None, content: bytes) -> bytes:
        with lock:
            number = seen[path, start, end] = seen.get((path, start, end), -1) + 1
        return spoil[number](content) if number < len(spoil) else content

    return fault


def raising(error: Exception) -> Callable[[bytes], bytes]:
    def spoil(content: bytes) -> bytes:
        raise error

    return spoil


def flipped(content: bytes) -> bytes:
    """One bit is another one, somewhere in the middle."""
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
def test_rows_are_right_whatever_goes_wrong_on_their_way(
    store: Store, opened: Callable[..., PackedSet], cache_bytes: int
) -> None:
    store.fault = faults(*ALL_FAULTS)
    warnings: list[str] = []
    packed = opened(warnings, cache_bytes=cache_bytes)
    order = np.random.default_rng(1).permutation(60)
    for first in range(0, 60, 12):
        batch = order[first : first + 12]
        assert np.array_equal(packed.read(batch), ROWS[batch])
    assert wait_for_shards(packed) == [0, 1, 2][: cache_bytes // SHARD_BYTES]
    assert np.array_equal(packed.read(order), ROWS[order])
    assert np.array_equal(packed.validation("prose"), ROWS[:2])
    assert packed.boundaries(order).filled().tolist() == [LENGTH] * 60
    (warning,) = warnings  # of all failures, the first one within a minute
    assert "could not be read" in warning
    assert "trying again" in warning


def test_a_set_that_fits_into_the_cache_is_fetched_once_and_then_read_from_the_disk(
    store: Store, opened: Callable[..., PackedSet]
) -> None:
    first, second = (opened(cache_bytes=3 * SHARD_BYTES) for _ in range(2))  # as two processes of a machine
    for packed in (first, second):
        packed.read(np.arange(1))
        assert wait_for_shards(packed) == [0, 1, 2]
    whole = [request for request in store.asked_for(".bin") if request[1:] == (0, SHARD_BYTES)]
    assert sorted(whole) == [(f"train-{number:05d}.bin", 0, SHARD_BYTES) for number in range(3)]
    first.read(np.arange(60)), second.read(np.arange(60))  # the checksums of all shards are here now
    store.away.set()
    assert np.array_equal(first.read(np.arange(60)), ROWS)
    assert np.array_equal(second.read(np.arange(60)), ROWS)


def test_without_a_cache_each_row_is_one_request_and_neighbours_share_one(
    store: Store, opened: Callable[..., PackedSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.tokenize.streaming.remote_rows.GAP_BYTES", 2 * LENGTH * 2)
    packed, row_bytes = opened(cache_bytes=0), LENGTH * 2
    rows = np.array([3, 59, 0, 7, 21, 4])
    assert np.array_equal(packed.read(rows), ROWS[rows])
    assert sorted(store.asked_for(".bin")) == [
        ("train-00000.bin", 0, 8 * row_bytes),
        ("train-00001.bin", row_bytes, 2 * row_bytes),
        ("train-00002.bin", 19 * row_bytes, 20 * row_bytes),
    ]


def test_a_training_goes_on_through_an_outage_as_long_as_it_has_rows_and_then_where_it_was(
    store: Store, opened: Callable[..., PackedSet]
) -> None:
    packed = opened(cache_bytes=0)
    order = packed.order(3)

    def read(step: int) -> np.ndarray:
        return packed.read(order.rows(np.arange(6 * step, 6 * step + 6)))

    ahead = ReadAhead(read, last_step=10, depth=4, threads=2)
    expected = [ROWS[order.rows(np.arange(6 * step, 6 * step + 6))] for step in range(10)]
    assert np.array_equal(ahead.take(0), expected[0])
    with ahead._come:
        assert ahead._come.wait_for(lambda: len(ahead._results) == 4, timeout=30)
    store.away.set()
    for step in (1, 2, 3, 4):
        assert np.array_equal(ahead.take(step), expected[step])
    asked = len(store.asked)
    while len(store.asked) < asked + 20:  # the next step is asked for, again and again
        threading.Event().wait(0.001)
    store.away.clear()
    for step in range(5, 10):
        assert np.array_equal(ahead.take(step), expected[step])
    ahead.close()


def test_a_store_that_stays_away_ends_the_training_with_the_name_of_the_object(
    store: Store, opened: Callable[..., PackedSet]
) -> None:
    packed = opened(cache_bytes=0, retry_seconds=0.05)
    packed.read(np.array([21]))
    store.away.set()
    with pytest.raises(
        StoreUnavailableError, match=re.escape("faulty-set/train-00001.bin could not be read in")
    ) as caught:
        packed.read(np.array([25]))
    assert "ConnectionRefusedError: the store is away" in str(caught.value)
    assert "engine.stream.retry_seconds (0.05)" in str(caught.value)


def test_bytes_that_stay_wrong_are_an_error_and_never_rows(store: Store, opened: Callable[..., PackedSet]) -> None:
    packed = opened(cache_bytes=0, retry_seconds=0.05)
    packed.read(np.array([21]))
    store.fault = lambda path, start, end, content: flipped(content)
    with pytest.raises(StoreUnavailableError, match="row 5 of the shard has another checksum than the set says"):
        packed.read(np.array([25]))


def test_a_copy_that_rots_on_the_local_disk_is_noticed_and_read_anew(
    store: Store, opened: Callable[..., PackedSet], tmp_path: Path
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
    assert "train-00001.bin: its copy in the cache is damaged and was removed" in warning
    assert packed._shards.elsewhere().shards_here == [0, 2]


def test_closing_ends_the_requests_that_still_wait(store: Store, opened: Callable[..., PackedSet]) -> None:
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
    asked = len(store.asked)
    while len(store.asked) < asked + 3:
        threading.Event().wait(0.001)
    packed.close()
    reader.join(30)
    assert len(failed) == 1


def test_a_missing_object_is_an_error_at_once(store: Store, opened: Callable[..., PackedSet]) -> None:
    def gone(path: str, start: int | None, end: int | None, content: bytes) -> bytes:
        raise FileNotFoundError(path)

    packed = opened(cache_bytes=0)
    packed.read(np.array([41]))
    store.fault = gone
    with pytest.raises(FileNotFoundError, match=r"train-00002\.bin"):
        packed.read(np.array([50]))


def test_a_set_from_before_rows_had_checksums_is_refused_in_a_store(remote: Path, tmp_path: Path) -> None:
    old = as_path("memory://old-set")
    for path in remote.iterdir():
        (old / path.name).write_bytes(path.read_bytes())
    manifest = read_json(old / "packed.json")
    for entry in manifest["train"]["shards"]:
        entry["beside"] = {}
    write_json(old / "packed.json", manifest)
    packed = PackedSet(old, Stream(cache_folder=str(tmp_path)))
    with pytest.raises(PackedSetError, match=r"train-00000\.bin, .* have no checksums of their rows"):
        packed.read(np.arange(3))


def test_the_shards_that_are_kept_are_the_first_ones_that_fit() -> None:
    assert shards_that_fit([10, 10, 5, 0], 25) == [0, 1, 2]
    assert shards_that_fit([10, 10, 5], 24) == [0, 1]
    assert shards_that_fit([10, 10, 5], 9) == []
