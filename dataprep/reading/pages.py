"""Pages on their way to documents: sent to the extracting process ahead of time, taken back in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from gristmill.dataprep.reading.extraction_guard import Failed, Guard
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

HELD_ITEMS = 1024
"""Items behind an unanswered page that are held back to keep the order."""


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
