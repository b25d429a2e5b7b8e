"""Text extraction in a child process: a page or document file that hangs, crashes or
runs out of memory only loses itself.

The process works while its parent reads ahead: a window of pages is in flight, and
answers come back in order. If the process dies, the first page without an answer was
the cause, and a new process continues after it. A process that has handled many pages
may fail on a page that a fresh one handles, so a page that crashes or lacks memory is
retried in a fresh process: the result of a page depends on that page alone.
"""

from __future__ import annotations

import pickle
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from queue import SimpleQueue

from gristmill.dataprep.readers.guarded import (
    OUT_OF_MEMORY,
    EndedError,
    GuardedProcess,
)
from gristmill.dataprep.readers.html import Extracted, Options
from gristmill.dataprep.readers.records import (
    HTML,
    Dropped,
    Page,
    Read,
    Reading,
    Rejected,
    chosen_metadata,
    excerpt,
    make_record,
)
from gristmill.mixtures.yaml_text import join_first

WINDOW_PAGES = 64
WINDOW_BYTES = 8 << 20
"""Pages and bytes in flight before an answer is awaited."""
HELD_ITEMS = 1024
"""Items held after an unanswered page to keep the order."""
JOINT = "\n\n"
"""Between the pages or chapters of a file."""
SHOWN_PAGES = 10


class ExtractorError(ValueError):
    """The extracting process cannot be started."""


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
        seconds: CPU limit per page.
        memory_bytes: limit of the address space.
    """

    extractor: str
    options: Options
    seconds: float = 10.0
    memory_bytes: int = 2 << 30
    _pages: deque[_SentPage] = field(default_factory=deque)
    _bytes: int = 0
    _unsent: SimpleQueue[_SentPage | None] = field(default_factory=SimpleQueue)
    _answered: int = 0
    """Answers of the current process."""

    def __post_init__(self) -> None:
        self._late = f"timed out after {self.seconds:g} s"

    @property
    def is_full(self) -> bool:
        """True if an answer should be collected before the next page."""
        return len(self._pages) >= WINDOW_PAGES or self._bytes >= WINDOW_BYTES

    def submit(self, page: Page) -> None:
        """Submit a page; `collect` returns the answers in order."""
        content = pickle.dumps(replace(page, metadata={}))
        self._pages.append(_SentPage(content))
        self._bytes += len(content)
        if self._child is None:
            self.start()
        else:
            self._unsent.put(self._pages[-1])

    def collect(self) -> Extracted:
        """Wait for the answer to the oldest submitted page: its text, or an error."""
        while True:
            page = self._pages[0]
            try:
                answer: Extracted = pickle.loads(self.receive())
                self._forget()
                self._answered += 1
                return answer
            except EndedError as error:
                end = str(error)
            # Restart the process after the page that ended it, or with it if no fresh
            # process has tried it.
            is_retried = self._answered > 0 and not page.tried and end != self._late
            page.tried = True
            self.kill()
            if not is_retried:
                self._forget()
            if self._pages:
                self.start()
            if not is_retried:
                return Extracted(error=f"the extractor {end}")

    def kill(self) -> None:
        """Kill the process, if it runs, and end its writer."""
        if self._child is not None:
            self._child.kill()
            self._unsent.put(None)
            self._writer.join()
        super().kill()

    def _forget(self) -> None:
        self._bytes -= len(self._pages.popleft().content)

    def start(self) -> None:
        """Start the process, with the pages in flight.

        Raises:
            ExtractorError: it does not start.
        """
        settings = {
            "extractor": self.extractor,
            "options": self.options,
            "seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
        }
        memory = f"needed more than {self.memory_bytes >> 20} MiB of memory"
        self.begin(
            "gristmill.dataprep.readers.extraction_process",
            settings,
            {
                signal.SIGPROF: self._late,
                signal.SIGALRM: self._late,
                OUT_OF_MEMORY: memory,
            },
        )
        self._answered = 0
        self._unsent = SimpleQueue()
        for page in self._pages:
            self._unsent.put(page)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        try:
            self.receive()
        except EndedError as error:
            self.kill()
            raise ExtractorError(
                f"the extractor {self.extractor!r} could not be started; the log says "
                "why"
            ) from error

    def _write(self) -> None:
        """Send the pages of the current process, whose answers are read meanwhile."""
        for page in iter(self._unsent.get, None):
            self.send(page.content)


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
            yield from _settle(pending.popleft(), guard, reading)
    while pending:
        yield from _settle(pending.popleft(), guard, reading)


def _settle(item: Read, guard: Guard, reading: Reading) -> Iterator[Read]:
    if not isinstance(item, Page):
        yield item
        return
    answer = guard.collect()
    if answer.error:
        yield Rejected(item.number, answer.error, excerpt(item.content), item.part)
        return
    parts = [part.strip() for part in answer.parts]
    if answer.scanned:
        pages = join_first(answer.scanned, SHOWN_PAGES)
        error = (
            f"{item.locator}: {len(answer.scanned)} of {len(parts)} pages have no text "
            f"layer ({pages}); run OCR first, such as olmocr, docling or ocrmypdf, and "
            "read what it writes"
        )
        yield Rejected(item.number, error, part=item.part)
    metadata = {**answer.metadata, **item.metadata}
    if reading.split_parts and item.form != HTML:
        texts = [
            (number, f"{item.locator}#{number}", part)
            for number, part in enumerate(parts, start=1)
            if number not in answer.scanned
        ]
    elif answer.scanned and not any(parts):
        return
    else:
        texts = [(item.number, item.locator, JOINT.join(filter(None, parts)))]
        if len(parts) > 1:
            metadata["part_ends"] = part_ends(parts)
    chosen = chosen_metadata(metadata, reading)
    for number, locator, text in texts:
        record = make_record(number, locator, text, chosen, answer.replaced)
        if isinstance(record, Rejected | Dropped):
            record = replace(record, part=item.part)
        yield record


def part_ends(parts: Sequence[str]) -> list[int]:
    """End of each page or chapter in the text of them all, in characters."""

    def end_of(end: int, part: str) -> int:
        return end + len(part) + len(JOINT) * bool(part and end)

    return list(accumulate(parts, end_of, initial=0))[1:]
