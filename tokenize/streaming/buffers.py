"""Memory for batches that is used again: a fresh megabyte costs as many page faults as copying it costs time."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from typing import Any

import numpy as np


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
            return mmap.mmap(-1, size)
        return memory if size <= len(memory) <= 2 * size else mmap.mmap(-1, size)
