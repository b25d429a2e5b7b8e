"""Stages are made once, continued after a kill, made again when forced, and never
committed after a failure.
"""

from __future__ import annotations

import io
import os
import subprocess
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from gristmill.core import store
from gristmill.core.files import read_json, write_json
from gristmill.core.lease import LeaseLostError
from gristmill.core.store import StageFolder, Store
from gristmill.flows.running.events import StageEvent, StageOutput, parse_event
from gristmill.flows.running.process import TURN_SECONDS, StageProcess
from gristmill.flows.running.run import Runner, StageFailedError
from gristmill.flows.running.session import program
from gristmill.flows.running.terminal import TerminalObserver
from gristmill.mixtures.schema.engine import Engine
from gristmill.train.distributed.rendezvous import HOSTS_CHANGED

Make = Callable[..., Runner]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.slow
def test_stage_runs_once_and_is_cached_afterwards(toy_runner: Make) -> None:
    runner = toy_runner(first={"n": 3}, second={})
    assert [runner.run_stage(stage).how for stage in ("first", "second")] == [
        "Completed",
        "Completed",
    ]
    assert (runner.folder("second").data / "2.txt").read_text() == "4"
    assert [runner.run_stage(stage).how for stage in ("first", "second")] == [
        "Cached",
        "Cached",
    ]
    assert runner.emit.started == [("first", False), ("second", False)]


@pytest.mark.slow
def test_changed_key_rebuilds_only_its_stage_and_later_ones(
    toy_runner: Make,
) -> None:
    runner = toy_runner(first={"n": 3}, second={})
    for stage in runner.session.plan:
        runner.run_stage(stage)
    changed = toy_runner(first={"n": 3}, second={"colour": 1})
    assert [changed.run_stage(stage).how for stage in changed.session.plan] == [
        "Cached",
        "Completed",
    ]
    changed = toy_runner(first={"n": 2}, second={"colour": 1})
    assert [changed.run_stage(stage).how for stage in changed.session.plan] == [
        "Completed",
        "Completed",
    ]


@pytest.mark.slow
def test_killed_stage_resumes_and_writes_the_same_files(
    toy_runner: Make,
) -> None:
    undisturbed = toy_runner(first={"n": 4}, second={})
    for stage in undisturbed.session.plan:
        undisturbed.run_stage(stage)
    runner = toy_runner(first={"n": 4}, second={"die_once": True})
    runner.run_stage("first")
    with pytest.raises(StageFailedError, match="was killed"):
        runner.run_stage("second")
    assert runner.folder("second").state() == "unfinished"
    modification_time = (runner.folder("second").data / "1.txt").stat().st_mtime_ns
    assert runner.run_stage("second").how == "Resumed"
    assert (
        runner.folder("second").data / "1.txt"
    ).stat().st_mtime_ns == modification_time
    assert (
        runner.folder("second").manifest()["files"]
        == undisturbed.folder("second").manifest()["files"]
    )


@pytest.mark.slow
def test_stage_killed_by_sigkill_is_retried_and_resumes(
    toy_runner: Make,
) -> None:
    runner = toy_runner(Engine(retries=1), first={"n": 4}, second={"die_once": True})
    runner.run_stage("first")
    runner.run_stage("second")
    folder = runner.folder("second")
    assert folder.state() == "committed"
    assert runner.emit.done == [1, 2, 3, 4]
    assert len(runner.emit.warnings) == 2
    assert folder.manifest()["lease"] == 1, "the attempts share the lease"
    assert runner.emit.failures == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "attempts"),
    [("killed", 3), ("killed_rank", 3), ("killed_worker", 3), ("exiting", 1)],
)
def test_only_sigkill_is_retried_up_to_engine_retries(
    toy_runner: Make, stage: str, attempts: int
) -> None:
    runner = toy_runner(Engine(retries=2), **{stage: {}})
    with pytest.raises(StageFailedError) as caught:
        runner.run_stage(stage)
    lines = (runner.folder(stage).logs / "1.log").read_text().splitlines()
    assert lines.count("last words") == attempts
    assert runner.emit.failures == [(stage, str(caught.value))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "min_nodes", "attempts"),
    [(HOSTS_CHANGED, 1, 5), (HOSTS_CHANGED, 2, 1), ("ValueError", 1, 1)],
)
def test_training_with_changed_hosts_restarts_while_it_gets_further(
    toy_runner: Make, kind: str, min_nodes: int, attempts: int
) -> None:
    """Three attempts get further, and one retry does not."""
    engine = Engine(retries=1, nodes=2, min_nodes=min_nodes)
    runner = toy_runner(engine, losing={"steps": 3, "type": kind})
    with pytest.raises(StageFailedError, match="lost"):
        runner.run_stage("losing")
    lines = (runner.folder("losing").logs / "1.log").read_text().splitlines()
    assert lines.count("last words") == attempts


