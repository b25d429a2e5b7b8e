"""Extracts text from pages in a process of its own, so that a page which hangs, crashes or eats memory loses only
itself.

The process works while its parent reads ahead: up to a window of pages is on its way, and answers come back in order.
Where it dies, the first page without an answer was the cause; a new process continues behind it. Since a process that
has seen many pages may fail where a fresh one would not, a page that crashes or lacks memory is tried again in a
fresh one: what comes out of a page depends on that page alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gristmill.dataprep.processes import kill_child
from gristmill.dataprep.reading import guarded
from gristmill.dataprep.reading.extraction import Extracted
from gristmill.dataprep.reading.guarded import LENGTH_BYTES, frame
from gristmill.dataprep.reading.records import (
    EMPTY,
    Dropped,
    Page,
    Read,
    Reading,
    Rejected,
    chosen_metadata,
    excerpt,
    make_record,
)

WINDOW_PAGES = 64
WINDOW_BYTES = 8 << 20
"""Pages and bytes that may be on their way before an answer is waited for."""
PIPE_BYTES = 1 << 20
HELD_ITEMS = 1024
"""Items behind an unanswered page that are held back to keep the order."""
SLEEP_FACTOR = 6
"""A page that does not use the processor ends after so many times its limit."""
START_SECONDS = 120.0
READ_BYTES = 1 << 16


class ExtractorError(RuntimeError):
    """The extracting process cannot be started at all."""


@dataclass(frozen=True)
class Limits:
    """What one page may take: processor seconds, and bytes of address space."""

    seconds: float = 10.0
    memory_bytes: int = 2 << 30


@dataclass(frozen=True)
class Failed:
    """Why a page has no text."""

    error: str


@dataclass
class _Sent:
    content: bytes
    tried: bool = False
    """Whether it has ended a process before."""


@dataclass
class Guard:
    """One extracting process and the pages that are on their way to it.

    To be used by the thread that made it (Linux ends the process with that thread). As a context manager it leaves no
    process behind.

    Attributes:
        extractor: a name of EXTRACTORS, or `module:function`.
        options: see ExtractOptions.
        limits: of one page.
    """

    extractor: str
    options: Mapping[str, Any]
    limits: Limits = Limits()
    _child: subprocess.Popen[bytes] | None = None
    _pages: deque[_Sent] = field(default_factory=deque)
    _bytes: int = 0
    _unwritten: bytearray = field(default_factory=bytearray)
    _unread: bytearray = field(default_factory=bytearray)
    _answered: int = 0
    """By the process that runs now."""

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()

    @property
    def is_full(self) -> bool:
        """Whether an answer should be taken before the next page is handed over."""
        return len(self._pages) >= WINDOW_PAGES or self._bytes >= WINDOW_BYTES

    def submit(self, page: Page) -> None:
        """Hand a page over; its answer comes from `collect` after those of all pages before it."""
        about = {"encoding": page.encoding, "charset": page.charset, "errors": page.errors}
        self._pages.append(_Sent(frame(about) + frame(page.content)))
        self._bytes += len(self._pages[-1].content)
        if self._child is None:
            self._start()
        else:
            self._unwritten += self._pages[-1].content
            self._write()

    def collect(self) -> Extracted | Failed:
        """The answer to the oldest page that was handed over, once it is there."""
        while True:
            answer = self._take_answer()
            if answer is not None and "memory" not in answer:
                self._forget()
                self._answered += 1
                return Failed(answer["error"]) if "error" in answer else Extracted(**answer)
            if answer is not None:
                error = f"extraction needed more than {self.limits.memory_bytes >> 20} MiB of memory"
            elif (state := self._exchange(SLEEP_FACTOR * self.limits.seconds)) == "alive":
                continue
            else:
                error = self._timed_out() if state == "asleep" else self._obituary()
            if (failed := self._replace(error)) is not None:
                return failed

    def _replace(self, error: str) -> Failed | None:
        """Start over behind the page that ended the process, or with it where a fresh process has not had it."""
        page = self._pages[0]
        again = self._answered > 0 and not page.tried and error != self._timed_out()
        page.tried = True
        self._kill()
        if not again:
            self._forget()
        if self._pages:
            self._start()
        return None if again else Failed(error)

    def _forget(self) -> None:
        self._bytes -= len(self._pages.popleft().content)

    def _timed_out(self) -> str:
        return f"extraction timed out after {self.limits.seconds:g} s"

    def _obituary(self) -> str:
        assert self._child is not None
        status = self._child.wait()
        if status == -signal.SIGPROF:
            return self._timed_out()
        return f"the extractor crashed (signal {-status})" if status < 0 else f"the extractor ended (status {status})"

    def _start(self) -> None:
        settings = {
            "extractor": self.extractor,
            "options": dict(self.options),
            "seconds": self.limits.seconds,
            "memory_bytes": self.limits.memory_bytes,
        }
        self._child = guarded.start("gristmill.dataprep.reading.extraction", settings, bufsize=0)
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            with contextlib.suppress(OSError, AttributeError):  # a larger pipe is a kindness of Linux, not a need
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._answered = 0
        self._unwritten = bytearray(b"".join(page.content for page in self._pages))
        self._unread = bytearray()
        while self._take_answer() is None:
            if self._exchange(START_SECONDS) != "alive":
                self._kill()
                raise ExtractorError(f"the extractor {self.extractor!r} could not be started; the log says why")

    def _kill(self) -> None:
        if self._child is not None:
            kill_child(self._child)
            self._child = None

    def _take_answer(self) -> dict[str, Any] | None:
        if len(self._unread) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES], "little")
        if len(self._unread) < end:
            return None
        answer: dict[str, Any] = json.loads(bytes(self._unread[LENGTH_BYTES:end]))
        del self._unread[:end]
        return answer

    def _exchange(self, seconds: float) -> Literal["alive", "dead", "asleep"]:
        """Write and read what is possible; `asleep` where neither was for so long."""
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        poll = select.poll()
        poll.register(self._child.stdout, select.POLLIN)
        if self._unwritten:
            poll.register(self._child.stdin, select.POLLOUT)
        events = dict(poll.poll(1000 * seconds))
        if self._child.stdin.fileno() in events:
            self._write()
        if self._child.stdout.fileno() not in events:
            return "alive" if events else "asleep"
        read = self._child.stdout.read(READ_BYTES)
        self._unread += read or b""
        return "alive" if read else "dead"

    def _write(self) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            written = self._child.stdin.write(self._unwritten[:PIPE_BYTES])
        except BrokenPipeError:  # it died; the end of its answers says so
            self._unwritten.clear()
            return
        del self._unwritten[: written or 0]


def extract_pages(items: Iterable[Read], guard: Guard, reading: Reading) -> Iterator[Read]:
    """Replace every page by its document or by why there is none; everything else passes, and the order stays.

    Args:
        items: what a reader yields; it is read ahead by a bounded number of pages.
        guard: where pages are sent to.
        reading: says which metadata is kept.
    """
    held: deque[Read] = deque()
    for item in items:
        if not held and not isinstance(item, Page):
            yield item
            continue
        held.append(item)
        if isinstance(item, Page):
            guard.submit(item)
        while held and (not isinstance(held[0], Page) or guard.is_full or len(held) >= HELD_ITEMS):
            yield _settle(held.popleft(), guard, reading)
    while held:
        yield _settle(held.popleft(), guard, reading)


def _settle(item: Read, guard: Guard, reading: Reading) -> Read:
    if not isinstance(item, Page):
        return item
    answer = guard.collect()
    if isinstance(answer, Failed):
        return Rejected(item.number, answer.error, excerpt(item.content), item.part)
    if not answer.text:
        return Dropped(item.number, EMPTY, item.locator, item.part)
    metadata = chosen_metadata({**answer.metadata, **item.metadata}, reading)
    made = make_record(item.number, item.locator, answer.text, metadata, answer.replaced)
    return Rejected(made.number, made.error, made.excerpt, item.part) if isinstance(made, Rejected) else made
