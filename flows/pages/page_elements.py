"""Elements of a page as plain data: sections of notes, tables, pictures, texts, lists
and forms.

`page_html.py` writes them as HTML, `markdown.py` as Markdown. Templates escape every
value, so that no element can add tags, except the pictures of `pictures.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

from gristmill.flows.pages.column_glossary import MEANINGS

Value = TypeVar("Value")
ByName: TypeAlias = Mapping[str, Value]
Tone: TypeAlias = Literal["note", "plain", "warning"]
Mark: TypeAlias = Literal[
    "",
    "strong",
    "code",
    "hit",
    "removed",
    "added",
    "trained",
    "masked",
    "plain",
    "kept",
    "dropped",
    "good",
    "bad",
]


@dataclass(frozen=True)
class Span:
    """Text with a mark, and a title that is shown where a pointer rests on it."""

    text: str
    mark: Mark = ""
    title: str = ""


@dataclass(frozen=True)
class Link:
    """A link to another page.

    Attributes:
        text: of the link.
        href: its address.
        rel: `next` or `prev`, of a listing.
    """

    text: Inline
    href: str
    rel: str = ""


@dataclass(frozen=True)
class ShareBar:
    """A bar of a share from 0 to 1, for a cell of a table."""

    share: float


Inline: TypeAlias = str | float | Span | Link | ShareBar | Sequence["Inline"]
"""Content of a line or a cell: text that may break after the punctuation of long names,
spans, links.
"""


@dataclass(frozen=True)
class Note:
    """A sentence or two; text between `backticks` is code."""

    text: Inline
    tone: Tone = "note"


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    text: Inline


@dataclass(frozen=True)
class Table:
    """A table; columns in `numeric` are set to the right, and their cells never
    break.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Inline]]
    numeric: Collection[int] = ()
    meanings: ByName[str] = field(default_factory=dict)
    """Meanings of columns that differ from `column_glossary.py`."""

    def meaning(self, column: str) -> str:
        """The meaning of a column; empty if its name suffices."""
        return self.meanings.get(column) or MEANINGS.get(column, "")


@dataclass(frozen=True)
class Figure:
    """A picture from `pictures.py` with a caption."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Entry:
    """An entry of a listing: its title, an excerpt of a text, and a line about it."""

    title: Inline
    text: Inline
    note: Inline = ""


@dataclass(frozen=True)
class Listing:
    """Short texts under a heading, which may be empty."""

    title: str
    entries: Sequence[Entry]


@dataclass(frozen=True)
class Text:
    """A text with its white space.

    Attributes:
        spans: of the text.
        layout: `columns` is printed small and in columns.
    """

    spans: Sequence[Span]
    layout: Literal["", "columns"] = ""


@dataclass(frozen=True)
class Sides:
    """(title, parts) of columns beside each other, on narrow screens below each
    other.
    """

    columns: Sequence[tuple[Inline, Sequence[Part]]]


@dataclass(frozen=True)
class Details:
    """Parts that a click opens."""

    summary: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Fields:
    """Names with their values, one below the other."""

    rows: Sequence[tuple[str, Inline]]


@dataclass(frozen=True)
class Links:
    """Links in a row after a label; a text among them is the current one."""

    links: Sequence[Inline]
    label: str = ""


@dataclass(frozen=True)
class Field:
    """An input of a form.

    Attributes:
        name: the parameter.
        label: shown above it; empty for one that only has its placeholder.
        value: its content.
        placeholder: shown while it is empty.
        most: characters.
        is_wide: twice as wide as others.
        is_number: keyboards of phones show digits.
        is_required: the form is not sent without it.
    """

    name: str
    label: str = ""
    value: str = ""
    placeholder: str = ""
    most: int = 200
    is_wide: bool = False
    is_number: bool = False
    is_required: bool = False


@dataclass(frozen=True)
class Choice:
    """A list of a form: group -> options; the group `""` has no heading. `any_label` is
    the empty option.
    """

    name: str
    label: str
    groups: ByName[Sequence[str]]
    value: str = ""
    any_label: str = "any"


@dataclass(frozen=True)
class Form:
    """A form: fields, hidden parameters and a button.

    Attributes:
        action: the address that it is sent to.
        fields: in their order.
        button: its text.
        hidden: parameters without a visible field.
        layout: class of its style.
        after: follows the button.
    """

    action: str
    fields: Sequence[Field | Choice]
    button: str
    hidden: ByName[str] = field(default_factory=dict)
    layout: Literal["", "filters", "find"] = ""
    after: Inline = ""


Part = (
    Note
    | Heading
    | Table
    | Figure
    | Listing
    | Text
    | Sides
    | Details
    | Fields
    | Links
    | Form
)


@dataclass(frozen=True)
class Section:
    """A part of a page about one subject; the page's contents list its title."""

    title: str
    parts: Sequence[Part]


