"""Reading ahead: the results of coming steps, computed in threads, handed out in their order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """What `read(step)` returns for one step after the other, at most `depth` of them ahead.

    The results are those of calling `read` in place: threads change when it runs, never what comes out. An error of
    a step is raised where that step is taken, after all steps before it.

    Args:
        read: from the number of a step to what it needs; called in threads, for several steps at a time where
            `threads` is more than one.
        last_step: the first step that does not exist.
        depth: steps that are read or being read ahead of the one taken.
        threads: how many steps are read at a time.

    Attributes:
        waited_seconds: how long `take` has waited for results so far.
    """

    def __init__(self, read: Callable[[int], T], last_step: int, depth: int, threads: int = 1) -> None:
        self._read, self._last, self._depth = read, last_step, depth
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")
        self._ahead: deque[Future[T]] = deque()
        self._next = 0
        self.waited_seconds = 0.0

    def take(self, step: int) -> T:
        """The result of a step. Steps that follow one another were read ahead; any other one starts anew there."""
        if step != self._next - len(self._ahead):
            self._drop()
            self._next = step
        while self._next <= step or (len(self._ahead) <= self._depth and self._next < self._last):
            self._ahead.append(self._pool.submit(self._read, self._next))
            self._next += 1
        first = self._ahead.popleft()
        if first.done():
            return first.result()
        begun = time.perf_counter()
        try:
            return first.result()
        finally:
            self.waited_seconds += time.perf_counter() - begun

    def close(self) -> None:
        """Read no further; a read that is under way ends by itself."""
        self._drop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _drop(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
