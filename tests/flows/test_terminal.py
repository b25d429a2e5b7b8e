"""What a terminal shows of the user's own words is what they wrote: nothing of it is read as markup."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from gristmill.flows.questions.status import print_plan
from gristmill.flows.report.terminal_summary import print_next
from gristmill.flows.running.run import Outcome, Runner
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import TerminalObserver, plain_console
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.sources import Source

ROOT = Path(__file__).parents[2]
WRITTEN = "sft.lora.targets=[q_proj] [/bold] :smile: \\[x] [red]a[/red]"


def printed(width: int = 200) -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    console = plain_console(shown)
    console.width = width
    return console, shown


def test_brackets_and_colons_are_printed_in_sentences_cells_and_headings() -> None:
    console, shown = printed()
    table = Table(WRITTEN)
    table.add_row(WRITTEN)
    console.print(WRITTEN)
    console.print(table)
    assert shown.getvalue().count(WRITTEN) == 3


def test_a_printed_command_can_be_typed_again(toy_runner: Callable[..., Runner]) -> None:
    runner = toy_runner(first={"n": 1})
    manifest = Manifest(name="toy", sources={"a": Source(path="x")})
    session = Session(manifest, "my[old].yaml", ["sft.lora.targets=[q_proj]"], runner.store, None, runner.plan)
    console, shown = printed()
    print_next(session, {"training": {}, "summaries": {}}, Path("run"), console)
    assert "status 'my[old].yaml' --set 'sft.lora.targets=[q_proj]'" in shown.getvalue()


def test_a_run_names_its_own_report_while_another_of_the_manifest_has_a_newer_one(
    toy_runner: Callable[..., Runner],
) -> None:
    runner = toy_runner(first={"n": 1})
    manifest = Manifest(name="toy", sources={"a": Source(path="x")})
    session = Session(manifest, "toy.yaml", [], runner.store, None, runner.plan)
    mine, other = (session.start_record() for _ in range(2))
    for record in (mine, other):
        (record.folder / "report.html").write_text("<title>toy</title>")
    console, shown = printed()
    print_next(session, {"training": {}, "summaries": {}}, mine.folder, console)
    assert f"report:  {mine.folder / 'report.html'}\n" in shown.getvalue()
    assert str(other.folder / "report.html") not in shown.getvalue()


def test_a_bar_shows_a_job_by_its_name(toy_runner: Callable[..., Runner]) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120, markup=False, emoji=False)
    observer, runner = TerminalObserver(console), toy_runner(first={"n": 1})
    node = runner.plan["first"]
    observer.stage_started(node, False, runner.folder("first"))
    observer.stage_event(node, {"event": "progress", "job": "[bold]a[/bold]", "done": 1, "total": 2, "unit": "[x]"})
    observer.stop_bar()
    assert "first [bold]a[/bold]" in shown.getvalue()
    assert "1/2 [x]" in shown.getvalue()


def test_names_of_stages_have_a_column_as_wide_as_the_longest(toy_runner: Callable[..., Runner]) -> None:
    console, shown = printed()
    runner = toy_runner(mix={"n": 1}, dedup_semantic={"n": 2})
    observer = TerminalObserver(console, runner.plan)
    for name, node in runner.plan.items():
        observer.stage_started(node, False, runner.folder(name))
        observer.stage_finished(node, Outcome(name, node.fingerprint, "Completed", 1.5, runner.folder(name)))
    assert [line.index("Completed") for line in shown.getvalue().splitlines()] == [len("+ dedup_semantic ")] * 2


def test_why_a_stage_would_run_is_printed_with_its_lists(capsys) -> None:
    print_plan(
        [
            {
                "stage": "sft",
                "action": "make",
                "state": "missing",
                "fingerprint": "0" * 16,
                "reason": "targets [] -> [q_proj]",
            }
        ]
    )
    assert "targets [] -> [q_proj]" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_every_console_is_made_by_the_one_that_reads_no_markup() -> None:
    made = []
    for folder in ("flows", "train", "tokenize", "dataprep", "mixtures"):
        for file in (ROOT / folder).rglob("*.py"):
            calls = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
            made += [str(file.relative_to(ROOT)) for call in calls if getattr(call.func, "id", "") == "Console"]
    assert made == ["flows/running/terminal.py"]


def test_a_command_that_asks_duckdb_prints_its_answer_and_nothing_at_its_end(tmp_path: Path) -> None:
    """Its binding counts what is left of it when Python ends, and lists that, where garbage is not looked for."""
    command = "import gristmill.flows.cli.main as cli, duckdb, sys; sys.argv[1:] = ['--version']; cli.main()"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stderr, done.stdout.split()[0]) == ("", "gristmill")
