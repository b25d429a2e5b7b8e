"""Headings and tables for a terminal."""

from __future__ import annotations

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
    console: Console, table: Table, title: str = "", highlight: str = ""
) -> None:
    """Print a table of a page after a title, unless it is empty; cells that contain
    `highlight` are yellow.
    """
    if not table.rows:
        return
    if title:
        section(console, title)
    lines = plain_table(
        *((name, column in table.numeric) for column, name in enumerate(table.header))
    )
    for row in table.rows:
        cells = [inline_text(cell) for cell in row]
        lines.add_row(
            *(
                Text(cell, style="yellow" if highlight and highlight in cell else "")
                for cell in cells
            )
        )
    console.print(lines)
