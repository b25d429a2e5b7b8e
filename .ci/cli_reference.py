"""Reference of the command line, from the help of each command.

Typer has a copy of Click whose classes are not public: hence `Any`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from gristmill.flows.cli.main import app

TITLE = """\
# Commands

Written from the commands themselves: `gristmill COMMAND --help` says the same in a terminal.
"""


def reference() -> str:
    """Return the whole page."""
    root = get_command(app)
    context = root.context_class(root, info_name="gristmill")
    parts = [
        part
        for name, command, above in commands(root, context)
        for part in section(name, command, above)
    ]
    return "\n".join([TITLE, *parts])


def commands(group: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    """Return every command below a group, with its whole name, in the order of the
    help.
    """
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        own = command.context_class(command, info_name=name, parent=context)
        if hasattr(command, "list_commands"):
            yield from commands(command, own)
        else:
            yield own.command_path, command, own


def section(name: str, command: Any, context: Any) -> Iterator[str]:
    """Return the parts of a command: usage, description, a table of its options."""
    yield f"## {name}\n"
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"```text\n{name} {pieces}\n```\n"
    yield (
        "\n\n".join(
            " ".join(part.split())
            for part in (command.help or "").replace("\b", "").split("\n\n")
        )
        + "\n"
    )
    visible = [
        parameter
        for parameter in command.get_params(context)
        if not getattr(parameter, "hidden", False)
    ]
    records = [parameter.get_help_record(context) for parameter in visible]
    yield "| option | |\n| --- | --- |"
    yield (
        "\n".join(
            f"| `{cell(option)}` | {prose(text)} |"
            for option, text in filter(None, records)
        )
        + "\n"
    )


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def prose(text: str) -> str:
    """Return text with the signs of Markdown escaped."""
    return re.sub(r"([<\[*_])", r"\\\1", cell(text))
