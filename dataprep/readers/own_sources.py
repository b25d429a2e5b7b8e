"""User-written readers and listings, run in a separate process: a crash, a hang or
printed output only affects the current file.

This module has both sides. `OwnProcess` starts the process with the code by value; the
process reports that it is ready, then answers one request at a time. Messages
(`guarded.py`) are JSON towards it and pickled tuples back, as many as fit a buffer. If
the process ends, the last buffer is lost, so the file is read again in a fresh process
that sends each record at once: the result is every record that its reader yielded
before it ended.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import pickle
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

from gristmill.core.files import as_path
from gristmill.dataprep.readers import guarded
from gristmill.dataprep.readers.compression import DecodedStream, Metered, RawStream
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
    one_line,
    with_end,
)
from gristmill.dataprep.user_functions import (
    blame,
    call_signature,
    load_function,
    load_own,
    wrong,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.sources import OwnListing, OwnReader
from gristmill.mixtures.user_code import Own, OwnCodeError

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


@dataclass
class _Meter:
    """Stored bytes of a file that the process has read."""

    read_bytes: int = 0


@dataclass
class OwnProcess(GuardedProcess):
    """A process with one user function, started at the first request.

    Attributes:
        own: the function.
        takes: argument of a reader, `path` or `stream`; set once the process runs.
    """

    own: OwnReader | OwnListing
    takes: str = ""

    def files(self, path: str) -> list[ListedEntry]:
        """Entries of a listing, in its order.

        Args:
            path: of the source, for a function with a parameter `path`.

        Raises:
            OwnCodeError: the function raises, ends or hangs, or returns anything but
                paths.
        """
        try:
            return [entry for _, entry in self._answers({"path": path})]
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
        self.start()
        meter = _Meter()
        is_stream = self.takes == "stream"
        with nullcontext(location) if is_stream else local_copy(location) as place:
            request: ReadRequest = {
                "name": name,
                "location": str(place),
                "compression": compression,
                "reading": asdict(reading),
                "at_once": False,
            }
            yield from with_end(
                self._records(request, meter), size, meter if is_stream else None
            )

    def _records(self, request: ReadRequest, meter: _Meter) -> Iterator[Read]:
        number = 0
        for is_unbuffered in (False, True):
            answers = self._answers({**request, "at_once": is_unbuffered})
            try:
                for answer_kind, meter.read_bytes, content in islice(
                    answers, number, None
                ):
                    number += 1
                    yield (
                        content
                        if answer_kind == "record"
                        else Rejected(number, content, lost=None)
                    )
                return
            except EndedError as error:
                if is_unbuffered:
                    message = str(wrong(self.own, str(error)))
                    yield Rejected(number + 1, message, lost=None)

    def _answers(self, request: Mapping[str, object]) -> Iterator[Answer]:
        """Yield the answers to a request; kills the process unless all were read.
        Raises EndedError if the process ended.
        """
        is_complete = False
        try:
            self.start()
            self.send(json.dumps(request).encode())
            while not is_complete:
                buffer = self.receive()
                stream = io.BytesIO(buffer)
                while stream.tell() < len(buffer):
                    answer: Answer = pickle.load(stream)
                    if answer[0] == "refused":
                        raise OwnCodeError(answer[1])
                    if answer[0] == "errno":
                        raise OSError(*answer[1:])
                    is_complete = answer[0] == "end"
                    if not is_complete:
                        yield answer
        finally:
            if not is_complete:
                self.kill()

    def start(self) -> None:
        """Start the process and load the code, if not running.

        Raises:
            OwnCodeError: the code cannot be loaded or called.
        """
        if self._child is not None:
            return
        reads = isinstance(self.own, OwnReader)
        seconds = self.own.time_limit_seconds
        unit = "one record" if reads else "its listing"
        key = "(`time_limit_seconds`)"
        self.begin(
            "gristmill.dataprep.readers.own_sources",
            {"reads": reads, "seconds": seconds},
            {
                signal.SIGPROF: f"took more than {seconds:g} s of processor time for "
                f"{unit} {key}",
                signal.SIGALRM: f"gave nothing for {SLEEP_FACTOR * seconds:g} s {key}",
            },
        )
        self.send(self.own.model_dump_json(exclude={"time_limit_seconds"}).encode())
        try:
            status, content = pickle.loads(self.receive())
        except EndedError as error:
            status = "refused"
            content = f"{self.own.use.file} {error} while it was loaded"
        if status == "refused":
            self.kill()
            raise OwnCodeError(content)
        self.takes = content


# Code below runs in the child process.


def main() -> None:
    """Load the function, then answer requests until their stream ends."""
    settings, requests, answers = guarded.begin()
    buffer = io.BytesIO()
    with open(os.devnull) as null_device:
        # user code that reads stdin would consume the next request
        os.dup2(null_device.fileno(), 0)

    def answer(*values: Any, at_once: bool = True) -> None:
        pickle.dump(values, buffer)
        if at_once or buffer.tell() >= BUFFER_BYTES:
            answers.send_bytes(buffer.getvalue())
            buffer.seek(0)
            buffer.truncate()

    own = Own.model_validate_json(next(requests))
    limited = TimeLimited(settings["seconds"])
    user_function: _Reader | _Listing
    try:
        with limited:
            user_function = (_Reader if settings["reads"] else _Listing)(own, limited)
    except OwnCodeError as error:
        answer("refused", str(error))
        return
    answer("ready", user_function.takes)
    for request in requests:
        details = json.loads(request)
        try:
            for values in user_function.answers(details):
                answer(*values, at_once=details.get("at_once", False))
        except OwnCodeError as error:
            answer("refused", str(error))
        except OSError as error:
            answer("errno", *filter(None, (error.errno, str(error))))
        else:
            answer("end")


def _parameters(own: Own) -> list[inspect.Parameter]:
    signature = call_signature(load_function(own.use))
    return [] if signature is None else list(signature.parameters.values())


@dataclass(frozen=True)
class _Failed:
    """Error that ended a reader before its file."""

    error: str


@dataclass(frozen=True)
class _Item:
    """A value that a reader yielded, and its place in the code."""

    value: Any
    place: str


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

    def answers(self, request: ReadRequest) -> Iterator[Answer]:
        """Yield (`record`, stored bytes read so far, Read) for each record, and
        (`failed`, bytes, error) if reading cannot continue.
        """
        reading = Reading(**request["reading"])
        name = request["name"]
        if self.takes == "path":
            items = self._items(Path(request["location"]))
            for number, item in enumerate(items, start=1):
                yield self._answer(reading, number, f"{name}#{number}", item, 0)
            return
        metered = Metered(as_path(request["location"]))
        with DecodedStream(metered, request["compression"]) as stream:
            raw = RawStream(stream)
            items = self._items(io.BufferedReader(raw))
            for number, item in enumerate(items, start=1):
                if isinstance(item, _Failed):
                    if raw.failure is not None:
                        raise raw.failure
                    if stream.error is not None:
                        break
                yield self._answer(
                    reading, number, f"{name}#{number}", item, metered.read_bytes
                )
            if stream.error is not None:
                yield "failed", metered.read_bytes, str(stream.error)

    def _items(self, argument: Any) -> Iterator[_Item | _Failed]:
        try:
            with self._limited:
                iterable = self._call(argument)
                if not _is_many(iterable):
                    raise wrong(
                        self._own,
                        f"gives {_described(iterable)}, not records one by one; write: "
                        'yield {"text": ...}',
                    )
                records = iter(iterable)
            while True:
                with self._limited:
                    value = next(records, _END)
                if value is _END:
                    return
                running = getattr(iterable, "gi_frame", None)
                yield _Item(
                    value,
                    f"{self._own.use.file}, line {running.f_lineno}"
                    if running
                    else self._own.use.place,
                )
        except OwnCodeError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of the function ends its file
            yield _Failed(one_line_of(self._own, error))

    def _answer(
        self,
        reading: Reading,
        number: int,
        locator: str,
        item: _Item | _Failed,
        read_bytes: int,
    ) -> Answer:
        if isinstance(item, _Failed):
            return "failed", read_bytes, item.error
        value = item.value
        record: Read
        if isinstance(value, BaseException):
            record = Rejected(
                number,
                one_line_of(self._own, value)
                if value.__traceback__
                else f"{type(value).__name__}: {one_line(value)} ({item.place})",
            )
        elif not isinstance(value, Mapping):
            error = (
                f"a record is a mapping with {reading.text!r}, not {_described(value)}"
            )
            record = Rejected(number, f"{item.place}: {error}", excerpt(str(value)))
        else:
            try:
                record = from_row(reading, number, value, locator)
                if isinstance(record, Page):  # its metadata is pickled
                    metadata = json.loads(metadata_json(record.metadata))
                    record = replace(record, metadata=metadata)
            except (TypeError, ValueError, RecursionError) as error:
                # metadata that is not JSON
                record = Rejected(
                    number,
                    f"the record cannot be kept: {one_line(error)}",
                    excerpt(str(value)),
                )
            if isinstance(record, Rejected):
                record = replace(record, error=f"{item.place}: {record.error}")
        return "record", read_bytes, record


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

    def answers(self, request: Mapping[str, str]) -> Iterator[Answer]:
        """Yield (`file`, entry) for each file."""
        try:
            with self._limited:
                listing = (
                    self._call(as_path(request["path"])) if self.takes else self._call()
                )
                entries = list(listing) if _is_many(listing) else None
        except (Exception, SystemExit) as error:
            raise OwnCodeError(one_line_of(self._own, error)) from error
        if entries is None:
            raise wrong(self._own, f"gives {_described(listing)}, not paths one by one")
        for number, entry in enumerate(entries, start=1):
            if isinstance(entry, str | os.PathLike):
                yield "file", {"path": os.fspath(entry)}
            elif (
                isinstance(entry, Mapping)
                and isinstance(entry.get("path"), str)
                and isinstance(entry.get("size", 0), int)
                and isinstance(entry.get("name", ""), str)
                and set(entry) <= ListedEntry.__optional_keys__
            ):
                yield "file", dict(entry)
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


if __name__ == "__main__":
    main()
