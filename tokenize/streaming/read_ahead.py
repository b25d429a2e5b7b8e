"""Prefetching: results of future steps, computed in threads and returned in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Results of `read(step)` for consecutive steps, read at most `depth` steps ahead.

    The results are those of calling `read` in place: threads change the time of a
    call, never its result. An error of a step is raised where that step is taken, after
    all steps before it.

    Args:
        read: function from the number of a step to its result; called in threads, for
            several steps at a time where `threads` is more than one.
        last_step: the first step that does not exist.
        depth: steps that are read or being read ahead of the one taken.
        threads: how many steps are read at a time; 0 reads each step when it is
            taken.

    Attributes:
        waited_seconds: time that `take` has waited for results, or has read, so far.
    """

    def __init__(
        self, read: Callable[[int], T], last_step: int, depth: int, threads: int = 1
    ) -> None:
        self._read = read
        self._last = last_step
        self._depth = depth
        self._pool = (
            ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")
            if threads
            else None
        )
        self._results: dict[int, Future[T]] = {}
        """Steps that are read or being read: the next one, and those after it."""
        self.waited_seconds = 0.0

    def take(self, step: int) -> T:
        """Return the result of a step; consecutive steps are prefetched, any other step
        restarts the prefetch.
        """
        if self._pool is None:
            with self._waiting():
                return self._read(step)
        if step != min(self._results, default=step):
            self._cancel()
        last = max(step, min(step + self._depth, self._last - 1))
        for ahead in range(max(self._results, default=step - 1) + 1, last + 1):
            self._results[ahead] = self._pool.submit(self._read, ahead)
        result = self._results.pop(step)
        if not result.done():
            with self._waiting():
                wait([result])
        return result.result()

    def close(self) -> None:
        """Stop prefetching; running reads finish by themselves."""
        self._cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Add the time of a block to `waited_seconds`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.waited_seconds += time.perf_counter() - started

    def _cancel(self) -> None:
        for result in self._results.values():
            result.cancel()
        self._results.clear()
