"""Prefetching: results of future steps, computed in threads and returned in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Results of `read(step)` for consecutive steps, read at most `depth` steps ahead.

    The results are those of calling `read` in place: threads change the time of a
    call, never its result. An error of a step is raised where that step is taken, after
    all steps before it.

    A thread reads step after step as long as there is room, and then ends, so that no
    thread outlives its work.

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
        self._threads = threads
        self._pool = (
            ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")
            if threads
            else None
        )
        self._come = threading.Condition()
        self._results: dict[int, Future[T]] = {}
        self._turn = 0
        """Number of restarts; batches of earlier turns are discarded."""
        self._taken = 0
        """The step behind the one that was taken last."""
        self._begun = self._end = 0
        """The step behind those that are read or being read, and the one that must not
        be begun yet.
        """
        self._reading = 0
        self.waited_seconds = 0.0

    def take(self, step: int) -> T:
        """Return the result of a step; consecutive steps are prefetched, any other step
        restarts the prefetch.
        """
        if self._pool is None:
            wait_start = time.perf_counter()
            try:
                return self._read(step)
            finally:
                self.waited_seconds += time.perf_counter() - wait_start
        with self._come:
            if step != self._taken:
                self._start_at(step)
            self._taken = step + 1
            self._end = max(step + 1, min(step + 1 + self._depth, self._last))
            for _ in range(min(self._threads - self._reading, self._end - self._begun)):
                self._reading += 1
                self._pool.submit(self._read_on)
            if step not in self._results:
                wait_start = time.perf_counter()
                self._come.wait_for(lambda: step in self._results)
                self.waited_seconds += time.perf_counter() - wait_start
            outcome = self._results.pop(step)
        return outcome.result()

    def close(self) -> None:
        """Stop prefetching; running reads finish by themselves."""
        with self._come:
            self._start_at(0)
            self._end = 0
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _start_at(self, step: int) -> None:
        self._turn += 1
        self._results.clear()
        self._taken = self._begun = step

    def _read_on(self) -> None:
        """Read steps while there is room."""
        while True:
            with self._come:
                step, turn = self._begun, self._turn
                if step >= self._end:
                    self._reading -= 1
                    return
                self._begun += 1
            outcome = Future[T]()
            try:
                outcome.set_result(self._read(step))
            except BaseException as error:  # noqa: BLE001 - raised where the step is taken
                outcome.set_exception(error)
            with self._come:
                if turn == self._turn:
                    self._results[step] = outcome
                    self._come.notify()
