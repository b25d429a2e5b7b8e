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
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from gristmill.dataprep.readers.guarded import (
    LENGTH_BYTES,
    SLEEP_FACTOR,
    GuardedProcess,
    frame,
)
from gristmill.dataprep.readers.html import ExtractorAnswer, Options
from gristmill.dataprep.readers.records import (
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
START_SECONDS = 120.0
READ_BYTES = 1 << 16


class ExtractorError(ValueError):
    """The extracting process cannot be started."""


@dataclass(frozen=True)
class Limits:
    """Limits per page: CPU seconds, and bytes of address space."""

    seconds: float = 10.0
    memory_bytes: int = 2 << 30


@dataclass
class _SentPage:
    content: bytes
    tried: bool = False
    """True if it has already ended a process."""


@dataclass
class Guard(GuardedProcess):
    """An extracting process and the pages in flight.

    Attributes:
        extractor: name in EXTRACTORS, or `module:function`.
        options: see ExtractOptions.
        limits: per page.
    """

    extractor: str
    options: Options
    limits: Limits = Limits()
    _pages: deque[_SentPage] = field(default_factory=deque)
    _bytes: int = 0
    _unwritten: bytearray = field(default_factory=bytearray)
    _unread: bytearray = field(default_factory=bytearray)
    _answered: int = 0
    """Answers of the current process."""

    def __post_init__(self) -> None:
        self._late = f"timed out after {self.limits.seconds:g} s"

    @property
    def is_full(self) -> bool:
        """True if an answer should be collected before the next page."""
        return len(self._pages) >= WINDOW_PAGES or self._bytes >= WINDOW_BYTES

    def submit(self, page: Page) -> None:
        """Submit a page; `collect` returns the answers in order."""
        header = frame(
            {"encoding": page.encoding, "charset": page.charset, "errors": page.errors}
        )
        self._pages.append(_SentPage(header + frame(page.content)))
        self._bytes += len(self._pages[-1].content)
        if self._child is None:
            self._start()
        else:
            self._unwritten += self._pages[-1].content
            self._write()

    def collect(self) -> ExtractorAnswer:
        """Wait for the answer to the oldest submitted page: its text, or an error."""
        while True:
            answer = self._take_answer()
            if answer is not None and "memory" not in answer:
                self._forget()
                self._answered += 1
                return answer
            if answer is not None:
                end = f"needed more than {self.limits.memory_bytes >> 20} MiB of memory"
            elif (
                state := self._exchange(SLEEP_FACTOR * self.limits.seconds)
            ) == "alive":
                continue
            else:
                end = self._late if state == "asleep" else self.describe_end()
            # Restart the process after the page that ended it, or with it if no fresh
            # process has tried it.
            page = self._pages[0]
            is_retried = self._answered > 0 and not page.tried and end != self._late
            page.tried = True
            self.kill()
            if not is_retried:
                self._forget()
            if self._pages:
                self._start()
            if not is_retried:
                return {"error": f"the extractor {end}"}

    def _forget(self) -> None:
        self._bytes -= len(self._pages.popleft().content)

    def _start(self) -> None:
        settings = {
            "extractor": self.extractor,
            "options": self.options,
            "seconds": self.limits.seconds,
            "memory_bytes": self.limits.memory_bytes,
        }
        self.begin(
            "gristmill.dataprep.readers.html",
            settings,
            {signal.SIGPROF: self._late},
            bufsize=0,
        )
        for pipe in self.pipes:
            os.set_blocking(pipe.fileno(), False)
            # a larger pipe is optional, and specific to Linux
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._answered = 0
        self._unwritten = bytearray(b"".join(page.content for page in self._pages))
        self._unread = bytearray()
        while self._take_answer() is None:
            if self._exchange(START_SECONDS) != "alive":
                self.kill()
                raise ExtractorError(
                    f"the extractor {self.extractor!r} could not be "
                    "started; the log says why"
                )

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
        requests, answers = self.pipes
        poll = select.poll()
        poll.register(answers, select.POLLIN)
        if self._unwritten:
            poll.register(requests, select.POLLOUT)
        events = dict(poll.poll(1000 * seconds))
        if requests.fileno() in events:
            self._write()
        if answers.fileno() not in events:
            return "alive" if events else "asleep"
        chunk = answers.read(READ_BYTES)
        self._unread += chunk or b""
        return "alive" if chunk else "dead"

    def _write(self) -> None:
        try:
            written = self.pipes[0].write(self._unwritten[:PIPE_BYTES])
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
    if "error" in answer:
        return Rejected(item.number, answer["error"], excerpt(item.content), item.part)
    if not answer["text"]:
        return Dropped(item.number, EMPTY, item.locator, item.part)
    metadata = chosen_metadata({**answer["metadata"], **item.metadata}, reading)
    record = make_record(
        item.number, item.locator, answer["text"], metadata, answer["replaced"]
    )
    return replace(record, part=item.part) if isinstance(record, Rejected) else record
