"""What `--help` shows."""

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from gristmill.flows.cli.command_groups import EXAMPLES, GROUPS
from gristmill.flows.cli.main import app


@pytest.mark.parametrize(("group", "title"), [([], "Run:"), (["mixtures"], "Commands:")])
def test_help_says_what_a_command_does_to_the_end_of_the_sentence(group, title):
    shown = CliRunner().invoke(app, [*group, "--help"], terminal_width=60).output

    commands = shown.partition(title)[2].partition("Example:")[0]
    assert commands
    assert "..." not in commands
    assert max(len(line) for line in commands.splitlines()) <= 60


def test_every_command_stands_under_a_heading_with_an_example_of_itself():
    listed = [name for commands in GROUPS.values() for name in commands]

    assert sorted(listed) == sorted(get_command(app).commands), "each one once"
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80).output
    assert [title for title in GROUPS if f"\n{title}:\n" in shown] == list(GROUPS)
    assert "Commands:" not in shown
    assert f"Example:\n    {EXAMPLES['look']}" in CliRunner().invoke(app, ["look", "--help"]).output


@pytest.mark.parametrize("example", EXAMPLES.values())
def test_an_example_has_the_options_and_arguments_of_its_command(example):
    program, name, *arguments = shlex.split(example)
    command = get_command(app).commands[name]
    if arguments and name == "mixtures":
        command, arguments = command.commands[arguments[0]], arguments[1:]

    assert program == "gristmill"
    assert command.make_context(name, list(arguments)).params  # an unknown or missing one is an error


@pytest.mark.slow
def test_help_names_what_an_option_takes_in_words_of_people():
    commands = get_command(app).commands
    shown = {name: CliRunner().invoke(app, [name, "--help"], terminal_width=200).output for name in commands}

    assert [
        line
        for text in shown.values()
        for line in text.splitlines()
        if re.match(r" +-.*<(str|int|float|path|list|int range|float range)", line)
    ] == []
