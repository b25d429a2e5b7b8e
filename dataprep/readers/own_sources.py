"""User-written readers and listings, run in a separate process: a crash, a hang or
printed output only affects the current file.

This module has both sides. `OwnProcess` starts the process and sends it the code by
value; the process then answers one request at a time (`guarded.py`). The result for a
file is every record that its reader yielded before it ended.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, cast

from gristmill.core.arrays import admit_pandas
from gristmill.core.files import as_path
from gristmill.dataprep.readers import guarded
from gristmill.dataprep.readers.compression import (
    DecodedStream,
    Metered,
    RawStream,
    one_line,
)
from gristmill.dataprep.readers.guarded import (
    SLEEP_FACTOR,
    EndedError,
    GuardedProcess,
    TimeLimited,
    local_copy,
)
from gristmill.dataprep.readers.records import (
    Page,
    Read,
    Reading,
    Rejected,
    excerpt,
    from_row,
    kind,
    metadata_json,
    with_end,
)
from gristmill.dataprep.user_functions import (
    blame,
    call_signature,
    load_function,
    load_own,
    wrong,
)
from gristmill.mixtures.schema.sources import OwnListing, OwnReader
from gristmill.mixtures.user_code import Own, OwnCodeError


class ListedEntry(TypedDict, total=False):
    """File that a user's function lists.

    Attributes:
        path: path or URL; always present.
        size: in bytes.
    """

    path: str
    size: int
    name: str


@dataclass(frozen=True)
class _File:
    """File to read; arguments of `OwnProcess.records`."""

    name: str
    location: str
    compression: str
    reading: Reading


@dataclass
class OwnProcess(GuardedProcess):
    """A process with one user function, started at the first request.

    Attributes:
        own: the function.
        takes: argument of a reader, `path` or `stream`; set once the process runs.
    """

    own: OwnReader | OwnListing
    takes: str = ""
    read_bytes: int = 0
    """Stored bytes of the current file that the process has read."""

    def files(self, path: str) -> list[ListedEntry]:
        """Entries of a listing, in its order.

        Args:
            path: of the source, for a function with a parameter `path`.

        Raises:
            OwnCodeError: the function raises, ends or hangs, or returns anything but
                paths.
        """
        try:
            return list(self.answers(path))
        except EndedError as error:
            raise wrong(self.own, str(error)) from error

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
        if self._child is None:
            self.start()
        is_stream = self.takes == "stream"
        self.read_bytes = 0
        with nullcontext(location) if is_stream else local_copy(location) as place:
            records = self._records(_File(name, str(place), compression, reading))
            yield from with_end(records, size, self if is_stream else None)

    def _records(self, file: _File) -> Iterator[Read]:
        number = 0
        try:
            for answer in self.answers(file, is_buffered=True):
                record, self.read_bytes = answer
                number += 1
                yield record
        except EndedError as error:
            yield Rejected(number + 1, str(wrong(self.own, str(error))), lost=None)

    def start(self) -> None:
        """Start the process and load the code.

        Raises:
            OwnCodeError: the code cannot be loaded or called.
        """
        seconds = self.own.time_limit_seconds
        unit = "one record" if isinstance(self.own, OwnReader) else "its listing"
        key = "(`time_limit_seconds`)"
        self.begin(
            "gristmill.dataprep.readers.own_sources",
            {},
            {
                signal.SIGPROF: f"took more than {seconds:g} s of processor time for "
                f"{unit} {key}",
                signal.SIGALRM: f"gave nothing for {SLEEP_FACTOR * seconds:g} s {key}",
            },
        )
        try:
            (self.takes,) = self._exchange(self.own, is_buffered=False)
        except EndedError as error:
            raise OwnCodeError(
                f"{self.own.use.file} {error} while it was loaded"
            ) from error


# Code below runs in the child process.


def main() -> None:
    """Load the function, then answer requests until they end."""
    _, requests, connection = guarded.begin()
    with open(os.devnull) as null_device:
        # user code that reads stdin would consume the next request
        os.dup2(null_device.fileno(), 0)
    admit_pandas()  # imports it, before the limits apply
    function: _Reader | _Listing

    def answer(request: Any) -> Iterator[object]:
        nonlocal function
        if isinstance(request, OwnReader | OwnListing):
            limited = TimeLimited(request.time_limit_seconds)
            with limited:
                is_reader = isinstance(request, OwnReader)
                function = (_Reader if is_reader else _Listing)(request, limited)
            yield function.takes
        else:
            yield from function.answers(request)

    guarded.serve(requests, connection, answer)


def _parameters(own: Own) -> list[inspect.Parameter]:
    signature = call_signature(load_function(own.use))
    return [] if signature is None else list(signature.parameters.values())


class _Reader:
    """A user's reader; `takes` is its argument, `path` or `stream`."""

    def __init__(self, own: Own, limited: TimeLimited) -> None:
        self._own = own
        self._limited = limited
        self._call = load_own(own, "path or stream")
        first = next(
            (
                parameter
                for parameter in _parameters(own)
                if parameter.name not in own.options
            ),
            None,
        )
        self.takes = "path" if first is None else first.name
        if first is None or first.name in ("path", "stream"):
            return
        hint = str(first.annotation)
        if "Path" not in hint and "IO" not in hint:
            raise OwnCodeError(
                f"{own.use.place}: the first parameter of {own.use.name} is called "
                f"{first.name!r}; call it `path` (the file as it is stored) or "
                "`stream` (its bytes, decompressed), or give it the type hint Path or "
                "BinaryIO"
            )
        self.takes = "path" if "Path" in hint else "stream"

    def answers(self, file: _File) -> Iterator[tuple[Read, int]]:
        """Yield each record, with the stored bytes read so far; a Rejected is the last
        one if reading cannot continue.
        """
        metered = Metered(as_path(file.location))
        with DecodedStream(metered, file.compression) as stream:
            raw = RawStream(stream)
            is_path = self.takes == "path"
            argument = Path(file.location) if is_path else io.BufferedReader(raw)
            number = 0
            failure = ""
            try:
                for value, place in self._values(argument):
                    number += 1
                    record = self._record(file, number, value, place)
                    yield record, metered.read_bytes
            except OwnCodeError:
                raise
            except (Exception, SystemExit) as error:  # any error ends its file
                if raw.failure is not None:
                    raise raw.failure from error
                failure = one_line_of(self._own, error)
            failure = failure if stream.error is None else str(stream.error)
            if failure:
                yield Rejected(number + 1, failure, lost=None), metered.read_bytes

    def _values(self, argument: object) -> Iterator[tuple[object, str]]:
        """Yield each value of the function, and its place in the code."""
        own = self._own
        with self._limited:
            iterable = self._call(argument)
            if not _is_many(iterable):
                raise wrong(
                    own,
                    f"gives {_described(iterable)}, not records one by one; write: "
                    'yield {"text": ...}',
                )
            values = iter(iterable)
        while True:
            with self._limited:
                value = next(values, _END)
            if value is _END:
                return
            frame = getattr(iterable, "gi_frame", None)
            line = f"{own.use.file}, line {frame.f_lineno}" if frame else own.use.place
            yield value, line

    def _record(self, file: _File, number: int, value: object, place: str) -> Read:
        if isinstance(value, BaseException):
            problem = f"{type(value).__name__}: {one_line(value)} ({place})"
            if value.__traceback__:
                problem = one_line_of(self._own, value)
            return Rejected(number, problem)
        record: Read
        if not isinstance(value, Mapping):
            problem = (
                f"a record is a mapping with {file.reading.text!r}, not "
                f"{_described(value)}"
            )
            record = Rejected(number, problem, excerpt(str(value)))
        else:
            try:
                record = from_row(file.reading, number, value, f"{file.name}#{number}")
                if isinstance(record, Page):  # its metadata is pickled
                    metadata = json.loads(metadata_json(record.metadata))
                    record = replace(record, metadata=metadata)
            except (TypeError, ValueError, RecursionError) as error:
                # metadata that is not JSON
                problem = f"the record cannot be kept: {one_line(error)}"
                record = Rejected(number, problem, excerpt(str(value)))
        if isinstance(record, Rejected):
            record = replace(record, error=f"{place}: {record.error}")
        return record


