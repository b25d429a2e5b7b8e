"""What `--help` shows."""

import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from gristmill.flows.cli.main import app


@pytest.mark.parametrize("group", [[], ["mixtures"]])
def test_help_says_what_a_command_does_to_the_end_of_the_sentence(group):
    shown = CliRunner().invoke(app, [*group, "--help"], terminal_width=60).output

    assert "..." not in shown.partition("Commands:")[2]
    assert max(len(line) for line in shown.splitlines()) <= 60


def test_help_names_what_an_option_takes_in_words_of_people():
    commands = get_command(app).commands
    shown = {name: CliRunner().invoke(app, [name, "--help"], terminal_width=200).output for name in commands}

    assert [line for text in shown.values() for line in text.splitlines()
            if re.match(r" +-.*<(str|int|float|path|list|int range|float range)", line)] == []