MaybeSection: TypeAlias = Section | None
"""A section; None without content."""


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: of the page.
        sections: in their order.
        parts: before the first section.
        note: a line beneath the title.
        cards: (name, value) of the main numbers.
        header: above the title, of pages of a server.
        contents: links to the sections at the top.
        site: follows the title in a browser's tab.
    """

    title: str
    sections: Sequence[Section] = ()
    parts: Sequence[Part] = ()
    note: str = ""
    cards: Sequence[tuple[str, str]] = ()
    header: Sequence[Part] = ()
    contents: bool = False
    site: str = "gristmill"


Parts: TypeAlias = "Part | str | Iterable[Parts] | None"
"""A part, the text of a note, or several; None and an empty text are left out."""


def flatten(parts: Iterable[Parts]) -> list[Part]:
    """All parts in one list."""
    flat: list[Part] = []
    for part in parts:
        if isinstance(part, str):
            flat += [Note(part)] if part else []
        elif isinstance(part, Part):
            flat.append(part)
        else:
            flat += flatten(part or ())
    return flat


def section_of(title: str, *parts: Parts) -> MaybeSection:
    """A section of the parts that have content: no empty tables, and no headings above
    nothing.

    Returns:
        None if nothing but notes and headings would remain.
    """
    kept: list[Part] = []
    following: Part | None = None
    for part in reversed(flatten(parts)):
        is_bare = isinstance(part, Heading) and isinstance(following, Heading | None)
        if not is_bare and not (isinstance(part, Table) and not part.rows):
            kept.insert(0, part)
            following = part
    has_content = any(not isinstance(part, Note | Heading) for part in kept)
    return Section(title, kept) if has_content else None


def page_of(title: str, *parts: Parts) -> Page:
    """A page without sections."""
    return Page(title, parts=flatten(parts))


@dataclass(frozen=True)
class Measure:
    """A value and the ends of its interval, if it has one.

    It takes the format of a number: `f"{measure:.1%}"` is `70.0% [54.6%, 81.9%]`.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def __format__(self, spec: str) -> str:
        """The value, and its interval in brackets."""
        value = format(self.value, spec)
        if self.low is None or self.high is None:
            return value
        return f"{value} [{self.low:{spec}}, {self.high:{spec}}]"


def table(
    columns: ByName[str],
    rows: Iterable[Iterable[object]],
    meanings: ByName[str] | None = None,
) -> Table:
    """A table of values.

    Args:
        columns: name -> format of its numbers, such as `,` or `.1%`; `>` sets text to
            the right; without a format the column is text.
        rows: text, spans and links as they are; None is an empty cell, and all else is
            written by the format of its column.
        meanings: of columns that differ from `column_glossary.py`.
    """
    formats = list(columns.values())

    def cell(value: object, form: str) -> Inline:
        if isinstance(value, str | Span | Link | ShareBar | list):
            return value
        return "" if value is None else format(value, form)

    cells = [
        [cell(value, form) for value, form in zip(row, formats, strict=True)]
        for row in rows
    ]
    numeric = {number for number, form in enumerate(formats) if form}
    return Table(list(columns), cells, numeric, meanings or {})


def value_text(value: object) -> str:
    """A measured value as people read it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value_text(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def inline_text(value: Inline) -> str:
    """The text of inline content without its marks and links."""
    if isinstance(value, Span | Link):
        return inline_text(value.text)
    if isinstance(value, ShareBar):
        return ""
    if isinstance(value, str | int | float):
        return str(value)
    return "".join(map(inline_text, value))
