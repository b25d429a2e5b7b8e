"""Readers and listings that users write: they run in a process of their own, so that one that crashes, hangs or prints
loses the file that it was at, and nothing else.

This module is both sides. The process is started by `OwnProcess` with the code by value, answers that it is ready, and
then answers one request after the other; frames (`guarded.py`) are JSON towards it and pickled tuples back. Records
leave in buffers. Where the process ended, those in the last one are lost with it, so the file is read again in a fresh
process, which sends every record at once: what comes out of it is all that its reader gave before it ended.
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
from typing import Any

from gristmill.dataprep.files import as_path, is_local
from gristmill.dataprep.own_functions import blame, load_function, load_own
from gristmill.dataprep.processes import kill_child
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
from gristmill.mixtures.own_code import Own, OwnCodeError
from gristmill.mixtures.sources import OwnListing, OwnReader

SLEEP_FACTOR = 6
"""A call that waits ends after so many times the processor time that it may take."""
THIS_MODULE = "gristmill.dataprep.reading.own_sources"
READ, LIST = "read", "list"
BUFFER_BYTES = 1 << 16
"""Of answers on their way: a switch between two processes costs as much as some hundred of them."""
ENTRY_KEYS = ("path", "size", "name")
Answer = tuple[Any, ...]


class _EndedError(Exception):
    """The process ended without an answer."""


@dataclass
class _Meter:
    """How much of a file the process has read of its stored bytes."""

    read_bytes: int = 0


@dataclass
class OwnProcess:
    """A process with one function of the user's, started at the first request. As a context manager it leaves none.

    To be used by the thread that made it (Linux ends the process with that thread).

    Attributes:
        own: the function.
        takes: `path` or `stream`: what a reader is given; known once it runs.
    """

    own: OwnReader | OwnListing
    takes: str = ""
    _child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OwnProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()

    def files(self, path: str) -> list[dict[str, Any]]:
        """What a listing gives: `path`, and perhaps `size` and `name`, in its order.

        Args:
            path: the source's, for a function that has a parameter `path`.

        Raises:
            OwnCodeError: it raises, ends or hangs, or gives anything but paths.
        """
        try:
            return [entry for what, entry in self._answers({"path": path}) if what == "file"]
        except _EndedError as error:
            raise OwnCodeError(f"{self.own.use.place}: {self.own.use.name} {error}") from error

    def records(self, name: str, location: str, compression: str, size: int, reading: Reading) -> Iterator[Read]:
        """What a reader yields of a file, and behind it an Ended.

        Args:
            name: of the file; locators begin with it.
            location: where it lies; what is not a file of this machine is copied to one for a function that takes
                paths.
            compression: of its bytes, which a function that takes a stream gets decompressed.
            size: stored bytes.
            reading: how records become documents.

        Raises:
            OwnCodeError: the code cannot be loaded, or cannot be called with a file, or gives nothing to iterate.
            OSError: the storage failed.
        """
        self.start()
        meter = _Meter() if self.takes == "stream" else None
        with _as_file(location) if self.takes == "path" else contextlib.nullcontext(location) as place:
            request = {"name": name, "location": place, "compression": compression, "reading": asdict(reading)}
            yield from with_end(self._records(request, meter or _Meter()), size, meter)

    def _records(self, request: dict[str, Any], meter: _Meter) -> Iterator[Read]:
        done = 0
        for at_once in (False, True):
            try:
                for number, (what, read_bytes, found) in enumerate(self._answers({**request, "at_once": at_once}), 1):
                    if number > done:
                        done, meter.read_bytes = number, read_bytes
                        yield found if what == "record" else Rejected(number, found, lost=None)
                return
            except _EndedError as error:
                if at_once:
                    yield Rejected(done + 1, f"{self.own.use.place}: {self.own.use.name} {error}", lost=None)

    def _answers(self, request: Mapping[str, Any]) -> Iterator[Answer]:
        """Raises _EndedError where the process did; it is ended wherever it did not come to the end of the answers."""
        whole = False
        try:
            self.start()
            self._send(frame(request))
            while not whole:
                answer = self._answer()
                if answer[0] == "refused":
                    raise OwnCodeError(answer[1])
                if answer[0] == "errno":
                    raise OSError(answer[2]) if answer[1] is None else OSError(*answer[1:])
                whole = answer[0] == "end"
                if not whole:
                    yield answer
        finally:
            if not whole:
                self._kill()

    def start(self) -> None:
        """Start the process and load the code, where that has not been done.

        Raises:
            OwnCodeError: the code cannot be loaded, or cannot be called.
        """
        if self._child is not None:
            return
        what = READ if isinstance(self.own, OwnReader) else LIST
        self._child = guarded.start(THIS_MODULE, {"what": what, "seconds": self.own.time_limit_seconds})
        self._send(frame(self.own.model_dump_json(exclude={"time_limit_seconds"}).encode()))
        try:
            said, told = self._answer()
        except _EndedError as error:
            self._kill()
            raise OwnCodeError(f"{self.own.use.file} {error} while it was loaded") from error
        if said == "refused":
            self._kill()
            raise OwnCodeError(told)
        self.takes = told

    def _send(self, content: bytes) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died; that there is no answer says so
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
        what = "one record" if isinstance(self.own, OwnReader) else "its listing"
        seconds, key = self.own.time_limit_seconds, "(`time_limit_seconds`)"
        if status == -signal.SIGPROF:
            return f"took more than {seconds:g} s of processor time for {what} {key}"
        if status == -signal.SIGALRM:
            return f"gave nothing for {SLEEP_FACTOR * seconds:g} s {key}"
        return f"crashed (signal {-status})" if status < 0 else f"ended its process (status {status})"

    def _kill(self) -> None:
        if self._child is not None:
            kill_child(self._child)
            self._child = None


@contextlib.contextmanager
def _as_file(location: str) -> Iterator[str]:
    """The path, or that of a temporary copy with the same name where it does not lie on this machine."""
    path = as_path(location)
    if is_local(path):
        yield getattr(path, "path", "") or str(path)  # of a file:// URL what lies behind it
        return
    with tempfile.TemporaryDirectory(prefix="gristmill-read-") as folder:
        copy = Path(folder) / path.name
        with path.open("rb") as stream, copy.open("wb") as sink:
            shutil.copyfileobj(stream, sink, READ_BYTES)
        yield str(copy)


# What follows runs in the process.


def main() -> None:
    """Load the function, then answer requests until they end."""
    settings, requests, given = guarded.begin()
    answers = open(given.fileno(), "wb", buffering=BUFFER_BYTES, closefd=False)  # noqa: SIM115 - as long as the process
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # what asks for input would take the next request

    def answer(*values: Any, at_once: bool = True) -> None:
        answers.write(frame(pickle.dumps(values)))
        if at_once:
            answers.flush()

    own = Own.model_validate_json(read_frame(requests) or b"")
    limited = _Limited(settings["seconds"])
    try:
        with limited:
            call, takes = _reader(own) if settings["what"] == READ else _listing(own)
    except OwnCodeError as error:
        answer("refused", str(error))
        return
    answer("ready", takes)
    while (request := read_frame(requests)) is not None:
        about = json.loads(request)
        try:
            for each in (
                _read(own, call, takes, about, limited)
                if settings["what"] == READ
                else _list(own, call, takes, about, limited)
            ):
                answer(*each, at_once=about.get("at_once", False))
        except OwnCodeError as error:
            answer("refused", str(error))
        except OSError as error:
            answer("errno", error.errno, str(error))
        else:
            answer("end")


class _Limited:
    """Ends the process where what is done inside takes too long: processor time, or six times that by the clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        signal.setitimer(signal.ITIMER_REAL, SLEEP_FACTOR * self._seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _reader(own: Own) -> tuple[Callable[..., Any], str]:
    """The function, and whether it takes a `path` or a `stream`."""
    call, parameters = load_own(own, "path or stream"), _parameters(own)
    first = next((one for one in parameters if one.name not in own.options), None)
    if first is None or first.name in ("path", "stream"):
        return call, "path" if first is None else first.name
    hint = str(first.annotation)
    if "Path" in hint or "IO" in hint:
        return call, "path" if "Path" in hint else "stream"
    raise OwnCodeError(
        f"{own.use.place}: the first parameter of {own.use.name} is called {first.name!r}; call it "
        "`path` (the file as it is stored) or `stream` (its bytes, decompressed), or give it the type "
        "hint Path or BinaryIO"
    )


def _listing(own: Own) -> tuple[Callable[..., Any], str]:
    """The function, and whether it takes the source's `path`."""
    takes = "path" if any(one.name == "path" for one in _parameters(own)) else ""
    return load_own(own, *([takes] if takes else [])), takes


def _parameters(own: Own) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(load_function(own.use)).parameters.values())
    except (TypeError, ValueError):  # of a built-in one nothing is known
        return []


