"""How object stores are asked: which failures are asked again, with what pauses, for how long, and who hears of it.

Every request of this package to an S3-compatible store goes through `s3_files.S3Files`, which asks again where the
store, or the way to it, fails for a while (5xx, 429, time-outs, connections that break), with pauses that double and
are shortened at random. Once that has lasted for all of the time, or a person wants the process to end, what else is
asked for gets a few seconds, until the store answers.

gcsfs (`gs://`) and adlfs (`az://`) ask again by themselves, by rules of their own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}
"""Kind of URL -> the extra of pyproject.toml with what opens it."""
VARIABLE = "GRISTMILL_STORE_RETRY_SECONDS"
"""Says how long a store that fails is asked again."""
RETRY_SECONDS = 600.0
"""Unless VARIABLE says otherwise."""
FIRST_PAUSE_SECONDS = 0.1
"""Before the second attempt; every further pause is twice as long. Who has less time than RETRY_SECONDS has pauses that
are shorter by as much."""
LONGEST_PAUSE_SECONDS = 30.0
"""Less than a lease lasts without a heartbeat, so that its owner is back before it is taken over."""
HASTY_SECONDS = 3.0
"""So long a store is asked again after an interrupt, or after it was given up."""
REST_SECONDS = 10.0
"""So long one that was given up is not asked at all: to end a process takes dozens of requests."""
SLICE_SECONDS = 0.2
"""A pause is cut short so soon."""
READS = ("Get", "Head", "List")
"""What the names of S3's operations begin with that change nothing."""
JITTER = 0.5
"""Pauses are shortened at random by up to this share, so that many processes do not come back at once (Brooker 2015,
"Exponential Backoff and Jitter")."""
SECONDS_BEFORE_WARNING = 3.0
SECONDS_BETWEEN_WARNINGS = 60.0
PASSING_CODES = (
    "ConditionalRequestConflict",
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "XAmzContentSHA256Mismatch",
)
"""Refusals of S3 after which the same request may well succeed, whatever their HTTP status."""
log = logging.getLogger("gristmill.store")


def not_installed(protocol: str, error: ImportError) -> str:
    """What is said where URLs of a kind cannot be opened, as the package for them is missing."""
    command = f"; install it with: pip install 'gristmill[{EXTRAS[protocol]}]'" if protocol in EXTRAS else ""
    return f"the package that opens {protocol}:// is not installed: {error}{command}"


class StoreUnavailableError(OSError):
    """An object store did not give what was asked for, in all the time that it was asked."""


class Failing:
    """One request that fails: for how long, and when it is made again.

    Args:
        what: the object.
        seconds: an object that could not be had for so long is an error.
        done: what the request does to the object.
        advice: ends the error.
        quiet_seconds: trouble that is over by then is nobody's.
    """

    def __init__(self, what: str, seconds: float, done: str, advice: str, quiet_seconds: float = 0.0) -> None:
        self._what, self._seconds, self._done, self._advice = what, seconds, done, advice
        self._quiet, self._shorter = quiet_seconds, min(1.0, seconds / RETRY_SECONDS)
        self._begun, self._pause, self._attempts = time.monotonic(), FIRST_PAUSE_SECONDS * self._shorter, 0

    def failed(self, error: BaseException, warn: Callable[[str], None], is_over: bool = False) -> float:
        """Take another failure; returns how many seconds to wait before the next attempt.

        Args:
            error: what the attempt raised.
            warn: gets a sentence.
            is_over: give up now.

        Raises:
            StoreUnavailableError: it has failed for all of the time; names the object and the last failure.
        """
        self._attempts += 1
        waited = time.monotonic() - self._begun
        why = f"{type(error).__name__}: {error}"
        if waited >= self._seconds or is_over or (_Rules.interrupted and waited >= HASTY_SECONDS):
            raise StoreUnavailableError(
                f"{self._what} could not be {self._done} in {self._attempts} attempts over {waited:.0f} seconds "
                f"({why}); {self._advice}"
            ) from error
        if waited >= self._quiet:
            warn(f"{self._what} could not be {self._done} for {waited:.0f} seconds ({why}); trying again")
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE_SECONDS * self._shorter)
        # The pauses change when something comes, never what: chance may decide here.
        return min(pause * (1 - JITTER * random.random()), max(self._seconds - waited, 0.0))


class Warned:
    """Hands on a sentence once a minute at the most; callable from any thread.

    Args:
        warn: gets the sentences.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._lock, self._last = warn, threading.Lock(), -SECONDS_BETWEEN_WARNINGS

    def __call__(self, message: str) -> None:
        """Hand it on, unless one was a moment ago."""
        with self._lock:
            now = time.monotonic()
            if now - self._last < SECONDS_BETWEEN_WARNINGS:
                return
            self._last = now
        self._warn(message)


class Patience:
    """How long a store is asked for what must be checked besides, with what pauses, and who hears of it.

    Args:
        retry_seconds: an object that could not be had for so long is an error.
        warn: gets a warning of failures, once a minute at the most.
        advice: ends the error.
    """

    def __init__(self, retry_seconds: float, warn: Callable[[str], None], advice: str) -> None:
        self._retry_seconds, self._warn, self._advice = retry_seconds, Warned(warn), advice
        self._stopped = threading.Event()

    def ask(self, what: str, attempt: Callable[[], T], done: str = "read") -> T:
        """What `attempt` returns as soon as it does; `done` is what it does to the object.

        Raises:
            StoreUnavailableError: it failed for `retry_seconds`; names the object and the last failure.
            FileNotFoundError: there is no such object; asking again would not help.
        """
        failing = Failing(what, self._retry_seconds, done, self._advice)
        while True:
            try:
                return attempt()
            except FileNotFoundError:
                raise
            except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
                pause = failing.failed(error, self._warn, self._stopped.is_set())
            self._stopped.wait(pause)

    def stop(self) -> None:
        """Ask no more: what fails from now on is an error at once."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()


