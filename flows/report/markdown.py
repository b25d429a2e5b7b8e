"""The parts of a page as Markdown, for a pull request or a wiki: what `page_elements.py` is, without its pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from gristmill.flows.report.page_elements import (
    Details,
    Figure,
    Heading,
    Listing,
    Note,
    Part,
    Section,
    Sides,
    Table,
    Text,
)

SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def markdown_page(
    title: str,
    sections: Sequence[Section],
    *,
    note: str = "",
    cards: Sequence[tuple[str, str]] = (),
    parts: Sequence[Part] = (),
    contents: bool = False,
) -> str:
    """A page as a forge shows it (GitHub's Markdown): tables stay tables, what a click opens is open.

    Args:
        title, sections, note, cards, parts: as `parts.page` has them.
        contents: nothing: forges list the headings themselves.
    """
    found = [
        f"# {plain(title)}",
        plain(note),
        ", ".join(f"{plain(name)} **{plain(value)}**" for name, value in cards),
        *map(markdown, parts),
    ]
    for section in sections:
        if texts := list(filter(None, map(markdown, section.parts))):  # none where there are pictures alone
            found += [f"## {plain(section.title)}", *texts]
    return "\n\n".join(filter(None, found)) + "\n"


def markdown(part: Part) -> str:
    """One part; empty for a picture, whose numbers stand in the table beside it, and for a table without rows."""
    write: Callable[[Any], str] = _WRITERS[type(part)]
    return write(part)


def plain(text: object) -> str:
    """A text that Markdown shows as it is, on one line; what stands in `backticks` is code."""
    pieces = " ".join(str(text).split()).split("`")
    if len(pieces) % 2 == 0:  # a lone backtick is one
        return SPECIAL.sub(r"\\\1", "`".join(pieces))
    return "".join(f"`{piece}`" if place % 2 else SPECIAL.sub(r"\\\1", piece) for place, piece in enumerate(pieces))


def _table(part: Table) -> str:
    if not part.rows:
        return ""
    sides = ["---:" if place in part.numeric else "---" for place in range(len(part.header))]
    rows = [list(map(plain, part.header)), sides, *(list(map(plain, row)) for row in part.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _listing(part: Listing) -> str:
    rows = [f"- **{plain(mark)}** {plain(place)}: {plain(text)}" for mark, place, text in part.rows]
    return "\n".join([f"**{plain(part.title)}**", "", *rows]) if rows else ""


def _text(part: Text) -> str:
    text = "".join(piece for piece, _ in part.pieces)
    fence = "`" * max([3, *(len(found) + 1 for found in re.findall(r"`{3,}", text))])
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _sides(part: Sides) -> str:
    return "\n\n".join(f"**{plain(title)}**\n\n{_text(text)}" for title, text in part.texts)


def _details(part: Details) -> str:
    return "" if part.long else "\n\n".join([f"**{plain(part.summary)}**", *filter(None, map(markdown, part.parts))])


_WRITERS: dict[type, Callable[[Any], str]] = {
    Note: lambda part: plain(part.text),
    Heading: lambda part: f"### {plain(part.text)}",
    Table: _table,
    Figure: lambda part: "",
    Listing: _listing,
    Text: _text,
    Sides: _sides,
    Details: _details,
}
