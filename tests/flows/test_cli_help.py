"""Output of `--help`."""

import re
import shlex

import pytest
from typer.main import get_command

from gristmill.flows.cli.command_groups import EXAMPLES, GROUPS
from gristmill.flows.cli.main import app
from tests.commands import call


@pytest.mark.parametrize(
    ("group", "title"), [([], "Run:"), (["mixtures"], "Commands:")]
)
def test_help_does_not_truncate_summaries_of_commands(group, title):
    help_text = call(*group, "--help", terminal_width=60).output

    commands = help_text.partition(title)[2].partition("Example:")[0]
    assert commands
    assert "..." not in commands
    assert max(len(line) for line in commands.splitlines()) <= 60


def test_every_command_has_a_heading_and_an_example():
    grouped_commands = [name for commands in GROUPS.values() for name in commands]

    assert sorted(grouped_commands) == sorted(get_command(app).commands), (
        "each command once"
    )
    help_text = call("--help", terminal_width=80).output
    assert [title for title in GROUPS if f"\n{title}:\n" in help_text] == list(GROUPS)
    assert "Commands:" not in help_text
    assert f"Example:\n    {EXAMPLES['look']}" in call("look", "--help").output


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES.values())
def test_examples_use_options_and_arguments_of_their_command(example):
    program, name, *arguments = shlex.split(example)
    command = get_command(app).commands[name]
    if arguments and name == "mixtures":
        command, arguments = command.commands[arguments[0]], arguments[1:]

    assert program == "gristmill"
    # an unknown or missing option is an error
    assert command.make_context(name, list(arguments)).command is command


@pytest.mark.slow
def test_help_shows_no_python_types_of_options():
    commands = get_command(app).commands
    help_texts = {
        name: call(name, "--help", terminal_width=200).output for name in commands
    }

    assert [
        line
        for text in help_texts.values()
        for line in text.splitlines()
        if re.match(r" +-.*<(str|int|float|path|list|int range|float range)", line)
    ] == []
