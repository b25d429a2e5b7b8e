"""Execution of the documentation's pages as a reader would run them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests.warm_commands import commands_folder, gristmill_command

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A fenced block: its language and its content."""


def run_command(line: str, columns: int) -> str:
    """Return the output of a page's command line in a terminal of this width."""
    process = gristmill_command(shlex.split(line)[1:], columns=columns)
    assert process.returncode == 0, (line, process.stdout, process.stderr)
    return process.stdout


MARKED = re.compile(
    r"^<!-- (?P<mark>(?:run|file|not run|manifest|models)[^>]*) -->\n"
    r"```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
"""A fenced block below a mark for tests: `run`, `run, compared`, `file: NAME`, `file:
NAME, added`; `manifest` (sections of a manifest) and `models` (several sections
`model`) are only parsed.
"""


def run_page(
    page: Path, folder: Path, instead: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Run a page's marked blocks in order in a folder, as a reader would in a shell;
    returns the number of commands.

    A block of kind `console` has commands after `$ `, each followed by its output. In
    compared output, `...` stands for any text, including line breaks, and on its own
    line for any number of lines.

    Args:
        instead: text of the page -> its replacement, such as an address.
    """
    command_count, text = 0, page.read_text()
    for original, replacement in instead.items():
        assert original in text, f"{page.name}: {original}"
        text = text.replace(original, replacement)
    for block in MARKED.finditer(text):
        mark, text = block["mark"], block["text"]
        if mark.startswith("file: "):
            name, _, mode = mark.removeprefix("file: ").partition(", ")
            with (folder / name).open("a" if mode else "w") as sink:
                sink.write(text)
            continue
        if not mark.startswith("run"):
            continue
        commands = (
            [(text, "")]
            if block["kind"] != "console"
            else [
                (command, expected_output)
                for command, _, expected_output in (
                    part.partition("\n")
                    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
                )
            ]
        )
        for command, expected_output in commands:
            printed = in_shell(command, folder)
            command_count += 1
            if "compared" in mark:
                pattern = "\n(?:.*\n)?".join(
                    ".*".join(map(re.escape, part.split("...")))
                    for part in expected_output.strip().split("\n...\n")
                )
                assert re.search(pattern, printed, re.DOTALL), (
                    f"{page.name}: {command}\n{printed}\nis not\n{expected_output}"
                )
    return command_count


def in_shell(command: str, folder: Path) -> str:
    """Return the output of a command, including stderr, in a terminal of 80 columns;
    the command must succeed.
    """
    path = f"{commands_folder()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "80"}
    environment.pop("GRISTMILL_STORE", None)
    process = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.returncode == 0, f"{command}\n{process.stdout}"
    # warning of libraries when Python exits
    assert "leaked" not in process.stdout, f"{command}\n{process.stdout}"
    return "\n".join(line.rstrip() for line in process.stdout.splitlines())
