"""Pages as Markdown, for a pull request, a wiki or the Prefect UI: without what only a
server has.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

from gristmill.flows.pages.page_elements import (
    Details,
    Figure,
    Heading,
    Inline,
    Listing,
    Note,
    Page,
    Part,
    Table,
    Text,
    inline_text,
)

SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def markdown_page(page: Page, has_pictures: bool = False) -> str:
    """A page in GitHub's Markdown. Forges list the headings themselves, and show no
    embedded pictures, whose numbers are in the tables beside them.
    """
    blocks = [
        f"# {plain(page.title)}",
        plain(page.note),
        ", ".join(f"{plain(name)} **{plain(value)}**" for name, value in page.cards),
        _blocks(page.parts, has_pictures),
    ]
    for section in page.sections:
        text = _blocks(section.parts, has_pictures)
        if text:  # a section of pictures has none
            blocks += [f"## {plain(section.title)}", text]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _markdown(part: Part, has_pictures: bool) -> str:
    """One part; empty for what only a server has, and for a table without rows."""
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
        case Figure(svg, caption) if has_pictures:
            data = base64.b64encode(svg.encode()).decode()
            return f"![{plain(caption)}](data:image/svg+xml;base64,{data})"
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
        case Details(summary, parts):
            return f"**{plain(summary)}**\n\n{_blocks(parts, has_pictures)}".rstrip()
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


def _blocks(parts: Sequence[Part], has_pictures: bool) -> str:
    blocks = (_markdown(part, has_pictures) for part in parts)
    return "\n\n".join(filter(None, blocks))
