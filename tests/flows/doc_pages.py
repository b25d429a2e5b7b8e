"""Pages of the documentation, run as a reader would run them."""

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
"""A fenced block: its language and what it holds."""


def run_command(line: str, columns: int) -> str:
    """What a command line of a page prints in a terminal of this width."""
    done = gristmill_command(shlex.split(line)[1:], columns=columns)
    assert done.returncode == 0, (line, done.stdout, done.stderr)
    return done.stdout


MARKED = re.compile(
    r"^<!-- (?P<mark>(?:run|file|not run|manifest|models)[^>]*) -->\n"
    r"```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
"""A fenced block with what a test does with it above: `run`, `run, compared`, `file: NAME`, `file: NAME, added`;
`manifest`: sections of one, `models`: several `model`, which are both read only."""


def run_page(page: Path, folder: Path, instead: Mapping[str, str] = MappingProxyType({})) -> int:
    """Run the marked blocks of a page in their order in a folder, as a reader would in a shell; how many commands ran.

    A block of kind `console` has commands behind `$ `, each with what it prints. Where it is compared, `...` stands for
    any text, lines too, and on a line of its own for any number of lines.

    Args:
        instead: what stands in the page -> what is taken for it, such as an address.
    """
    ran, text = 0, page.read_text()
    for shown, taken in instead.items():
        assert shown in text, f"{page.name}: {shown}"
        text = text.replace(shown, taken)
    for block in MARKED.finditer(text):
        mark, text = block["mark"], block["text"]
        if mark.startswith("file: "):
            name, _, added = mark.removeprefix("file: ").partition(", ")
            with (folder / name).open("a" if added else "w") as sink:
                sink.write(text)
            continue
        if not mark.startswith("run"):
            continue
        commands = (
            [(text, "")]
            if block["kind"] != "console"
            else [
                (command, said)
                for command, _, said in (
                    part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
                )
            ]
        )
        for command, said in commands:
            printed = in_shell(command, folder)
            ran += 1
            if "compared" in mark:
                pattern = "\n(?:.*\n)?".join(
                    ".*".join(map(re.escape, part.split("..."))) for part in said.strip().split("\n...\n")
                )
                assert re.search(pattern, printed, re.DOTALL), f"{page.name}: {command}\n{printed}\nis not\n{said}"
    return ran


def in_shell(command: str, folder: Path) -> str:
    """What a command prints, errors included, in a terminal of 80 columns; it must succeed."""
    path = f"{commands_folder()}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "80"}
    environment.pop("GRISTMILL_STORE", None)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    assert "leaked" not in done.stdout, f"{command}\n{done.stdout}"  # what libraries say at Python's end
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())