class _Decoded(io.RawIOBase):
    """A file's decompressed bytes as Python's libraries want them; damage is an early end."""

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
    own: Own, call: Callable[..., Any], takes: str, about: Mapping[str, Any], limited: _Limited
) -> Iterator[Answer]:
    """(`record`, stored bytes read so far, Read) of each record, and (`failed`, bytes, why) where it cannot go on."""
    reading, name = Reading(**about["reading"]), about["name"]
    if takes == "path":
        for number, found in enumerate(_items(own, call, Path(about["location"]), limited), start=1):
            yield _answer_of(own, reading, name, number, found, 0)
        return
    metered = Metered(as_path(about["location"]))
    with DecodedStream(metered, about["compression"]) as stream:
        raw = _Decoded(stream)
        for number, found in enumerate(_items(own, call, io.BufferedReader(raw), limited), start=1):
            if isinstance(found, _Failed):
                if raw.failure is not None:
                    raise raw.failure
                if stream.error is not None:
                    break
            yield _answer_of(own, reading, name, number, found, metered.read_bytes)
        if stream.error is not None:
            yield "failed", metered.read_bytes, str(stream.error)


@dataclass(frozen=True)
class _Failed:
    """Why a reader ended before its file did."""

    error: str


@dataclass(frozen=True)
class _Item:
    """What a reader yielded, and where."""

    value: Any
    place: str