@pytest.mark.slow
def test_failure_is_one_sentence_with_log_and_next_command(
    toy_runner: Make,
) -> None:
    runner = toy_runner(failing={})
    with pytest.raises(StageFailedError) as caught:
        runner.run_stage("failing")
    assert str(caught.value).splitlines() == [
        "failing: the number 7 is not allowed here; give another",
        f"  log: {runner.folder('failing').logs / '1.log'}",
        f"  resume with: {program()} run toy.yaml",
    ]
    assert "Traceback" in (runner.folder("failing").logs / "1.log").read_text()
    assert runner.folder("failing").state() == "unfinished"


@pytest.mark.slow
def test_a_stage_that_finds_damage_names_the_command_that_repairs_it(
    toy_runner: Make,
) -> None:
    with pytest.raises(
        StageFailedError,
        match=r"x\.bin is damaged: `\S*gristmill verify toy\.yaml --repair` and a run",
    ):
        toy_runner(damaged={}).run_stage("damaged")


@pytest.mark.slow
def test_silent_process_exit_fails_with_its_last_line(
    toy_runner: Make,
) -> None:
    with pytest.raises(StageFailedError, match="ended with code 3: last words"):
        toy_runner(exiting={}).run_stage("exiting")


@pytest.mark.slow
def test_failure_names_the_rank_that_failed_first(
    toy_runner: Make,
) -> None:
    """As torchrun prints when two ranks end on a disk that is too full for the error
    file.
    """
    runner = toy_runner(ranks={})
    with pytest.raises(StageFailedError) as caught:
        runner.run_stage("ranks")
    # Later readers see the same message.
    assert read_json(runner.folder("ranks").work / "error.json")["message"].startswith(
        "[Errno 28] No space left"
    )
    assert str(caught.value).splitlines()[0] == (
        "ranks: [Errno 28] No space left on device: 'step-00000004'; free some space "
        "on the disk of "
        f"{runner.folder('ranks').path} ({program()} gc lists deletable outputs)"
    )
    with pytest.raises(
        StageFailedError,
        match=r"^silent: its process ended with code 1: the last line that says",
    ):
        toy_runner(silent={}).run_stage("silent")


def test_missing_input_error_names_the_command_that_makes_it(
    toy_runner: Make,
) -> None:
    with pytest.raises(
        StageFailedError, match=r"^second needs the output of first.*run toy\.yaml"
    ):
        toy_runner(first={"n": 1}, second={}).run_stage("second")


@pytest.mark.slow
def test_forced_stage_is_rebuilt_and_compared_with_its_old_output(
    toy_runner: Make,
) -> None:
    runner = toy_runner(first={"n": 2})
    runner.run_stage("first")
    outcome = runner.run_stage("first", force=True)
    assert (outcome.how, outcome.note) == ("Completed", "same bytes as before")
    assert runner.folder("first").state() == "committed"
    assert list(runner.session.store.trash.iterdir()) == []


@pytest.mark.slow
def test_deleted_file_is_detected_and_rebuilt(toy_runner: Make) -> None:
    runner = toy_runner(first={"n": 3}, second={})
    for stage in runner.session.plan:
        runner.run_stage(stage)
    (runner.folder("second").data / "1.txt").unlink()
    assert runner.folder("second").state() == "corrupt"
    runner.run_stage("second")
    assert (runner.folder("second").data / "1.txt").read_text() == "1"


@pytest.mark.slow
def test_events_reach_the_observer_and_lines_the_log(toy_runner: Make) -> None:
    runner = toy_runner(first={"n": 2}, second={})
    for stage in runner.session.plan:
        runner.run_stage(stage)
    assert runner.emit.done == [1, 2]
    node = runner.session.plan["second"]
    assert StageOutput(node, "a line for the log") in runner.emit.events
    assert runner.emit.warnings == ["rows are long"]
    assert "a line for the log" in (runner.folder("second").logs / "1.log").read_text()


