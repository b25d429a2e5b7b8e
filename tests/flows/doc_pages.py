"""Pages of the documentation, run as a reader would run them."""

from __future__ import annotations

import re
import shlex

from typer.testing import CliRunner

from gristmill.flows.cli.main import app

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A fenced block: its language and what it holds."""


def run_command(line: str, columns: int) -> str:
    """What a command line of a page prints in a terminal of this width."""
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, (line, done.output, done.exception)
    return done.stdout