def _items(own: Own, call: Callable[..., Any], given: Any, limited: _Limited) -> Iterator[_Item | _Failed]:
    try:
        with limited:
            made = call(given)
            if isinstance(made, str | bytes | Mapping) or not isinstance(made, Iterable):
                raise OwnCodeError(
                    f"{own.use.place}: {own.use.name} gives {_described(made)}, not records one by "
                    'one; write: yield {"text": ...}'
                )
            records = iter(made)
        while True:
            with limited:
                value = next(records, _END)
            if value is _END:
                return
            running = getattr(made, "gi_frame", None)
            yield _Item(value, f"{own.use.file}, line {running.f_lineno}" if running else own.use.place)
    except OwnCodeError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the function raises, its file ends there
        yield _Failed(one_line_of(own, error))


_END = object()


def one_line_of(own: Own, error: BaseException) -> str:
    """An error of the user's code in one line, with the line of the code."""
    return " ".join(blame(own.use, error).split())


def _answer_of(own: Own, reading: Reading, name: str, number: int, found: _Item | _Failed, read_bytes: int) -> Answer:
    if isinstance(found, _Failed):
        return "failed", read_bytes, found.error
    return "record", read_bytes, _record(own, reading, number, f"{name}#{number}", found)


def _record(own: Own, reading: Reading, number: int, locator: str, item: _Item) -> Record | Page | Rejected | Dropped:
    """A document of what a reader yielded, or why it is none."""
    value = item.value
    if isinstance(value, BaseException):
        said = f"{type(value).__name__}: {one_line(value)} ({item.place})"
        return Rejected(number, one_line_of(own, value) if value.__traceback__ else said)
    if not isinstance(value, Mapping):
        return Rejected(
            number,
            f"{item.place}: a record is a mapping with {reading.text!r}, not {_described(value)}",
            excerpt(str(value)),
        )
    try:
        made = from_row(reading, number, value, locator)
        if isinstance(made, Page):  # what it carries leaves this process
            return replace(made, metadata=json.loads(metadata_json(made.metadata)))
    except (TypeError, ValueError, RecursionError) as error:  # metadata that is no JSON
        return Rejected(number, f"{item.place}: the record cannot be kept: {one_line(error)}", excerpt(str(value)))
    return replace(made, error=f"{item.place}: {made.error}") if isinstance(made, Rejected) else made


def _list(
    own: Own, call: Callable[..., Any], takes: str, about: Mapping[str, Any], limited: _Limited
) -> Iterator[Answer]:
    """(`file`, entry) of each."""
    try:
        with limited:
            made = call(as_path(about["path"])) if takes else call()
            is_many = isinstance(made, Iterable) and not isinstance(made, str | bytes | Mapping)
            entries = list(made) if is_many else [made]
    except (Exception, SystemExit) as error:
        raise OwnCodeError(one_line_of(own, error)) from error
    if not is_many:
        raise OwnCodeError(f"{own.use.place}: {own.use.name} gives {_described(made)}, not paths one by one")
    for number, entry in enumerate(entries, start=1):
        yield "file", _entry(own, number, entry)


def _entry(own: Own, number: int, entry: Any) -> dict[str, Any]:
    if isinstance(entry, str | os.PathLike):
        return {"path": os.fspath(entry)}
    is_whole = isinstance(entry, Mapping) and isinstance(entry.get("path"), str) and set(entry) <= set(ENTRY_KEYS)
    if is_whole and isinstance(entry.get("size", 0), int) and isinstance(entry.get("name", ""), str):
        return dict(entry)
    raise OwnCodeError(
        f"{own.use.place}: entry {number} of {own.use.name} is {_described(entry)}; each is a path "
        "or URL, or a mapping with `path`, and if wanted `size` (bytes) and `name`"
    )


def _described(value: Any) -> str:
    """What a value is, and its beginning."""
    return "nothing" if value is None else f"{kind(value)} ({excerpt(repr(value))[:40]})"


if __name__ == "__main__":
    main()