@pytest.mark.slow
def test_interrupt_kills_the_process_group(toy_runner: Make) -> None:
    runner = toy_runner(waiting={})
    main = threading.main_thread()
    assert main.ident is not None

    def interrupt(event: StageEvent) -> None:
        import signal

        signal.pthread_kill(main.ident or 0, signal.SIGINT)

    runner.emit.on_report = interrupt
    with pytest.raises(KeyboardInterrupt):
        runner.run_stage("waiting")
    pids = [
        int(pid)
        for pid in (runner.folder("waiting").data / "pids.txt").read_text().split()
    ]
    assert [is_running(pid) for pid in pids] == [False, False]
    assert os.getpid() not in pids


def test_interrupt_reports_that_the_stage_is_saving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training takes seconds to end, which tempts to press Ctrl-C again."""
    sent_events: list[dict[str, object]] = []
    poll_results = iter([None, None, -15])
    process = object.__new__(StageProcess)
    process.__dict__.update(
        _on_event=sent_events.append,
        _signal=lambda number: False,
        _process=SimpleNamespace(poll=lambda: next(poll_results), wait=lambda: -15),
        _reader=threading.Thread(target=lambda: None),
    )
    process._reader.start()
    monkeypatch.setattr("gristmill.flows.running.process.QUIET_SECONDS", 0.0)
    process.stop()
    assert sent_events == [{"event": "stopping", "seconds": 15.0}]
    terminal = io.StringIO()
    event = parse_event(cast(Any, SimpleNamespace(name="pretrain")), sent_events[0])
    assert event is not None
    TerminalObserver(Console(file=terminal, width=200))(event)
    assert (
        terminal.getvalue()
        == "  pretrain: is stopping, and saves its progress first, in at most 15 s\n"
    )


def test_interrupts_are_handled_while_waiting_for_a_stage(
    toy_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float | None] = []
    wait = subprocess.Popen.wait

    def wait_in_turns(
        process: subprocess.Popen[bytes], timeout: float | None = None
    ) -> int:
        timeouts.append(timeout)
        if len(timeouts) == 2:
            raise KeyboardInterrupt
        return wait(process, timeout and 0.01)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_in_turns)
    with pytest.raises(KeyboardInterrupt):
        toy_runner(waiting={}).run_stage("waiting")
    assert timeouts[:2] == [TURN_SECONDS, TURN_SECONDS]


@pytest.fixture
def overtaken(toy_runner: Make) -> Callable[[], None]:
    """Return a function that marks the owner of the first lease as dead, as after a
    long pause, and lets another run finish.
    """

    def overtake() -> None:
        runner = toy_runner(first={"n": 2})
        lease = runner.folder("first").path / "lease" / "1.json"
        write_json(lease, {**read_json(lease), "ticks": 1})
        runner.run_stage("first")

    return overtake


def once(act: Callable[[], None], then: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that first runs an action in its first call, like a pause in
    which something else happens.
    """
    pending = [act]
    return lambda *arguments: (pending.pop()() if pending else None, then(*arguments))[
        1
    ]


@pytest.mark.slow
def test_owner_paused_before_its_commit_overwrites_nothing(
    toy_runner: Make, overtaken: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = toy_runner(first={"n": 2})
    monkeypatch.setattr(
        store, "library_versions", once(overtaken, store.library_versions)
    )
    with pytest.raises(LeaseLostError, match="not committed"):
        runner.run_stage("first")
    assert runner.folder("first").state() == "committed"
    assert runner.folder("first").manifest()["lease"] == 2


@pytest.mark.slow
def test_decided_commit_of_a_paused_owner_is_published_by_its_successor(
    toy_runner: Make, overtaken: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = toy_runner(first={"n": 2})
    monkeypatch.setattr(StageFolder, "publish", once(overtaken, StageFolder.publish))
    assert runner.run_stage("first").how == "Completed"
    assert runner.folder("first").state() == "committed"
    assert runner.folder("first").manifest()["lease"] == 1
    assert runner.folder("first").is_tidy()


@pytest.mark.slow
def test_concurrent_runs_of_a_stage_execute_it_once(toy_runner: Make) -> None:
    first, second = toy_runner(first={"n": 3}), toy_runner(first={"n": 3})
    outcomes = []
    threads = [
        threading.Thread(
            target=lambda runner=runner: outcomes.append(runner.run_stage("first"))
        )
        for runner in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcome.how for outcome in outcomes) == ["Cached", "Completed"]
    assert isinstance(first.session.store, Store)