class _Rules:
    """What holds for all requests of this process."""

    seconds: float | None = None
    warn = Warned(log.warning)
    interrupted = False
    given_up: ClassVar[dict[str, tuple[str, float]]] = {}
    """HOST:PORT of a store -> why a request there was given up, as long as none has succeeded since, and until when it
    is not asked."""
    unwritten: ClassVar[list[str]] = []


def warn_by(warn: Callable[[str], None]) -> None:
    """Let this function hear of a store that fails, instead of this process's log."""
    _Rules.warn = Warned(warn)


@contextmanager
def asked_for(seconds: float) -> Iterator[None]:
    """Within it no store is asked again for longer than this; for all threads of this process."""
    before, _Rules.seconds = _Rules.seconds, seconds
    try:
        yield
    finally:
        _Rules.seconds = before


def interrupt() -> None:
    """From now on let every request of this process, those that wait too, end within a few seconds."""
    _Rules.interrupted = True


@contextmanager
def until_interrupted() -> Iterator[list[str]]:
    """Within it `interrupt` may be called; yields a list that gets the URLs of what was not written after that."""
    _Rules.unwritten = []
    try:
        yield _Rules.unwritten
    finally:
        _Rules.interrupted = False


def retry_seconds() -> float:
    """How long a store that fails is asked again, now.

    Raises:
        ValueError: VARIABLE holds no number.
    """
    given = os.environ.get(VARIABLE, "")
    try:
        seconds = float(given) if given else RETRY_SECONDS
    except ValueError:
        raise ValueError(f"{VARIABLE} is {given!r}; give seconds, such as {RETRY_SECONDS:.0f}") from None
    return seconds if _Rules.seconds is None else min(seconds, _Rules.seconds)


def is_passing(status: int, code: str) -> bool:
    """Whether a request that a store refused so, by HTTP status and S3's own code, may succeed a while later."""
    return status == 429 or (status >= 500 and status != 501) or code in PASSING_CODES


def refuse_while_resting(model: Any, params: Mapping[str, Any], **others: Any) -> None:
    """Take botocore's event `before-call`: raise StoreUnavailableError where the store was given up a moment ago."""
    address = address_of(params)
    why, until = _Rules.given_up.get(urlsplit(address).netloc, ("", 0.0))
    if time.monotonic() >= until:
        return
    _note_unwritten(address, model.name)
    raise StoreUnavailableError(
        f"{address} ({model.name}) was not asked for, since the store had just been given up: {why}"
    )


def _note_unwritten(address: str, operation: str) -> None:
    if _Rules.interrupted and not operation.startswith(READS):
        _Rules.unwritten.append(address)


async def ask_again(
    response: tuple[Any, Mapping[str, Any]] | None,
    operation: Any,
    caught_exception: Exception | None,
    request_dict: dict[str, Any],
    **others: Any,
) -> float | None:
    """Answer botocore's event `needs-retry`: 0 to send the same request once more, after a pause, or None.

    Args:
        response: what the server said, and its parsed form.
        operation: the model of what is asked for.
        caught_exception: why nothing was said.
        request_dict: the request; its `context` lives as long as it is tried.

    Raises:
        StoreUnavailableError: it has been sent long enough.
    """
    error, address = _passing_failure(response, caught_exception), address_of(request_dict)
    host = urlsplit(address).netloc
    if error is None:
        if response is not None:
            _Rules.given_up.pop(host, None)
        return None
    context = request_dict["context"]
    if "gristmill" not in context:
        context["gristmill"] = Failing(
            f"{address} ({operation.name})",
            min(retry_seconds(), HASTY_SECONDS) if host in _Rules.given_up else retry_seconds(),
            "reached",
            f"see that the store can be reached, or let it be asked for longer ({VARIABLE}={retry_seconds():g})",
            SECONDS_BEFORE_WARNING,
        )
    failing: Failing = context["gristmill"]
    try:
        pause = failing.failed(error, _Rules.warn)
    except StoreUnavailableError as given_up:
        why = _Rules.given_up.get(host, (str(given_up), 0.0))[0]
        _Rules.given_up[host] = why, time.monotonic() + REST_SECONDS
        _note_unwritten(address, operation.name)
        raise
    ends = time.monotonic() + pause
    while (left := ends - time.monotonic()) > 0 and not _Rules.interrupted:
        await asyncio.sleep(min(left, SLICE_SECONDS))
    return 0.0


def address_of(request: Mapping[str, Any]) -> str:
    """The URL of a request, as botocore has it, without what is asked."""
    return str(request.get("url", "")).partition("?")[0]


def _passing_failure(response: tuple[Any, Mapping[str, Any]] | None, caught: Exception | None) -> Exception | None:
    from botocore.exceptions import ConnectionError as NoConnectionError  # type: ignore[import-untyped]
    from botocore.exceptions import HTTPClientError, SSLError

    if caught is not None or response is None:
        passes = isinstance(caught, HTTPClientError | NoConnectionError) and not isinstance(caught, SSLError)
        return caught if passes else None
    status, told = int(response[0].status_code), response[1].get("Error", {})
    code = str(told.get("Code", ""))
    if not is_passing(status, code):
        return None
    return OSError(f"{status} {' '.join(part for part in (code, str(told.get('Message', ''))) if part)}")
