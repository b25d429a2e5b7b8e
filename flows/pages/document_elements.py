"""Elements that several pages share: measured values, verdicts, ids, excerpts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gristmill.dataprep.documents import QUARANTINE_REASON
from gristmill.dataprep.words.snippets import pattern_of
from gristmill.flows.pages.addresses import DOCUMENTS, address
from gristmill.flows.pages.page_elements import (
    Entry,
    Inline,
    Link,
    Links,
    Listing,
    Note,
    Span,
    value_text,
)

MOST_LINKS = 60
"""Rows and steps that are listed."""


def values_note(values: Iterable[tuple[str, object]]) -> Note | None:
    """Measured values in a row, each after its name; None without any."""
    line = joined(
        [f"{name} ", Span(value_text(value), "strong")] for name, value in values
    )
    return Note(line) if line else None


def joined(pieces: Iterable[Inline]) -> list[Inline]:
    """Pieces of a line with dots between them."""
    line: list[Inline] = []
    for piece in pieces:
        line += [" · ", piece] if line else [piece]
    return line


def listing_of(entries: Sequence[Entry], nothing: str) -> Listing | Note:
    """Entries, or a sentence if there are none."""
    return Listing("", entries) if entries else Note(nothing, "plain")


def verdict(kept: bool | None, step: str | None, reason: str | None) -> Inline:
    """A badge of whether a document was kept, and the step that dropped it (None: the
    one at hand) with its reason.
    """
    if kept:
        return Span("kept", "kept")
    is_quarantined = reason == QUARANTINE_REASON
    badge = Span("quarantined" if is_quarantined else "dropped", "dropped")
    cause = "" if reason is None or is_quarantined else f" {reason}"
    return [badge, f" by {step}" if step else "", ":" if cause else "", cause]


def id_span(document: str) -> Span:
    """The first digits of an id, with the whole of it where a pointer rests."""
    return Span(document[:16], "code", document)


def document_entry(
    document: str, title: str, facts: Iterable[Inline], text: Inline = ""
) -> Entry:
    """A listed document: its id, its locator or address, facts, and an excerpt."""
    note = joined([*facts, id_span(document)])
    return Entry(Link(title, address(DOCUMENTS, document)), text, note)


def marked(text: str, words: Sequence[str]) -> list[Span]:
    """Text with a mark on each of some words."""
    spans, position = list[Span](), 0
    for match in pattern_of(words).finditer(text):
        spans += [Span(text[position : match.start()]), Span(match[0], "hit")]
        position = match.end()
    return [span for span in [*spans, Span(text[position:])] if span.text]


def tabs(links: Mapping[str, str], current: str) -> Links:
    """Links (name -> address) between alike pages; none for a single page."""
    if len(links) < 2:
        return Links([])
    return Links(
        [name if name == current else Link(name, href) for name, href in links.items()]
    )


def numbered_links(
    label: str,
    numbers: Sequence[int],
    link: Callable[[int], str],
    most: int = MOST_LINKS,
) -> Links:
    """Links to the first rows or steps, and the number of those left out."""
    links: list[Inline] = [Link(str(number), link(number)) for number in numbers[:most]]
    if len(numbers) > most:
        links.append(Span(f"and {len(numbers) - most:,} more"))
    return Links(links, label)


def neighbours(
    kind: str, number: int, numbers: range, all_: Link, link: Callable[[int], str]
) -> Links:
    """Links to the row or step before this one, to all of them, and to the next one.

    Args:
        kind: `row` or `step`.
        number: of this one.
        numbers: all that there are.
        all_: the link between both.
        link: address of a number.
    """
    before, after = number - 1, number + 1
    links: list[Inline] = [all_]
    if before in numbers:
        links.insert(0, Link(f"← {kind} {before}", link(before), "prev"))
    if after in numbers:
        links.append(Link(f"{kind} {after} →", link(after), "next"))
    return Links(links)


def step_link(stage: str, step: int, use: str = "read") -> Inline:
    """A link to a step that has read something, or will."""
    link = Link(f"{stage} {step}", address("training", stage, step))
    return [link, " (to come)"] if use == "will read" else link


def example_link(example: str) -> Link:
    """A link to the page of an example."""
    return Link(id_span(example), address("examples", example))
