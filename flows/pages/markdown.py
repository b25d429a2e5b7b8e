"""Pages as Markdown, for a pull request or a wiki: without pictures and without what
only a server has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from gristmill.flows.pages.page_elements import (
    Details,
    Fields,
    Heading,
    Inline,
    Listing,
    Note,
    Page,
    Part,
    Sides,
    Table,
    Text,
    inline_text,
)

SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def markdown_page(page: Page) -> str:
    """A page in GitHub's Markdown. Forges list the headings themselves."""
    blocks = [
        f"# {plain(page.title)}",
        plain(page.note),
        ", ".join(f"{plain(name)} **{plain(value)}**" for name, value in page.cards),
        _blocks(page.parts),
    ]
    for section in page.sections:
        text = _blocks(section.parts)
        if text:  # a section of pictures has none
            blocks += [f"## {plain(section.title)}", text]
    return "\n\n".join(filter(None, blocks)) + "\n"


def markdown(part: Part) -> str:
    """One part; empty for a picture, whose numbers stand in the table beside it, and
    for a table without rows.
    """
    write = _WRITERS.get(type(part))
    return "" if write is None else write(part)


def plain(value: Inline) -> str:
    """Text that Markdown shows as it is, on one line; text between `backticks` is
    code.
    """
    pieces = " ".join(inline_text(value).split()).split("`")
    if len(pieces) % 2 == 0:  # a lone backtick is text
        return SPECIAL.sub(r"\\\1", "`".join(pieces))
    return "".join(
        f"`{piece}`" if number % 2 else SPECIAL.sub(r"\\\1", piece)
        for number, piece in enumerate(pieces)
    )


def _blocks(parts: Sequence[Part]) -> str:
    return "\n\n".join(filter(None, map(markdown, parts)))


def _table(part: Table) -> str:
    if not part.rows:
        return ""
    sides = [
        "---:" if column in part.numeric else "---"
        for column in range(len(part.header))
    ]
    rows = [list(map(plain, part.header)), sides]
    rows += [list(map(plain, row)) for row in part.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _listing(part: Listing) -> str:
    lines = [
        f"- **{plain(entry.title)}**: {plain(entry.text)}" for entry in part.entries
    ]
    return "\n".join([f"**{plain(part.title)}**", "", *lines]) if lines else ""


def _text(part: Text) -> str:
    text = "".join(piece.text for piece in part.spans)
    longest = max((len(ticks) for ticks in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _sides(part: Sides) -> str:
    return "\n\n".join(
        f"**{plain(title)}**\n\n{_blocks(parts)}" for title, parts in part.columns
    )


def _details(part: Details) -> str:
    return (
        ""
        if part.long
        else f"**{plain(part.summary)}**\n\n{_blocks(part.parts)}".rstrip()
    )


def _fields(part: Fields) -> str:
    return "\n".join(f"- {plain(name)}: {plain(value)}" for name, value in part.rows)


_WRITERS: dict[type, Callable[[Any], str]] = {
    Note: lambda part: plain(part.text),
    Heading: lambda part: f"### {plain(part.text)}",
    Table: _table,
    Listing: _listing,
    Text: _text,
    Sides: _sides,
    Details: _details,
    Fields: _fields,
}
