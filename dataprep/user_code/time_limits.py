"""Time limits for calls of Python code in any thread."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

LEAST_WAIT_SECONDS, MOST_WAIT_SECONDS = 0.02, 1.0
"""Bounds of the interval between checks for a late call, which is a twentieth of the
limit.
"""


Function = Callable[..., Any]


class TimeLimitError(RuntimeError):
    """Error of a call that exceeded its time limit."""


class _LateError(BaseException):
    """Exception raised inside of a late call, which `except Exception` does not
    catch.
    """


class TimeLimit:
    """Context in which each call has a time limit in seconds.

    A watcher thread raises an exception in the calling thread. Python raises it between
    two bytecode instructions, so that native code is interrupted only when it returns.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._wait = min(max(seconds / 20, LEAST_WAIT_SECONDS), MOST_WAIT_SECONDS)
        self._deadline: float | None = None
        self._thread = 0
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._watcher.join()

    def call(self, function: Function, *arguments: Any, **named: Any) -> Any:
        """Call a function and return its result.

        Raises:
            TimeLimitError: the call exceeded the time limit.
        """
        self._deadline = time.monotonic() + self._seconds
        try:
            try:
                return function(*arguments, **named)
            finally:
                self._settle()
        except _LateError as error:
            self._settle()  # in case the error came during the first `_settle`
            raise TimeLimitError(
                f"took longer than {self._seconds:g} s"
            ).with_traceback(error.__traceback__) from None

    def _settle(self) -> None:
        """Disarm the limit, so that no further exception is raised."""
        while self._deadline is not None:
            try:
                with self._lock:
                    self._deadline = None
                    _raise_in(self._thread, None)
            except _LateError:  # raised just before the lock was acquired
                continue

    def _watch(self) -> None:
        while not self._stopped.wait(self._wait):
            with self._lock:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    _raise_in(self._thread, _LateError)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Schedule an exception in a thread for its next Python instruction, or cancel it
    (None).
    """
    # https://docs.python.org/3/c-api/init.html#c.PyThreadState_SetAsyncExc
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None
    )
