"""What a page is made of: sections of tables, pictures, notes and texts, as plain data, and the page as HTML.

Whatever writes a page computes these parts; templates/ has what each looks like. Templates escape every value, so that
no part can bring tags of its own, except the pictures, which are drawn here.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gristmill.flows.report.column_glossary import MEANINGS
from gristmill.flows.report.pictures import ON_DARK

if TYPE_CHECKING:
    from jinja2 import Environment

LIGHT = {
    "paper": "#ffffff",
    "ink": "#111827",
    "soft": "#6b7280",
    "line": "#e5e7eb",
    "edge": "#9ca3af",
    "accent": "#2563eb",
    "plain": "#f9fafb",
    "trained": "#bbf7d0",
    "removed": "#fee2e2",
    "added": "#dcfce7",
}
DARK = {
    "paper": "#111827",
    "ink": "#f3f4f6",
    "soft": "#9ca3af",
    "line": "#374151",
    "edge": "#6b7280",
    "accent": "#60a5fa",
    "plain": "#1f2937",
    "trained": "#14532d",
    "removed": "#5b1a1a",
    "added": "#14452a",
    **{f"series-{number}": colour for number, colour in enumerate(ON_DARK)},
}
"""Variables of the page's style, in either mode."""
LONG_NAME = 16
"""Characters that a column of a table always has room for."""
BREAKS = re.compile(r"(?<=[/_])(?=[^\s/_])|(?<=\.)(?=[A-Za-z])")
"""Where long names of rules, files and keys may be cut, rather than in the middle of a word."""


@dataclass(frozen=True)
class Note:
    """A sentence or two beneath a heading; what stands in `backticks` is shown as code."""

    text: str
    kind: ClassVar = "note"


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    text: str
    kind: ClassVar = "heading"


@dataclass(frozen=True)
class Table:
    """A table; columns in `numeric` are set to the right, and their cells are never broken."""

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    numeric: Collection[int] = ()
    meanings: Mapping[str, str] = field(default_factory=dict)
    """What columns hold, where it is not what `column_glossary.py` says."""
    kind: ClassVar = "table"

    def meaning(self, column: str) -> str:
        """What a column holds; empty where its name says it."""
        return self.meanings.get(column) or MEANINGS.get(column, "")


@dataclass(frozen=True)
class Figure:
    """A picture, from pictures.py, with a caption."""

    svg: str
    caption: str
    kind: ClassVar = "figure"


@dataclass(frozen=True)
class Listing:
    """Short texts under a title: (what stands before, where it is from, the text)."""

    title: str
    rows: Sequence[tuple[str, str, str]]
    kind: ClassVar = "listing"


@dataclass(frozen=True)
class Text:
    """A text as it is, line by line: pieces, each with its mark: `strong`, `trained`, `masked`, `removed`, `added`, or
    none.
    """

    pieces: Sequence[tuple[str, str]]
    columns: bool = False
    """Print it small and in columns."""
    kind: ClassVar = "text"


@dataclass(frozen=True)
class Sides:
    """Texts beside each other, each with what stands above it; on narrow screens one beneath the other."""

    texts: Sequence[tuple[str, Text]]
    kind: ClassVar = "sides"


@dataclass(frozen=True)
class Details:
    """Parts that are opened by who asks for them."""

    summary: str
    parts: Sequence[Part]
    long: bool = False
    """They are too long for where nothing can be folded: in Markdown they are left out."""
    kind: ClassVar = "details"


Part = Note | Heading | Table | Figure | Listing | Text | Sides | Details


@dataclass(frozen=True)
class Section:
    """What a page says of one subject: a title, which the page's contents list, and parts."""

    title: str
    parts: Sequence[Part]


def definitions(sections: Sequence[Section]) -> Section | None:
    """What the columns of all these tables hold, in one list: for where no pointer can rest on a name."""
    rows = dict.fromkeys(
        (name, meaning)
        for section in sections
        for table in _tables(section.parts)
        if table.rows
        for name in table.header
        if (meaning := table.meaning(name))
    )
    return (
        Section(
            "What the columns hold",
            [Details("All columns of these tables", [Table(["column", "holds"], sorted(rows))])],
        )
        if rows
        else None
    )


def _tables(parts: Sequence[Part]) -> Iterator[Table]:
    for part in parts:
        if isinstance(part, Table):
            yield part
        elif isinstance(part, Details):
            yield from _tables(part.parts)


def page(
    title: str,
    sections: Sequence[Section],
    *,
    note: str = "",
    cards: Sequence[tuple[str, str]] = (),
    parts: Sequence[Part] = (),
    contents: bool = False,
) -> str:
    """A whole file of HTML: nothing in it is loaded from elsewhere, and browsers run nothing but the script by which
    tables are sorted and searched.

    Args:
        title: of the page.
        sections: in their order.
        note: a line beneath the title.
        cards: (name, value) of the numbers that people ask for first.
        parts: what stands before the first section.
        contents: link to the sections at the top.
    """
    return (
        templates()
        .get_template("page.html.jinja")
        .render(
            title=title,
            note=note,
            cards=cards,
            contents=contents,
            parts=parts,
            sections=sections,
            light=LIGHT,
            dark=DARK,
            script=tables_script(),
            policy=content_policy(),
        )
    )


@cache
def tables_script() -> str:
    """What sorts and searches the tables of a page in the browser."""
    return (Path(__file__).parent / "templates" / "tables.js").read_text(encoding="utf-8")


@cache
def content_policy() -> str:
    """What browsers may load and run of a page: no file, and no script but `tables_script`, by its hash."""
    digest = b64encode(hashlib.sha256(tables_script().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"


@cache
def templates() -> Environment:
    """The templates of this folder."""
    return environment(Path(__file__).parent / "templates")


def environment(*folders: Path) -> Environment:
    """The templates of some folders. They escape every value that they show."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["breakable"] = breakable
    found.globals["meanings"] = MEANINGS
    return found


def breakable(value: object) -> list[str]:
    """A text in pieces, between which a line may end: behind the punctuation of its long names."""
    pieces = [""]
    for word in re.split(r"(\s+)", str(value)):
        first, *more = BREAKS.split(word) if len(word) > LONG_NAME else [word]
        pieces[-1] += first
        pieces += more
    return pieces
