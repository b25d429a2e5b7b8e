"""Pages on a terminal: without pictures and forms, and links as plain text."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as TerminalTable
from rich.text import Text as TerminalText

from gristmill.flows.pages.page_elements import (
    ByName,
    Fields,
    Heading,
    Inline,
    Link,
    Links,
    Listing,
    MaybeSection,
    Note,
    Page,
    Part,
    Parts,
    Span,
    Table,
    Text,
    flatten,
    inline_text,
)
from gristmill.flows.running.terminal import plain_console, visible

TONES = {"note": "dim", "plain": "", "warning": "yellow"}
STYLES: ByName[str] = {
    "strong": "bold",
    "hit": "yellow",
    "masked": "dim",
    "removed": "red strike",
    "added": "green",
    "kept": "green",
    "good": "green",
    "dropped": "red",
    "bad": "red",
}
BRACKETS = {"removed": "[-{}-]", "added": "{{+{}+}}"}
"""Marks of changed text, as of `git diff --word-diff`."""
INDENT = (0, 0, 0, 4)


class Answer(ABC):
    """An answer that is printed by its parts."""

    @abstractmethod
    def parts(self) -> list[Parts]:
        """Return the answer as parts of a page."""

    def show(self) -> None:
        """Print the answer as its command does."""
        print_parts(self.parts())


def print_page(page: Page) -> None:
    """Print a page with its title."""
    plain_console().print(visible(page.title), style="bold", soft_wrap=True)
    print_parts(page.parts)
    print_sections(*page.sections)


def print_sections(*sections: MaybeSection) -> None:
    """Print the sections that have content."""
    for each in filter(None, sections):
        print_parts(Heading(each.title), each.parts)


def print_parts(*parts: Parts) -> None:
    """Print parts of a page on standard output."""
    console = plain_console()
    for part in flatten(parts):
        _print(console, part)


def _print(console: Console, part: Part) -> None:
    match part:
        case Note(text, tone):
            line = styled(text)
            # A command at the end stays whole and loses its marks, to be copied.
            is_command = line.plain.endswith("`")
            if is_command:
                line = TerminalText().join(line.split("`"))
            console.print(line, style=TONES[tone], soft_wrap=is_command)
        case Heading(text):
            section(console, styled(text))
        case Table():
            print_table(console, part)
        case Fields(rows):
            print_table(console, Table(["", ""], rows))
        case Text(spans):
            console.print(styled(spans), soft_wrap=True)
        case Links(links, label) if links:
            console.print(" ".join(map(inline_text, [label, *links])), style="dim")
        case Listing(title, entries):
            if title and entries:
                console.print(styled(title), style="dim")
            for entry in entries:
                console.print(styled(entry.title), soft_wrap=True)
                for inline, style in ((entry.note, "dim"), (entry.text, "")):
                    if inline_text(inline):
                        console.print(Padding(styled(inline), INDENT), style=style)


def styled(value: Inline) -> TerminalText:
    """Return inline content as text with styles, and control characters as symbols."""
    if isinstance(value, Link):
        return styled(value.text)
    if isinstance(value, Span):
        text = BRACKETS.get(value.mark, "{}").format(value.text)
        return TerminalText(visible(text), STYLES.get(value.mark, ""))
    if isinstance(value, list | tuple):
        return TerminalText.assemble(*map(styled, value))
    return TerminalText(visible(inline_text(value)))


def section(console: Console, title: str | TerminalText) -> None:
    """Print a heading."""
    console.print()
    console.print(title, style="bold")


def print_table(console: Console, table: Table, title: str = "") -> None:
    """Print a table without lines after a title, unless it is empty."""
    if not table.rows:
        return
    if title:
        section(console, title)
    lines = TerminalTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    lines.show_header = any(table.header)
    for number, name in enumerate(table.header):
        lines.add_column(
            name,
            justify="right" if number in table.numeric else "left",
            overflow="fold",
        )
    for row in table.rows:
        lines.add_row(*map(styled, row))
    console.print(lines)
