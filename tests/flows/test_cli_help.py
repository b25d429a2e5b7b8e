"""What `--help` shows."""

import pytest
from typer.testing import CliRunner

from gristmill.flows.cli import app


@pytest.mark.parametrize("group", [[], ["mixtures"]])
def test_help_says_what_a_command_does_to_the_end_of_the_sentence(group):
    shown = CliRunner().invoke(app, [*group, "--help"], terminal_width=60).output

    assert "..." not in shown.partition("Commands:")[2]
    assert max(len(line) for line in shown.splitlines()) <= 60
