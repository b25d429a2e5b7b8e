"""The terminal shows users' own words verbatim, without markup."""

from __future__ import annotations

import ast
import io
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from benchmarks.checkout import ROOT
from gristmill.flows.questions.what_changed import PlannedStage, print_plan
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.terminal_summary import print_next
from gristmill.flows.running.events import (
    Outcome,
    StageFinished,
    StageProgress,
    StageStarted,
)
from gristmill.flows.running.run import Runner
from gristmill.flows.running.terminal import TerminalObserver, plain_console
from tests.commands import finished

WRITTEN = "sft.lora.targets=[q_proj] [/bold] :smile: \\[x] [red]a[/red]"


def printed(width: int = 200) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    console = plain_console(stream)
    console.width = width
    return console, stream


def test_brackets_and_colons_are_printed_in_sentences_cells_and_headings() -> None:
    console, stream = printed()
    table = Table(WRITTEN)
    table.add_row(WRITTEN)
    console.print(WRITTEN)
    console.print(table)
    assert stream.getvalue().count(WRITTEN) == 3


def test_a_printed_command_can_be_typed_again(
    toy_runner: Callable[..., Runner],
) -> None:
    session = replace(
        toy_runner(first={"n": 1}).session,
        manifest_file="my[old].yaml",
        overrides=["sft.lora.targets=[q_proj]"],
        until="first",
    )
    console, stream = printed()
    print_next(session, Facts(), Path("run"), console)
    assert (
        "status 'my[old].yaml' --set 'sft.lora.targets=[q_proj]'" in stream.getvalue()
    )
    _, *arguments = shlex.split(session.resume_command)
    assert arguments == [
        "run",
        "my[old].yaml",
        "--until",
        "first",
        "--set",
        "sft.lora.targets=[q_proj]",
    ]


def test_run_names_its_own_report_even_if_a_newer_exists(
    toy_runner: Callable[..., Runner],
) -> None:
    session = toy_runner(first={"n": 1}).session
    own_run, newer_run = (session.start_record() for _ in range(2))
    for record in (own_run, newer_run):
        (record.folder / "report.html").write_text("<title>toy</title>")
    console, stream = printed()
    print_next(session, Facts(), own_run.folder, console)
    assert f"report:  {own_run.folder / 'report.html'}\n" in stream.getvalue()
    assert str(newer_run.folder / "report.html") not in stream.getvalue()


def test_a_bar_shows_a_job_by_its_name(toy_runner: Callable[..., Runner]) -> None:
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=True, width=120, markup=False, emoji=False
    )
    observer, runner = TerminalObserver(console), toy_runner(first={"n": 1})
    node = runner.session.plan["first"]
    observer(StageStarted(node, runner.folder("first"), resuming=False))
    observer(StageProgress(node, 1, 2, "[x]", job="[bold]a[/bold]"))
    observer.stop_bars()
    assert "first [bold]a[/bold]" in stream.getvalue()
    assert "1/2 [x]" in stream.getvalue()


def test_names_of_stages_have_a_column_as_wide_as_the_longest(
    toy_runner: Callable[..., Runner],
) -> None:
    console, stream = printed()
    runner = toy_runner(mix={"n": 1}, dedup_semantic={"n": 2})
    observer = TerminalObserver(console, runner.session.plan)
    for name, node in runner.session.plan.items():
        folder = runner.folder(name)
        observer(StageStarted(node, folder, resuming=False))
        outcome = Outcome(name, node.fingerprint, "Completed", 1.5, folder)
        observer(StageFinished(node, outcome))
    assert [line.index("Completed") for line in stream.getvalue().splitlines()] == [
        len("+ dedup_semantic ")
    ] * 2


def test_plan_prints_reasons_with_their_lists(capsys) -> None:
    print_plan(
        [
            PlannedStage(
                stage="sft",
                state="missing",
                fingerprint="0" * 16,
                folder="",
                action="make",
                reason="targets [] -> [q_proj]",
            )
        ]
    )
    assert "targets [] -> [q_proj]" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_every_console_is_created_without_markup() -> None:
    console_files = []
    for folder in ("flows", "train", "tokenize", "dataprep", "mixtures"):
        for file in (ROOT / folder).rglob("*.py"):
            calls = (
                node
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.Call)
            )
            console_files += [
                str(file.relative_to(ROOT))
                for call in calls
                if getattr(call.func, "id", "") == "Console"
            ]
    assert console_files == ["flows/running/terminal.py"]


def test_duckdb_command_prints_only_its_answer(
    tmp_path: Path,
) -> None:
    """DuckDB's binding reports leaked objects when Python exits without a garbage
    collection.
    """
    command = (
        "import gristmill.flows.cli.main as cli, duckdb, sys; sys.argv[1:] = "
        "['--version']; cli.main()"
    )
    process = finished([sys.executable, "-c", command], cwd=tmp_path)
    assert (process.stderr, process.stdout.split()[0]) == ("", "gristmill")
