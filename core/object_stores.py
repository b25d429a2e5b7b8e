"""Retries of requests to object stores: transient failures, pauses, time limits and
warnings.

Every request of this package to an object store is a `StoreRequest` of `s3.S3Files`,
`gcs.GCSFiles` or `azure_blobs.AzureFiles`. Transient failures of the store or the
network (5xx, 429, time-outs, broken connections) are retried with exponential, jittered
pauses. After the retry time is used up, or a person asks the process to end, later
requests get a few seconds each until the store answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
Warn = Callable[[str], None]
EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "http": "http",
    "https": "http",
}
"""URL scheme -> extra in pyproject.toml with the package that opens it."""
VARIABLE = "GRISTMILL_STORE_RETRY_SECONDS"
"""Environment variable with the retry time in seconds."""
RETRY_SECONDS = 600.0
"""Default retry time."""
FIRST_PAUSE_SECONDS = 0.1
"""Pause before the second attempt; each further pause is twice as long. Pauses are
scaled down with a retry time below RETRY_SECONDS.
"""
LONGEST_PAUSE_SECONDS = 30.0
"""Longest pause: shorter than a lease lasts without a heartbeat, so that its owner is
back before it is taken over.
"""
HASTY_SECONDS = 3.0
"""Retry time after an interrupt, or after a store was given up."""
REST_SECONDS = 10.0
"""Time without any requests to a store that was given up: ending a process takes dozens
of requests.
"""
SLICE_SECONDS = 0.2
"""Longest delay before a pause reacts to an interrupt."""
JITTER = 0.5
"""Largest share by which a pause is randomly shortened, so that processes do not retry
in lockstep (Brooker 2015, "Exponential Backoff and Jitter").
"""
SECONDS_BEFORE_WARNING = 3.0
SECONDS_BETWEEN_WARNINGS = 60.0
log = logging.getLogger("gristmill.store")


def not_installed(protocol: str, error: ImportError) -> str:
    """Error message for URLs whose package is not installed."""
    command = (
        f"; install it with: pip install 'gristmill[{EXTRAS[protocol]}]'"
        if protocol in EXTRAS
        else ""
    )
    return f"the package that opens {protocol}:// is not installed: {error}{command}"


class StoreUnavailableError(OSError):
    """A request to an object store failed for the whole retry time."""


@dataclass
class Failing:
    """State of one failing request.

    Attributes:
        what: the object.
        seconds: retry time.
        done: participle of the request, such as "read".
        advice: end of the error message.
        quiet_seconds: time before the first warning.
    """

    what: str
    seconds: float
    done: str
    advice: str
    quiet_seconds: float = 0.0
    _attempts: int = 0

    def __post_init__(self) -> None:
        self._begun = time.monotonic()

    def failed(self, error: BaseException, warn: Warn, is_over: bool = False) -> float:
        """Record a failure; return the seconds to wait before the next attempt.

        Args:
            error: raised by the attempt.
            warn: receives a warning.
            is_over: give up now.

        Raises:
            StoreUnavailableError: the retry time is used up; names the object and the
                last failure.
        """
        waited = time.monotonic() - self._begun
        failure = f"{self.what} could not be {self.done}"
        cause = f"{type(error).__name__}: {error}"
        longest = min(FIRST_PAUSE_SECONDS * 2**self._attempts, LONGEST_PAUSE_SECONDS)
        self._attempts += 1
        if (
            waited >= self.seconds
            or is_over
            or (_RetryState.interrupted and waited >= HASTY_SECONDS)
        ):
            raise StoreUnavailableError(
                f"{failure} in {self._attempts} attempts over {waited:.0f} seconds "
                f"({cause}); {self.advice}"
            ) from error
        if waited >= self.quiet_seconds:
            warn(f"{failure} for {waited:.0f} seconds ({cause}); trying again")
        # Pauses change the time of a result, never the result, so an unseeded generator
        # is safe here.
        pause = longest * (1 - JITTER * random.random())
        pause *= min(1.0, self.seconds / RETRY_SECONDS)
        return min(pause, max(self.seconds - waited, 0.0))


class Warned:
    """Rate limiter of warnings: at most one per minute; callable from any thread.

    Args:
        warn: receives the warnings.
    """

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._lock = threading.Lock()
        self._last = -SECONDS_BETWEEN_WARNINGS

    def __call__(self, message: str) -> None:
        """Pass a message on unless one was passed on less than a minute ago."""
        with self._lock:
            now = time.monotonic()
            if now - self._last < SECONDS_BETWEEN_WARNINGS:
                return
            self._last = now
        self._warn(message)


class Patience:
    """Retries of requests that need extra checks, with their pauses and warnings.

    Args:
        retry_seconds: retry time.
        warn: receives warnings of failures, at most once a minute.
        advice: end of the error message.

    Attributes:
        stopped: once it is set, failures are errors at once.
    """

    def __init__(self, retry_seconds: float, warn: Warn, advice: str) -> None:
        self._retry_seconds = retry_seconds
        self._warn = Warned(warn)
        self._advice = advice
        self.stopped = threading.Event()

    def ask(self, what: str, attempt: Callable[[], T], done: str = "read") -> T:
        """Call `attempt` until it succeeds; `done` is the participle of the request.

        Raises:
            StoreUnavailableError: it failed for `retry_seconds`; names the object and
                the last failure.
            FileNotFoundError: the object does not exist; not retried.
        """
        failing = Failing(what, self._retry_seconds, done, self._advice)
        while True:
            try:
                return attempt()
            except FileNotFoundError:
                raise
            except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
                pause = failing.failed(error, self._warn, self.stopped.is_set())
            self.stopped.wait(pause)


class _RetryState:
    """Retry settings and state of this process."""

    seconds: float | None = None
    warn = Warned(log.warning)
    interrupted = False
    given_up: ClassVar[dict[str, tuple[str, float]]] = {}
    """HOST:PORT of a store -> error of its last abandoned request (removed after a
    success), and the end of the time without requests.
    """
    unwritten: ClassVar[list[str]] = []


def warn_by(warn: Warn) -> None:
    """Send warnings of failing stores to this function instead of the log."""
    _RetryState.warn = Warned(warn)


@contextmanager
def asked_for(seconds: float) -> Iterator[None]:
    """Limit the retry time within a block, for all threads of this process."""
    before, _RetryState.seconds = _RetryState.seconds, seconds
    try:
        yield
    finally:
        _RetryState.seconds = before


def interrupt() -> None:
    """End all requests of this process, including waiting ones, within a few
    seconds.
    """
    _RetryState.interrupted = True


@contextmanager
def until_interrupted() -> Iterator[list[str]]:
    """Allow `interrupt` within a block; yields a list of the URLs whose writes failed
    after it.
    """
    _RetryState.unwritten = []
    try:
        yield _RetryState.unwritten
    finally:
        _RetryState.interrupted = False


def retry_seconds() -> float:
    """Current retry time in seconds.

    Raises:
        ValueError: VARIABLE is not a number.
    """
    setting = os.environ.get(VARIABLE, "")
    try:
        seconds = float(setting) if setting else RETRY_SECONDS
    except ValueError:
        raise ValueError(
            f"{VARIABLE} is {setting!r}; give seconds, such as {RETRY_SECONDS:.0f}"
        ) from None
    return seconds if _RetryState.seconds is None else min(seconds, _RetryState.seconds)


class StoreRequest:
    """A request to an object store, through all its attempts.

    Args:
        url: the object's, with or without a query.
        operation: its name in messages.
        writes: True if it changes the store.
    """

    def __init__(self, url: str, operation: str, writes: bool) -> None:
        self._address = url.partition("?")[0]
        self._host = urlsplit(url).netloc
        self._what = f"{self._address} ({operation})"
        self._writes = writes
        self._failing: Failing | None = None

    def begin(self) -> None:
        """Raise StoreUnavailableError if the store was just given up."""
        cause, until = _RetryState.given_up.get(self._host, ("", 0.0))
        if time.monotonic() >= until:
            return
        self._record_unwritten()
        raise StoreUnavailableError(
            f"{self._what} was not asked for, since the store had just been given up: "
            f"{cause}"
        )

    async def send(
        self,
        attempt: Callable[[], Awaitable[T]],
        may_pass: Callable[[Exception], bool],
    ) -> T:
        """Call `attempt` until the store answers or refuses.

        Args:
            may_pass: true for errors of transient failures.

        Raises:
            StoreUnavailableError: the retry time is used up.
        """
        self.begin()
        while True:
            try:
                response = await attempt()
            except Exception as error:
                if not may_pass(error):
                    self.answered()
                    raise
                await self.failed(error)
            else:
                self.answered()
                return response

    def answered(self) -> None:
        """Record that the store answered."""
        _RetryState.given_up.pop(self._host, None)

    async def failed(self, error: BaseException) -> None:
        """Wait before the next attempt.

        Args:
            error: the transient failure.

        Raises:
            StoreUnavailableError: the retry time is used up.
        """
        host = self._host
        if self._failing is None:
            seconds = retry_seconds()
            self._failing = Failing(
                self._what,
                min(seconds, HASTY_SECONDS)
                if host in _RetryState.given_up
                else seconds,
                "reached",
                "see that the store can be reached, or let it be asked for longer "
                f"({VARIABLE}={seconds:g})",
                SECONDS_BEFORE_WARNING,
            )
        try:
            pause = self._failing.failed(error, _RetryState.warn)
        except StoreUnavailableError as given_up:
            cause = _RetryState.given_up.get(host, (str(given_up), 0.0))[0]
            _RetryState.given_up[host] = cause, time.monotonic() + REST_SECONDS
            self._record_unwritten()
            raise
        deadline = time.monotonic() + pause
        while (
            seconds := deadline - time.monotonic()
        ) > 0 and not _RetryState.interrupted:
            await asyncio.sleep(min(seconds, SLICE_SECONDS))

    def _record_unwritten(self) -> None:
        if _RetryState.interrupted and self._writes:
            _RetryState.unwritten.append(self._address)


def is_passing(status: int) -> bool:
    """True if a request that was refused with an HTTP status may succeed later."""
    return status in (408, 429) or (status >= 500 and status not in (501, 505))
