"""Asking an object store again and again, until it answers rightly or the patience with it is at its end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
FIRST_PAUSE_SECONDS = 0.1
"""Before the second attempt; every further pause is twice as long."""
LONGEST_PAUSE_SECONDS = 30.0
JITTER = 0.5
"""Pauses are shortened at random by up to this share, so that many processes do not come back at once (Brooker 2015,
"Exponential Backoff and Jitter")."""
SECONDS_BETWEEN_WARNINGS = 60.0


class StoreUnavailableError(OSError):
    """An object store did not give what was asked for, in all the time that it was asked."""


class WrongContentError(OSError):
    """An object store answered with other bytes than the packed set's checksums say."""


class Patience:
    """How long a store is asked, with what pauses, and who hears of it.

    Args:
        retry_seconds: an object that could not be had for so long is an error.
        warn: told of failures, once a minute at the most.
    """

    def __init__(self, retry_seconds: float, warn: Callable[[str], None]) -> None:
        self._retry_seconds, self._warn = retry_seconds, warn
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._warned = -SECONDS_BETWEEN_WARNINGS

    def ask(self, what: str, attempt: Callable[[], T], done: str = "read") -> T:
        """What `attempt` returns as soon as it does; `done` is what it does to the object.

        Raises:
            StoreUnavailableError: it failed for `retry_seconds`; names the object and the last failure.
            FileNotFoundError: there is no such object; asking again would not help.
        """
        begun, pause, attempts = time.monotonic(), FIRST_PAUSE_SECONDS, 0
        while True:
            attempts += 1
            try:
                return attempt()
            except FileNotFoundError:
                raise
            except Exception as error:
                waited = time.monotonic() - begun
                if waited >= self._retry_seconds or self._stopped.is_set():
                    raise StoreUnavailableError(
                        f"{what} could not be {done} in {attempts} attempts over {waited:.0f} seconds "
                        f"({type(error).__name__}: {error}); see to the store, or raise engine.stream.retry_seconds "
                        f"({self._retry_seconds:g})") from error
                self._tell(f"{what} could not be {done} for {waited:.0f} seconds ({type(error).__name__}: {error}); "
                           "trying again")
            # The pauses change when a row comes, never which: chance may decide here.
            self._stopped.wait(pause * (1 - JITTER * random.random()))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def stop(self) -> None:
        """Ask no more: what fails from now on is an error at once."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    def _tell(self, message: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._warned < SECONDS_BETWEEN_WARNINGS:
                return
            self._warned = now
        self._warn(message)
