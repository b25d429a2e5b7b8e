"""Rows of shards in an object store: a bounded local cache, and single reads of rows
that are not in it.

A training reads every row once per epoch, in an order that is shuffled over the whole
set. So any part of the set on the local disk serves its share of all reads, and
exchanging one shard for another only costs traffic: a cache that evicts the least
recently used shard would fetch all shards again for every few batches. The shards that
fit into `cache_bytes`, from the first on, are therefore fetched once, whole, in the
background, and stay; the rows of all others (and of these until they are fetched) are
read one by one, each with a request for its bytes. Steps are read ahead
(`read_ahead.ReadAhead`), so that requests overlap with each other and with the
training.

The contract:

- Every row is compared with its checksum, from the cache or the store. Wrong bytes are
  requested again and never returned.
- Requests that fail, stall or return wrong bytes are repeated with growing pauses and
  a warning once a minute. Meanwhile the training continues with the steps that were
  read ahead and with the rows on the local disk, and waits if it needs others. After
  `retry_seconds` without success it ends with an error that names the object.
- The cache can be shared by all processes of a machine and by several trainings
  (`file_cache.FileCache`); a process that dies cannot damage it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gristmill.core.object_stores import Patience, Warn
from gristmill.mixtures.schema.engine import Stream
from gristmill.tokenize.packed_files import (
    CHECKSUM_DTYPE,
    ShardEntry,
    read_tokens,
    sums_name,
)
from gristmill.tokenize.row_bytes import gather_rows, row_checksums
from gristmill.tokenize.streaming.file_cache import FileCache, default_folder

GAP_BYTES = 64 << 10
"""Largest gap between rows of a batch that are read with one request: these bytes take
less time than another response.
"""
LARGEST_REQUEST_BYTES = 8 << 20
SMALL_FILES_BYTES = 1 << 30
"""Cached bytes of checksums, boundaries and held-out rows of all sets together; files in
use stay beyond this limit.
"""
Wanted = tuple[int, np.ndarray, np.ndarray]
"""A shard's number, rows within it (int64, ascending or not), and the places in the
batch where they belong.
"""


class RemoteRows:
    """The rows of a packed set's training shards.

    Args:
        folder: of the set: the `upath.UPath` of an fsspec URL.
        shards: their entries in packed.json, each with a file of checksums beside it.
        sequence_length: tokens per row.
        dtype: of the tokens.
        stream: cache, connections and patience.
        warn: called when the store fails, at most once a minute.
    """

    def __init__(
        self,
        folder: Any,
        shards: Sequence[ShardEntry],
        sequence_length: int,
        dtype: np.dtype,
        stream: Stream,
        warn: Warn,
    ) -> None:
        from fsspec.asyn import AsyncFileSystem

        self._shards = shards
        self._length = sequence_length
        self._dtype = dtype
        self._row_bytes = sequence_length * dtype.itemsize
        self._patience = Patience(
            stream.retry_seconds,
            warn,
            "check the store, or raise engine.stream.retry_seconds "
            f"({stream.retry_seconds:g})",
        )
        # only the stores that fsspec reads asynchronously have this time limit
        is_async = isinstance(folder.fs, AsyncFileSystem)
        self._timeout = {"timeout": stream.timeout_seconds} if is_async else {}
        self._folder = folder
        self._warn = warn
        self._limit = stream.cache_bytes
        folder_here = (
            Path(stream.cache_folder) if stream.cache_folder else default_folder()
        )
        self._cache = FileCache(folder_here / "shards", stream.cache_bytes)
        self._small = FileCache(folder_here / "beside", SMALL_FILES_BYTES)
        self._pool = ThreadPoolExecutor(stream.connections, thread_name_prefix="rows")
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._sums: dict[int, np.ndarray] = {}
        self._here: dict[int, np.ndarray] = {}
        self._filling: threading.Thread | None = None

    def fill(self, wanted: Sequence[Wanted], out: np.ndarray) -> None:
        """Copy rows of several shards into a batch (n, L); returns once all are present
        and verified.

        Raises:
            StoreUnavailableError: a row could not be read in time; names the object.
        """
        requests = []
        for shard, rows, places in wanted:
            tokens = self._here.get(shard)
            if tokens is not None:
                gather_rows(tokens, rows, places, out)
                wrong = row_checksums(out[places]) != self._checksums(shard)[rows]
                if wrong.any():
                    entry = self._shards[shard]
                    self._here.pop(shard, None)
                    self._cache.drop(entry["sha256"])
                    self._warn(
                        f"{entry['file']}: its copy in the cache is damaged and "
                        "was removed; its rows are read from the store"
                    )
                rows, places = rows[wrong], places[wrong]
            for part in self._requests(rows):
                requests.append(
                    self._pool.submit(self._read, shard, rows[part], places[part], out)
                )
        for request in requests:
            request.result()

    def file(self, name: str, sha256: str) -> Path:
        """Fetch a small required file of the set to the local disk, regardless of the
        cache limit.
        """
        path = self._folder / name
        with self._lock:
            one_at_a_time = self._locks.setdefault(sha256, threading.Lock())
        with one_at_a_time:
            size = self._patience.ask(
                str(path), lambda: int(path.fs.info(path.path, **self._timeout)["size"])
            )
            copy = partial(self._copy, name, size, sha256)
            local = self._small.get(sha256, size, copy, needed=True)
        assert local is not None
        return local

    def keep_shards(self) -> None:
        """Start a thread that fetches whole shards, as many as fit."""
        if self._filling is None:
            self._filling = threading.Thread(
                target=self._fetch_shards, name="shard-cache", daemon=True
            )
            self._filling.start()

    def close(self) -> None:
        """Stop requests to the store and release the cache's files."""
        self._patience.stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._filling is not None:
            self._filling.join()
        self._cache.close()
        self._small.close()

    def _requests(self, rows: np.ndarray) -> list[np.ndarray]:
        """Indices into `rows` for each request: rows too far from the previous ones
        get a separate request.
        """
        by_place = np.argsort(rows, kind="stable")
        ordered = rows[by_place].tolist()
        requests: list[np.ndarray] = []
        first = 0
        for number, (last, row) in enumerate(pairwise(ordered), start=1):
            gap = row - last - 1
            span = row + 1 - ordered[first]
            if (
                gap * self._row_bytes > GAP_BYTES
                or span * self._row_bytes > LARGEST_REQUEST_BYTES
            ):
                requests.append(by_place[first:number])
                first = number
        return [*requests, by_place[first:]] if ordered else []

    def _read(
        self, shard: int, rows: np.ndarray, places: np.ndarray, out: np.ndarray
    ) -> None:
        first = int(rows.min())
        end = int(rows.max()) + 1
        expected = self._checksums(shard)[rows]

        def place(content: bytes) -> None:
            """Copy the rows to their places; the batch is used once all of them are
            verified.
            """
            row_tokens = np.frombuffer(content, self._dtype).reshape(-1, self._length)[
                rows - first
            ]
            out[places] = row_tokens
            wrong = row_checksums(row_tokens) != expected
            if wrong.any():
                raise WrongContentError(
                    f"row {rows[wrong][0]} of the shard has "
                    "another checksum than the set says"
                )

        self._read_object(
            self._shards[shard]["file"],
            first * self._row_bytes,
            end * self._row_bytes,
            place,
        )

    def _checksums(self, shard: int) -> np.ndarray:
        if shard not in self._sums:
            entry = self._shards[shard]
            name = sums_name(entry["file"])
            path = self.file(name, entry["beside"][name])
            self._sums[shard] = read_tokens(path, CHECKSUM_DTYPE)
        return self._sums[shard]

    def _fetch_shards(self) -> None:
        """Fetch the shards that fit; those being fetched by another process are retried
        at the end.
        """
        sizes = [entry["rows"] * self._row_bytes for entry in self._shards]
        for wait in (False, True):
            for shard in shards_that_fit(sizes, self._limit):
                if self._patience.stopped.is_set():
                    return
                if shard in self._here:
                    continue
                file, sha256 = (
                    self._shards[shard]["file"],
                    self._shards[shard]["sha256"],
                )
                size = sizes[shard]
                copy = partial(self._copy, file, size, sha256)
                try:
                    path = self._cache.get(sha256, size, copy, wait)
                except OSError as error:
                    # the rows themselves are asked for one by one, and decide
                    self._warn(f"{file} was not kept in the cache: {error}")
                    continue
                if path is not None:
                    tokens = read_tokens(path, self._dtype)
                    self._here[shard] = tokens.reshape(-1, self._length)

    def _read_object(
        self,
        name: str,
        start: int,
        end: int,
        check: Callable[[bytes], None] = lambda content: None,
    ) -> bytes:
        """Read bytes [start, end) of an object; `check` raises for wrong content, which
        is requested again.
        """
        path = self._folder / name

        def attempt() -> bytes:
            content: bytes = path.fs.cat_file(
                path.path, start=start, end=end, **self._timeout
            )
            if len(content) != end - start:
                raise WrongContentError(
                    f"{len(content)} bytes were received instead of {end - start}"
                )
            check(content)
            return content

        return self._patience.ask(f"bytes {start} to {end} of {path}", attempt)

    def _copy(self, name: str, size: int, sha256: str, sink: BinaryIO) -> None:
        """Copy a whole object into a local file and verify its checksum."""

        def attempt() -> None:
            sink.seek(0)
            digest = hashlib.sha256()
            for start in range(0, size, PART_BYTES):
                part = self._read_object(name, start, min(start + PART_BYTES, size))
                digest.update(part)
                sink.write(part)
            if digest.hexdigest() != sha256:
                raise WrongContentError(
                    f"SHA-256 is {digest.hexdigest()}, not {sha256}"
                )

        self._patience.ask(str(self._folder / name), attempt)


def shards_that_fit(sizes: Sequence[int], limit_bytes: int) -> list[int]:
    """Numbers of the shards kept on the local disk: the longest prefix within the
    limit.
    """
    return np.flatnonzero(
        (np.cumsum(sizes) <= limit_bytes) & (np.array(sizes) > 0)
    ).tolist()


PART_BYTES = 8 << 20
"""Bytes of one request when a whole object is read: large enough for a store's full
rate, small enough to repeat.
"""


class WrongContentError(OSError):
    """Content from an object store that differs from the packed set's checksums."""
