"""Memory for batches that is used again: a fresh megabyte costs as many page faults as copying it costs time."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np

LARGE_BYTES = 4 << 20
"""From here on two megabytes of a page are a small share; numpy asks for large pages from the same size on."""


class _Loan(weakref.ref[np.ndarray]):
    """Watches an array, and knows the memory that comes back when it is gone."""

    __slots__ = ("memory",)
    memory: mmap.mmap


class Buffers:
    """Arrays whose memory comes back by itself when nothing refers to them any more, views and tensors included.

    Safe between threads. A copy for another process starts empty.

    Args:
        most_kept: pieces of memory that wait for use; more are given back to the system.
    """

    def __init__(self, most_kept: int = 32) -> None:
        self._free: deque[mmap.mmap] = deque(maxlen=most_kept)
        self._lent: dict[int, _Loan] = {}

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array of undefined content."""
        size = dtype.itemsize
        for length in shape:
            size *= length
        if not size:
            return np.empty(shape, dtype=dtype)
        memory = self._of_size(size)
        # Every view refers to this array and not to the memory: it is what must be gone.
        owner = np.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize)
        loan = _Loan(owner, self._take_back)
        loan.memory = memory
        self._lent[id(loan)] = loan
        return owner.reshape(shape)

    def __reduce__(self) -> tuple[type[Buffers], tuple[int | None]]:
        return Buffers, (self._free.maxlen,)

    def _take_back(self, loan: weakref.ref[np.ndarray]) -> None:
        self._free.append(self._lent.pop(id(loan)).memory)

    def _of_size(self, size: int) -> mmap.mmap:
        """Memory that waits, if it is large enough and not much too large; else new."""
        try:
            memory = self._free.pop()  # the one used last is in the cache
        except IndexError:
            return _new_memory(size)
        return memory if size <= len(memory) <= 2 * size else _new_memory(size)


def _new_memory(size: int) -> mmap.mmap:
    """Memory of this process alone, in large pages where that pays and the system has them."""
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, size, flags=private) if private else mmap.mmap(-1, size)
    if size >= LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
