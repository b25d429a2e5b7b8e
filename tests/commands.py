"""Commands of gristmill, called in the process of a test, and other programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from gristmill.flows.cli.main import app

GRISTMILL = [sys.executable, "-m", "gristmill"]
"""The program as a command of its own."""


def call(*arguments: object, code: int | None = 0, **options: Any) -> Result:
    """Call a command and assert its exit code, unless that is None.

    Args:
        options: of `CliRunner.invoke`.
    """
    result = CliRunner().invoke(app, [*map(str, arguments)], **options)
    assert code in (None, result.exit_code), result.output
    return result


def finished(
    command: Sequence[object], code: int = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program with its output captured as text, and assert its exit code.

    Args:
        options: of `subprocess.run`.
    """
    process = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, **options
    )
    assert process.returncode == code, process.stdout + process.stderr
    return process