_END = object()


def one_line_of(own: Own, error: BaseException) -> str:
    """Error of user code in one line, with its file and line."""
    return " ".join(blame(own.use, error).split())


class _Listing:
    """A user's listing; `takes` is `path` if it takes the source's path, else empty."""

    def __init__(self, own: Own, limited: TimeLimited) -> None:
        self._own = own
        self._limited = limited
        names = [parameter.name for parameter in _parameters(own)]
        self.takes = "path" if "path" in names else ""
        self._call = load_own(own, *filter(None, [self.takes]))

    def answers(self, path: str) -> Iterator[ListedEntry]:
        """Yield the entry of each file."""
        try:
            with self._limited:
                listing = self._call(as_path(path)) if self.takes else self._call()
                entries = list(listing) if _is_many(listing) else None
        except (Exception, SystemExit) as error:
            raise OwnCodeError(one_line_of(self._own, error)) from error
        if entries is None:
            raise wrong(self._own, f"gives {_described(listing)}, not paths one by one")
        for number, entry in enumerate(entries, start=1):
            if isinstance(entry, str | os.PathLike):
                yield {"path": os.fspath(entry)}
            elif (
                isinstance(entry, Mapping)
                and isinstance(entry.get("path"), str)
                and isinstance(entry.get("size", 0), int)
                and isinstance(entry.get("name", ""), str)
                and set(entry) <= ListedEntry.__optional_keys__
            ):
                yield cast(ListedEntry, dict(entry))
            else:
                raise OwnCodeError(
                    f"{self._own.use.place}: entry {number} of {self._own.use.name} is "
                    f"{_described(entry)}; each is a path or URL, or a mapping with "
                    "`path`, and if wanted `size` (bytes) and `name`"
                )


def _is_many(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _described(value: Any) -> str:
    """Type and start of a value."""
    return (
        "nothing" if value is None else f"{kind(value)} ({excerpt(repr(value))[:40]})"
    )
