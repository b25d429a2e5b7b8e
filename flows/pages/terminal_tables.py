"""Headings and tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rich.console import Console
from rich.table import Table as TerminalTable
from rich.text import Text

from gristmill.flows.pages.page_elements import Table, inline_text


def section(console: Console, title: str) -> None:
    """Print a heading."""
    console.print()
    console.print(Text(title, style="bold"))


def plain_table(*columns: tuple[str, bool]) -> TerminalTable:
    """A table without lines; columns are (name, whether it holds numbers)."""
    table = TerminalTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, is_numeric in columns:
        table.add_column(
            name, justify="right" if is_numeric else "left", overflow="fold"
        )
    return table


def print_table(
    console: Console,
    table: Table,
    title: str = "",
    highlight: str = "",
    styles: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Print a table of a page after a title, unless it is empty; cells that contain
    `highlight` are yellow, and `styles` has the styles of whole cells.
    """
    if not table.rows:
        return
    if title:
        section(console, title)
    lines = plain_table(
        *((name, column in table.numeric) for column, name in enumerate(table.header))
    )
    lines.show_header = any(table.header)
    for row in table.rows:
        cells = []
        for cell in map(inline_text, row):
            style = styles.get(cell, "")
            if highlight and highlight in cell:
                style = "yellow"
            cells.append(Text(cell, style=style))
        lines.add_row(*cells)
    console.print(lines)
