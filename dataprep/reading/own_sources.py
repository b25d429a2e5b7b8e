"""User-written readers and listings, run in a separate process: a crash, a hang or
printed output only affects the current file.

This module has both sides. `OwnProcess` starts the process with the code by value; the
process reports that it is ready, then answers one request at a time. Frames
(`guarded.py`) are JSON towards it and pickled tuples back. Records are sent in buffers.
If the process ends, the last buffer is lost, so the file is read again in a fresh
process that sends each record at once: the result is every record that its reader
yielded before it ended.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from gristmill.core.files import as_path, is_local
from gristmill.core.processes import kill_child
from gristmill.dataprep.reading import guarded
from gristmill.dataprep.reading.compression import READ_BYTES, DecodedStream, Metered
from gristmill.dataprep.reading.guarded import frame, read_frame
from gristmill.dataprep.reading.records import (
    Dropped,
    Page,
    Read,
    Reading,
    Record,
    Rejected,
    excerpt,
    from_row,
    kind,
    metadata_json,
    one_line,
    with_end,
)
from gristmill.dataprep.user_functions import blame, load_function, load_own
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.sources import OwnListing, OwnReader
from gristmill.mixtures.user_code import Own, OwnCodeError

SLEEP_FACTOR = 6
"""Wall-clock limit of a call, as a multiple of its CPU limit."""
THIS_MODULE = "gristmill.dataprep.reading.own_sources"
READ, LIST = "read", "list"
BUFFER_BYTES = 1 << 16
"""Buffered answers: a switch between two processes costs as much as some hundred of
them.
"""
Answer = tuple[Any, ...]


class ListedEntry(TypedDict, total=False):
    """File that a user's function lists.

    Attributes:
        path: path or URL; always present.
        size: in bytes.
    """

    path: str
    size: int
    name: str


class ListRequest(TypedDict):
    """Request for a listing."""

    path: str
    """Of the source."""


class ReadRequest(TypedDict):
    """Request for the records of a file.

    Attributes:
        reading: fields of `Reading`.
        at_once: send each record immediately.
    """

    name: str
    location: str
    compression: str
    reading: Recipe
    at_once: bool


class OwnSettings(TypedDict):
    """Settings of the process.

    Attributes:
        what: READ or LIST.
        seconds: processor time per record, or of the listing.
    """

    what: str
    seconds: float


class _EndedError(Exception):
    """The process ended without an answer."""


@dataclass
class _Meter:
    """Stored bytes of a file that the process has read."""

    read_bytes: int = 0


@dataclass
class OwnProcess:
    """A process with one user function, started at the first request and killed by the
    context manager.

    To be used by the thread that created it (Linux ends the process with that thread).

    Attributes:
        own: the function.
        takes: argument of a reader, `path` or `stream`; set once the process runs.
    """

    own: OwnReader | OwnListing
    takes: str = ""
    _child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OwnProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()

    def files(self, path: str) -> list[ListedEntry]:
        """Entries of a listing, in its order.

        Args:
            path: of the source, for a function with a parameter `path`.

        Raises:
            OwnCodeError: the function raises, ends or hangs, or returns anything but
                paths.
        """
        try:
            return [
                entry
                for answer_kind, entry in self._answers(ListRequest(path=path))
                if answer_kind == "file"
            ]
        except _EndedError as error:
            raise OwnCodeError(
                f"{self.own.use.place}: {self.own.use.name} {error}"
            ) from error

    def records(
        self, name: str, location: str, compression: str, size: int, reading: Reading
    ) -> Iterator[Read]:
        """Records that a reader yields for a file, followed by an Ended.

        Args:
            name: of the file; prefix of the locators.
            location: path or URL; a remote file is copied to this machine for a
                function that takes a path.
            compression: of the file; a function that takes a stream gets it
                decompressed.
            size: stored bytes.
            reading: conversion of records to documents.

        Raises:
            OwnCodeError: the code cannot be loaded or called with a file, or does not
                return an iterable.
            OSError: the storage failed.
        """
        self.start()
        meter = _Meter() if self.takes == "stream" else None
        with (
            _as_file(location)
            if self.takes == "path"
            else contextlib.nullcontext(location) as place
        ):
            request = ReadRequest(
                name=name,
                location=place,
                compression=compression,
                reading=asdict(reading),
                at_once=False,
            )
            yield from with_end(self._records(request, meter or _Meter()), size, meter)

    def _records(self, request: ReadRequest, meter: _Meter) -> Iterator[Read]:
        num_yielded = 0
        for is_unbuffered in (False, True):
            try:
                for number, (answer_kind, read_bytes, content) in enumerate(
                    self._answers({**request, "at_once": is_unbuffered}), 1
                ):
                    if number > num_yielded:
                        num_yielded = number
                        meter.read_bytes = read_bytes
                        yield (
                            content
                            if answer_kind == "record"
                            else Rejected(number, content, lost=None)
                        )
                return
            except _EndedError as error:
                if is_unbuffered:
                    yield Rejected(
                        num_yielded + 1,
                        f"{self.own.use.place}: {self.own.use.name} {error}",
                        lost=None,
                    )

    def _answers(self, request: ListRequest | ReadRequest) -> Iterator[Answer]:
        """Yield the answers to a request; kills the process unless all were read.
        Raises _EndedError if the process ended.
        """
        is_complete = False
        try:
            self.start()
            self._send(frame(request))
            while not is_complete:
                answer = self._answer()
                if answer[0] == "refused":
                    raise OwnCodeError(answer[1])
                if answer[0] == "errno":
                    raise (
                        OSError(answer[2])
                        if answer[1] is None
                        else OSError(*answer[1:])
                    )
                is_complete = answer[0] == "end"
                if not is_complete:
                    yield answer
        finally:
            if not is_complete:
                self._kill()

    def start(self) -> None:
        """Start the process and load the code, if not running.

        Raises:
            OwnCodeError: the code cannot be loaded or called.
        """
        if self._child is not None:
            return
        task = READ if isinstance(self.own, OwnReader) else LIST
        settings = OwnSettings(what=task, seconds=self.own.time_limit_seconds)
        self._child = guarded.start(THIS_MODULE, settings)
        self._send(
            frame(self.own.model_dump_json(exclude={"time_limit_seconds"}).encode())
        )
        try:
            status, content = self._answer()
        except _EndedError as error:
            self._kill()
            raise OwnCodeError(
                f"{self.own.use.file} {error} while it was loaded"
            ) from error
        if status == "refused":
            self._kill()
            raise OwnCodeError(content)
        self.takes = content

    def _send(self, content: bytes) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        # the process ended, which the missing answer reports
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(content)
            self._child.stdin.flush()

    def _answer(self) -> Answer:
        assert self._child is not None
        assert self._child.stdout is not None
        content = read_frame(self._child.stdout)  # type: ignore[arg-type]
        if content is None:
            raise _EndedError(self._obituary(self._child.wait()))
        answer: Answer = pickle.loads(content)
        return answer

    def _obituary(self, status: int) -> str:
        unit = "one record" if isinstance(self.own, OwnReader) else "its listing"
        seconds = self.own.time_limit_seconds
        key = "(`time_limit_seconds`)"
        if status == -signal.SIGPROF:
            return f"took more than {seconds:g} s of processor time for {unit} {key}"
        if status == -signal.SIGALRM:
            return f"gave nothing for {SLEEP_FACTOR * seconds:g} s {key}"
        return (
            f"crashed (signal {-status})"
            if status < 0
            else f"ended its process (status {status})"
        )

    def _kill(self) -> None:
        if self._child is not None:
            kill_child(self._child)
            self._child = None


@contextlib.contextmanager
def _as_file(location: str) -> Iterator[str]:
    """Yield a local path: the file itself, or a temporary copy of a remote file with
    the same name.
    """
    path = as_path(location)
    if is_local(path):
        # a file:// URL has its path in `path`
        yield getattr(path, "path", "") or str(path)
        return
    with tempfile.TemporaryDirectory(prefix="gristmill-read-") as folder:
        copy = Path(folder) / path.name
        with path.open("rb") as stream, copy.open("wb") as sink:
            shutil.copyfileobj(stream, sink, READ_BYTES)
        yield str(copy)


# Code below runs in the child process.


def main() -> None:
    """Load the function, then answer requests until their stream ends."""
    settings: OwnSettings
    settings, requests, output = guarded.begin()
    answers = open(output.fileno(), "wb", buffering=BUFFER_BYTES, closefd=False)  # noqa: SIM115 - closed at exit
    with open(os.devnull) as null_device:
        # user code that reads stdin would consume the next request
        os.dup2(null_device.fileno(), 0)

    def answer(*values: Any, at_once: bool = True) -> None:
        answers.write(frame(pickle.dumps(values)))
        if at_once:
            answers.flush()

    user_function = Own.model_validate_json(read_frame(requests) or b"")
    limited = _TimeLimited(settings["seconds"])
    try:
        with limited:
            call, takes = (
                _reader(user_function)
                if settings["what"] == READ
                else _listing(user_function)
            )
    except OwnCodeError as error:
        answer("refused", str(error))
        return
    answer("ready", takes)
    while (request := read_frame(requests)) is not None:
        details = json.loads(request)
        try:
            for values in (
                _read(user_function, call, takes, details, limited)
                if settings["what"] == READ
                else _list(user_function, call, takes, details, limited)
            ):
                answer(*values, at_once=details.get("at_once", False))
        except OwnCodeError as error:
            answer("refused", str(error))
        except OSError as error:
            answer("errno", error.errno, str(error))
        else:
            answer("end")


class _TimeLimited:
    """Time limit: ends the process if a block exceeds its CPU time, or SLEEP_FACTOR
    times that in wall-clock time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        signal.setitimer(signal.ITIMER_REAL, SLEEP_FACTOR * self._seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _reader(user_function: Own) -> tuple[Callable[..., Any], str]:
    """Load a reader; returns it with its argument, `path` or `stream`."""
    call = load_own(user_function, "path or stream")
    parameters = _parameters(user_function)
    first = next(
        (
            parameter
            for parameter in parameters
            if parameter.name not in user_function.options
        ),
        None,
    )
    if first is None or first.name in ("path", "stream"):
        return call, "path" if first is None else first.name
    hint = str(first.annotation)
    if "Path" in hint or "IO" in hint:
        return call, "path" if "Path" in hint else "stream"
    raise OwnCodeError(
        f"{user_function.use.place}: the first parameter of {user_function.use.name} "
        f"is called {first.name!r}; call it `path` (the file as it is stored) or "
        "`stream` (its bytes, decompressed), or give it the type hint Path or BinaryIO"
    )


def _listing(user_function: Own) -> tuple[Callable[..., Any], str]:
    """Load a listing; returns it with `path` if it takes the source's path, else an
    empty string.
    """
    takes = (
        "path"
        if any(parameter.name == "path" for parameter in _parameters(user_function))
        else ""
    )
    return load_own(user_function, *([takes] if takes else [])), takes


def _parameters(user_function: Own) -> list[inspect.Parameter]:
    try:
        return list(
            inspect.signature(load_function(user_function.use)).parameters.values()
        )
    except (TypeError, ValueError):  # a built-in without a signature
        return []


class _Decoded(io.RawIOBase):
    """Decompressed bytes as a raw binary stream; damage is an early end."""

    def __init__(self, stream: DecodedStream) -> None:
        self._stream = stream
        self.failure: OSError | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._stream.read(min(len(buffer), READ_BYTES))
        except OSError as error:
            self.failure = error
            raise
        buffer[: len(content)] = content
        return len(content)


def _read(
    user_function: Own,
    call: Callable[..., Any],
    takes: str,
    request: ReadRequest,
    limited: _TimeLimited,
) -> Iterator[Answer]:
    """Yield (`record`, stored bytes read so far, Read) for each record, and (`failed`,
    bytes, error) if reading cannot continue.
    """
    reading = Reading(**request["reading"])
    name = request["name"]
    if takes == "path":
        for number, item in enumerate(
            _items(user_function, call, Path(request["location"]), limited), start=1
        ):
            yield _answer_of(user_function, reading, name, number, item, 0)
        return
    metered = Metered(as_path(request["location"]))
    with DecodedStream(metered, request["compression"]) as stream:
        raw = _Decoded(stream)
        for number, item in enumerate(
            _items(user_function, call, io.BufferedReader(raw), limited), start=1
        ):
            if isinstance(item, _Failed):
                if raw.failure is not None:
                    raise raw.failure
                if stream.error is not None:
                    break
            yield _answer_of(
                user_function, reading, name, number, item, metered.read_bytes
            )
        if stream.error is not None:
            yield "failed", metered.read_bytes, str(stream.error)


@dataclass(frozen=True)
class _Failed:
    """Error that ended a reader before its file."""

    error: str


@dataclass(frozen=True)
class _Item:
    """A value that a reader yielded, and its place in the code."""

    value: Any
    place: str


def _items(
    user_function: Own, call: Callable[..., Any], argument: Any, limited: _TimeLimited
) -> Iterator[_Item | _Failed]:
    try:
        with limited:
            iterable = call(argument)
            if isinstance(iterable, str | bytes | Mapping) or not isinstance(
                iterable, Iterable
            ):
                raise OwnCodeError(
                    f"{user_function.use.place}: {user_function.use.name} gives "
                    f"{_described(iterable)}, not records one by "
                    'one; write: yield {"text": ...}'
                )
            records = iter(iterable)
        while True:
            with limited:
                value = next(records, _END)
            if value is _END:
                return
            running = getattr(iterable, "gi_frame", None)
            yield _Item(
                value,
                f"{user_function.use.file}, line {running.f_lineno}"
                if running
                else user_function.use.place,
            )
    except OwnCodeError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the function ends its file
        yield _Failed(one_line_of(user_function, error))


_END = object()


def one_line_of(own: Own, error: BaseException) -> str:
    """Error of user code in one line, with its file and line."""
    return " ".join(blame(own.use, error).split())


def _answer_of(
    user_function: Own,
    reading: Reading,
    name: str,
    number: int,
    item: _Item | _Failed,
    read_bytes: int,
) -> Answer:
    if isinstance(item, _Failed):
        return "failed", read_bytes, item.error
    return (
        "record",
        read_bytes,
        _record(user_function, reading, number, f"{name}#{number}", item),
    )


def _record(
    user_function: Own, reading: Reading, number: int, locator: str, item: _Item
) -> Record | Page | Rejected | Dropped:
    """Convert a yielded value to a document or a rejected record."""
    value = item.value
    if isinstance(value, BaseException):
        message = f"{type(value).__name__}: {one_line(value)} ({item.place})"
        return Rejected(
            number,
            one_line_of(user_function, value) if value.__traceback__ else message,
        )
    if not isinstance(value, Mapping):
        return Rejected(
            number,
            f"{item.place}: a record is a mapping with {reading.text!r}, not "
            f"{_described(value)}",
            excerpt(str(value)),
        )
    try:
        record = from_row(reading, number, value, locator)
        if isinstance(record, Page):  # its metadata is pickled to the parent process
            return replace(record, metadata=json.loads(metadata_json(record.metadata)))
    except (TypeError, ValueError, RecursionError) as error:
        # metadata that is not JSON
        return Rejected(
            number,
            f"{item.place}: the record cannot be kept: {one_line(error)}",
            excerpt(str(value)),
        )
    return (
        replace(record, error=f"{item.place}: {record.error}")
        if isinstance(record, Rejected)
        else record
    )


def _list(
    user_function: Own,
    call: Callable[..., Any],
    takes: str,
    request: ListRequest,
    limited: _TimeLimited,
) -> Iterator[Answer]:
    """Yield (`file`, entry) for each file."""
    try:
        with limited:
            listing = call(as_path(request["path"])) if takes else call()
            is_many = isinstance(listing, Iterable) and not isinstance(
                listing, str | bytes | Mapping
            )
            entries = list(listing) if is_many else [listing]
    except (Exception, SystemExit) as error:
        raise OwnCodeError(one_line_of(user_function, error)) from error
    if not is_many:
        raise OwnCodeError(
            f"{user_function.use.place}: {user_function.use.name} gives "
            f"{_described(listing)}, not paths one by one"
        )
    for number, entry in enumerate(entries, start=1):
        yield "file", _entry(user_function, number, entry)


def _entry(user_function: Own, number: int, entry: Any) -> ListedEntry:
    if isinstance(entry, str | os.PathLike):
        return {"path": os.fspath(entry)}
    has_valid_keys = (
        isinstance(entry, Mapping)
        and isinstance(entry.get("path"), str)
        and set(entry) <= ListedEntry.__optional_keys__
    )
    if (
        has_valid_keys
        and isinstance(entry.get("size", 0), int)
        and isinstance(entry.get("name", ""), str)
    ):
        listed: Any = dict(entry)
        return listed
    raise OwnCodeError(
        f"{user_function.use.place}: entry {number} of {user_function.use.name} is "
        f"{_described(entry)}; each is a path "
        "or URL, or a mapping with `path`, and if wanted `size` (bytes) and `name`"
    )


def _described(value: Any) -> str:
    """Type and start of a value."""
    return (
        "nothing" if value is None else f"{kind(value)} ({excerpt(repr(value))[:40]})"
    )


if __name__ == "__main__":
    main()
