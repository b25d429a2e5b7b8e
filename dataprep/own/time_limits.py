"""Ends calls of Python code that take too long, in whichever thread they run."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

LEAST_WAIT_SECONDS, MOST_WAIT_SECONDS = 0.02, 1.0
"""How often it is looked whether a call is late: every twentieth of the limit, within these."""


class TimeLimitError(RuntimeError):
    """A call took longer than it may."""


class _LateError(BaseException):
    """Raised inside of a call that is late; no `except Exception` of it holds that up."""


class TimeLimit:
    """A context in which calls have so many seconds each.

    A thread of its own looks at the clock, and raises in the thread that calls. Python sees to that between two of its
    instructions, so that native code is ended when it returns.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._wait = min(max(seconds / 20, LEAST_WAIT_SECONDS), MOST_WAIT_SECONDS)
        self._deadline: float | None = None
        self._thread = 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watcher.join()

    def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What a function returns.

        Raises:
            TimeLimitError: it was ended.
        """
        self._deadline = time.monotonic() + self._seconds
        try:
            try:
                return function(*arguments, **named)
            finally:
                self._settle()
        except _LateError as error:
            self._settle()  # for where it came just before that was done
            raise TimeLimitError(f"took longer than {self._seconds:g} s").with_traceback(error.__traceback__) from None

    def _settle(self) -> None:
        """Let nothing be raised any more."""
        while self._deadline is not None:
            try:
                with self._lock:
                    self._deadline = None
                    _raise_in(self._thread, None)
            except _LateError:  # it came just before the lock
                continue

    def _watch(self) -> None:
        while not self._over.wait(self._wait):
            with self._lock:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    _raise_in(self._thread, _LateError)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Let a thread raise an exception as soon as it runs Python code, or take that back (None)."""
    # https://docs.python.org/3/c-api/init.html#c.PyThreadState_SetAsyncExc
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)
