"""Text extraction in a child process: a page that hangs, crashes or runs out of memory
only loses itself.

The process works while its parent reads ahead: a window of pages is in flight, and
answers come back in order. If the process dies, the first page without an answer was
the cause, and a new process continues after it. A process that has handled many pages
may fail on a page that a fresh one handles, so a page that crashes or lacks memory is
retried in a fresh process: the result of a page depends on that page alone.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from gristmill.core.processes import kill_child
from gristmill.dataprep.reading import guarded
from gristmill.dataprep.reading.extraction import (
    Extracted,
    ExtractorAnswer,
    ExtractorSettings,
    Options,
    PageHeader,
)
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
"""Pages and bytes in flight before an answer is awaited."""
PIPE_BYTES = 1 << 20
HELD_ITEMS = 1024
"""Items held after an unanswered page to keep the order."""
SLEEP_FACTOR = 6
"""Wall-clock limit of a page without CPU use, as a multiple of its CPU limit."""
START_SECONDS = 120.0
READ_BYTES = 1 << 16


class ExtractorError(RuntimeError):
    """The extracting process cannot be started."""


@dataclass(frozen=True)
class Limits:
    """Limits per page: CPU seconds, and bytes of address space."""

    seconds: float = 10.0
    memory_bytes: int = 2 << 30


@dataclass(frozen=True)
class Failed:
    """Error in place of a page's text."""

    error: str


@dataclass
class _SentPage:
    content: bytes
    tried: bool = False
    """True if it has already ended a process."""


@dataclass
class Guard:
    """An extracting process and the pages in flight.

    To be used by the thread that created it (Linux ends the process with that thread).
    The context manager kills the process.

    Attributes:
        extractor: name in EXTRACTORS, or `module:function`.
        options: see ExtractOptions.
        limits: per page.
    """

    extractor: str
    options: Options
    limits: Limits = Limits()
    _child: subprocess.Popen[bytes] | None = None
    _pages: deque[_SentPage] = field(default_factory=deque)
    _bytes: int = 0
    _unwritten: bytearray = field(default_factory=bytearray)
    _unread: bytearray = field(default_factory=bytearray)
    _answered: int = 0
    """Answers of the current process."""

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()

    @property
    def is_full(self) -> bool:
        """True if an answer should be collected before the next page."""
        return len(self._pages) >= WINDOW_PAGES or self._bytes >= WINDOW_BYTES

    def submit(self, page: Page) -> None:
        """Submit a page; `collect` returns the answers in order."""
        page_header = PageHeader(
            encoding=page.encoding, charset=page.charset, errors=page.errors
        )
        self._pages.append(_SentPage(frame(page_header) + frame(page.content)))
        self._bytes += len(self._pages[-1].content)
        if self._child is None:
            self._start()
        else:
            self._unwritten += self._pages[-1].content
            self._write()

    def collect(self) -> Extracted | Failed:
        """Wait for the answer to the oldest submitted page."""
        while True:
            answer = self._take_answer()
            if answer is not None and "memory" not in answer:
                self._forget()
                self._answered += 1
                return (
                    Failed(answer["error"])
                    if "error" in answer
                    else Extracted(
                        answer["text"], answer["metadata"], answer["replaced"]
                    )
                )
            if answer is not None:
                error = (
                    "extraction needed more than "
                    f"{self.limits.memory_bytes >> 20} MiB of memory"
                )
            elif (
                state := self._exchange(SLEEP_FACTOR * self.limits.seconds)
            ) == "alive":
                continue
            else:
                error = self._timed_out() if state == "asleep" else self._obituary()
            if (failed := self._replace(error)) is not None:
                return failed

    def _replace(self, error: str) -> Failed | None:
        """Restart the process after the page that ended it, or with it if no fresh
        process has tried it.
        """
        page = self._pages[0]
        is_retried = (
            self._answered > 0 and not page.tried and error != self._timed_out()
        )
        page.tried = True
        self._kill()
        if not is_retried:
            self._forget()
        if self._pages:
            self._start()
        return None if is_retried else Failed(error)

    def _forget(self) -> None:
        self._bytes -= len(self._pages.popleft().content)

    def _timed_out(self) -> str:
        return f"extraction timed out after {self.limits.seconds:g} s"

    def _obituary(self) -> str:
        assert self._child is not None
        status = self._child.wait()
        if status == -signal.SIGPROF:
            return self._timed_out()
        return (
            f"the extractor crashed (signal {-status})"
            if status < 0
            else f"the extractor ended (status {status})"
        )

    def _start(self) -> None:
        settings = ExtractorSettings(
            extractor=self.extractor,
            options=self.options,
            seconds=self.limits.seconds,
            memory_bytes=self.limits.memory_bytes,
        )
        self._child = guarded.start(
            "gristmill.dataprep.reading.extraction", settings, bufsize=0
        )
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            # a larger pipe is optional, and specific to Linux
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._answered = 0
        self._unwritten = bytearray(b"".join(page.content for page in self._pages))
        self._unread = bytearray()
        while self._take_answer() is None:
            if self._exchange(START_SECONDS) != "alive":
                self._kill()
                raise ExtractorError(
                    f"the extractor {self.extractor!r} could not be "
                    "started; the log says why"
                )

    def _kill(self) -> None:
        if self._child is not None:
            kill_child(self._child)
            self._child = None

    def _take_answer(self) -> ExtractorAnswer | None:
        if len(self._unread) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES], "little")
        if len(self._unread) < end:
            return None
        answer: ExtractorAnswer = json.loads(bytes(self._unread[LENGTH_BYTES:end]))
        del self._unread[:end]
        return answer

    def _exchange(self, seconds: float) -> Literal["alive", "dead", "asleep"]:
        """Write and read without blocking; `asleep` if neither was possible for so
        long.
        """
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
        chunk = self._child.stdout.read(READ_BYTES)
        self._unread += chunk or b""
        return "alive" if chunk else "dead"

    def _write(self) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        try:
            written = self._child.stdin.write(self._unwritten[:PIPE_BYTES])
        except BrokenPipeError:
            # the process died, which the end of its answers reports
            self._unwritten.clear()
            return
        del self._unwritten[: written or 0]


def extract_pages(
    items: Iterable[Read], guard: Guard, reading: Reading
) -> Iterator[Read]:
    """Replace each page by its document or by its error; other items pass, in order.

    Args:
        items: of a reader; read ahead by a bounded number of pages.
        guard: process for the pages.
        reading: settings that select metadata.
    """
    pending: deque[Read] = deque()
    for item in items:
        if not pending and not isinstance(item, Page):
            yield item
            continue
        pending.append(item)
        if isinstance(item, Page):
            guard.submit(item)
        while pending and (
            not isinstance(pending[0], Page)
            or guard.is_full
            or len(pending) >= HELD_ITEMS
        ):
            yield _settle(pending.popleft(), guard, reading)
    while pending:
        yield _settle(pending.popleft(), guard, reading)


def _settle(item: Read, guard: Guard, reading: Reading) -> Read:
    if not isinstance(item, Page):
        return item
    answer = guard.collect()
    if isinstance(answer, Failed):
        return Rejected(item.number, answer.error, excerpt(item.content), item.part)
    if not answer.text:
        return Dropped(item.number, EMPTY, item.locator, item.part)
    metadata = chosen_metadata({**answer.metadata, **item.metadata}, reading)
    record = make_record(
        item.number, item.locator, answer.text, metadata, answer.replaced
    )
    return (
        Rejected(record.number, record.error, record.excerpt, item.part)
        if isinstance(record, Rejected)
        else record
    )
