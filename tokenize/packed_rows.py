"""Training rows of a packed set as tokens, from memory-mapped files or an object store.

Large batches reuse memory: the page faults of a fresh megabyte cost as much time as
copying it.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gristmill.core.files import REPAIR, is_local
from gristmill.core.object_stores import Warn
from gristmill.mixtures.schema.engine import Stream
from gristmill.tokenize.packed_files import (
    CHECKSUM_DTYPE,
    PackedSetError,
    ShardEntry,
    by_shard,
    check_content,
    check_size,
    read_tokens,
    sums_name,
)
from gristmill.tokenize.row_bytes import (
    ALL_THERE,
    DAMAGED,
    NO_SUCH_ROW,
    gather_mapped,
)

if TYPE_CHECKING:
    from gristmill.tokenize.streaming.remote_rows import RemoteRows


class Shards:
    """Files of training rows, opened on first use.

    A copy for another process opens them again.

    Args:
        folder: of the set.
        entries: the training shards in packed.json, in their order.
        sequence_length: tokens per row, L.
        dtype: of the files.
        stream: see PackedSet.
        warn: called when a store fails.

    Attributes:
        ends: int64 of shape (shards,), end of each shard in rows.
        local: whether they are on a local disk.
    """

    def __init__(
        self,
        folder: Path,
        entries: Sequence[ShardEntry],
        sequence_length: int,
        dtype: np.dtype,
        stream: Stream | None,
        warn: Warn,
    ) -> None:
        self.ends = np.cumsum([entry["rows"] for entry in entries], dtype=np.int64)
        self.local = is_local(folder)
        self.folder = folder
        self.shards = entries
        self._stream = stream
        self._warn = warn
        self.sequence_length = sequence_length
        self.dtype = dtype
        self._open: dict[str, np.ndarray] = {}
        self._addresses, self._sums = np.zeros((2, len(entries)), np.uint64)
        self._sound: set[str] = set()
        self._buffers = Buffers()
        self._remote: RemoteRows | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {
            **self.__dict__,
            "_open": {},
            "_remote": None,
            "_lock": None,
            "_addresses": np.zeros_like(self._addresses),
            "_sums": np.zeros_like(self._sums),
        }

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def first(self, shard: int) -> int:
        """Number of a shard's first row."""
        return int(self.ends[shard]) - self.shards[shard]["rows"]

    def checked(self, rows: np.ndarray) -> np.ndarray:
        """Rows as int64 of shape (n,).

        Raises:
            PackedSetError: the set has no such row.
        """
        rows = np.asarray(rows, np.int64).reshape(-1)
        total = int(self.ends[-1]) if len(self.ends) else 0
        if rows.size and (rows.min() < 0 or rows.max() >= total):
            raise PackedSetError(
                f"{self.folder}: rows are in [0, {total}), not {rows.min()} to "
                f"{rows.max()}"
            )
        return rows

    def tokens(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Tokens of training rows in the files' dtype, in the requested order.

        Args:
            rows: int64 of shape (n,), in [0, R).
            out: (n, L) in the files' dtype, contiguous, to fill. None for a buffer that
                is reused when no longer referenced.
        """
        rows = np.ascontiguousarray(rows, dtype=np.int64).reshape(-1)
        if out is None:
            out = self._buffers.array((len(rows), self.sequence_length), self.dtype)
        if not self.local:
            self.elsewhere().fill(list(by_shard(self.checked(rows), self.ends)), out)
            return out
        content = out.view(np.uint8)
        while True:
            shard = gather_mapped(self._addresses, self._sums, self.ends, rows, content)
            if shard == ALL_THERE:
                return out
            if shard == NO_SUCH_ROW:
                self.checked(rows)
            if shard <= DAMAGED:
                row = int(rows[DAMAGED - shard])
                shard = int(np.searchsorted(self.ends, row, side="right"))
                name = self.shards[shard]["file"]
                raise PackedSetError(
                    f"{self.folder / name}: row {row - self.first(shard)} has another "
                    f"checksum than {sums_name(name)} says; one of the two files is "
                    f"damaged: `{REPAIR}` and a run make it again"
                )
            # `_open` keeps the registered addresses alive.
            entry = self.shards[shard]
            sums = sums_name(entry["file"])
            if sums not in self._open:
                check_size(self.folder / sums, entry["rows"], CHECKSUM_DTYPE.itemsize)
                self._open.setdefault(
                    sums, read_tokens(self.folder / sums, CHECKSUM_DTYPE)
                )
            self._sums[shard] = self._open[sums].ctypes.data
            path = self.folder / entry["file"]
            row_bytes = self.sequence_length * self.dtype.itemsize
            check_size(path, entry["rows"], row_bytes)
            self._addresses[shard] = self._opened(entry["file"], path).ctypes.data

    def load(self, entry: ShardEntry, compare: bool = True) -> np.ndarray:
        """All tokens (rows, L) of a shard, training or held out; the content of a local
        one is checked once.

        Args:
            entry: of the shard in packed.json.
            compare: check the content, not only the size.

        Raises:
            PackedSetError: it is missing, or differs from its checksum.
        """
        path = self.folder / entry["file"]
        if self.local:
            check_size(path, entry["rows"], self.sequence_length * self.dtype.itemsize)
        if compare or not self.local:
            path = self.here(entry["file"], entry["sha256"])
        return self._opened(entry["file"], path)

    def _opened(self, name: str, path: Path) -> np.ndarray:
        if name not in self._open:
            opened = read_tokens(path, self.dtype).reshape(-1, self.sequence_length)
            # If threads open it concurrently, the first array stays: its address may be
            # in use already.
            self._open.setdefault(name, opened)
        return self._open[name]

    def here(self, name: str, sha256: str) -> Path:
        """Local path of a file of the set, fetched first from an object store.

        Raises:
            PackedSetError: its content, checked once, differs from its checksum.
        """
        if not self.local:
            return self.elsewhere().file(name, sha256)
        if name not in self._sound:
            check_content(self.folder, {name: sha256})
            self._sound.add(name)
        return self.folder / name

    def elsewhere(self) -> RemoteRows:
        """Reader of shards in an object store."""
        from gristmill.tokenize.streaming.remote_rows import RemoteRows

        with self._lock:
            if self._remote is None:
                self._remote = RemoteRows(
                    self.folder,
                    self.shards,
                    self.sequence_length,
                    self.dtype,
                    self._stream or Stream(),
                    self._warn,
                )
                if self._stream is not None:
                    self._remote.keep_shards()
            return self._remote

    def close(self) -> None:
        """Stop requests to an object store and release the cache's files; no effect on
        local files.
        """
        if self._remote is not None:
            self._remote.close()


LARGE_BYTES = 4 << 20
"""Size from which memory is reused: huge pages of two megabytes are a small share, and
numpy requests them too.

Below it, the C library reuses memory for less than the cost of a loan: 3 microseconds,
a twentieth of the time of reading a megabyte.
"""


class _Loan(weakref.ref[np.ndarray]):
    """Weak reference to an array that holds the memory to reclaim."""

    __slots__ = ("memory",)
    memory: mmap.mmap


class Buffers:
    """Arrays whose memory is reused once neither they nor their views and tensors are
    referenced.

    Safe between threads. A copy for another process starts empty.

    Args:
        most_kept: unused pieces of memory to keep; others are returned to the system.
    """

    def __init__(self, most_kept: int = 32) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=most_kept)
        self._lent: dict[int, _Loan] = {}

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Array of undefined content."""
        size = dtype.itemsize * math.prod(shape)
        if size < LARGE_BYTES:
            return np.empty(shape, dtype)
        memory = None
        with suppress(IndexError):
            memory = self._free.pop()  # the most recently used is in the cache
        if memory is None or not size <= len(memory) <= 2 * size:
            private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(
                mmap, "MAP_ANONYMOUS", 0
            )
            options = {"flags": private} if private else {}
            memory = mmap.mmap(-1, size, **options)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # kernel without huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
        # Every view refers to this array, not to the memory: its end releases the
        # memory.
        owner = np.frombuffer(memory, dtype, count=size // dtype.itemsize)
        loan = _Loan(owner, self._take_back)
        loan.memory = memory
        self._lent[id(loan)] = loan
        return owner.reshape(shape)

    def __reduce__(self) -> tuple[type[Buffers], tuple[int | None]]:
        return Buffers, (self._free.maxlen,)

    def _take_back(self, loan: weakref.ref[np.ndarray]) -> None:
        self._free.append(self._lent.pop(id(loan)).memory)
