"""Pages as Markdown, for a pull request or a wiki: without pictures and without what
only a server has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
    """One part; empty for a picture, whose numbers are in the table beside it, and
    for a table without rows.
    """
    match part:
        case Note():
            return plain(part.text)
        case Heading():
            return f"### {plain(part.text)}"
        case Table(header, rows) if rows:
            sides = [
                "---:" if column in part.numeric else "---"
                for column in range(len(header))
            ]
            lines = [list(map(plain, row)) for row in (header, *rows)]
            lines.insert(1, sides)
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case Listing(title, entries) if entries:
            entries_text = [
                f"- **{plain(entry.title)}**: {plain(entry.text)}" for entry in entries
            ]
            return "\n".join([f"**{plain(title)}**", "", *entries_text])
        case Text(spans):
            text = "".join(span.text for span in spans)
            runs = (len(ticks) for ticks in re.findall(r"`{3,}", text))
            fence = "`" * (max(runs, default=2) + 1)
            return f"{fence}\n{text.rstrip()}\n{fence}"
        case Sides(columns):
            return "\n\n".join(
                f"**{plain(title)}**\n\n{_blocks(parts)}" for title, parts in columns
            )
        case Details(summary, parts, long) if not long:
            return f"**{plain(summary)}**\n\n{_blocks(parts)}".rstrip()
        case Fields(fields):
            return "\n".join(
                f"- {plain(name)}: {plain(value)}" for name, value in fields
            )
    return ""


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
