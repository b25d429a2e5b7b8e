"""Progress and output of a running stage, seen from another terminal."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.core.files import read_json
from gristmill.core.lease import identity
from gristmill.core.progress import (
    ProgressFile,
    describe_progress,
    read_progress,
    seconds_left,
)
from gristmill.flows.questions.status import (
    DocumentCounts,
    NoLogError,
    StageState,
    describe_running,
    duration,
    find_log,
    print_status,
    read_log,
    run_state,
    stage_parts,
    stage_states,
)
from gristmill.flows.running.events import StageEvent, StageProgress
from gristmill.flows.running.launch import why_the_store_failed
from gristmill.flows.running.run import Runner, StageFailedError
from gristmill.flows.stages.plan import UnknownStageError

Make = Callable[..., Runner]


@pytest.mark.slow
def test_running_stage_is_shown_with_progress_and_followed_to_its_end(
    toy_runner: Make,
) -> None:
    runner = toy_runner(first={"n": 4}, second={})
    session = runner.session
    followed_lines: list[str] = []

    def look(event: StageEvent) -> None:
        if not isinstance(event, StageProgress):
            return
        row = stage_states(session)[1]
        followed_lines.append(
            f"{row.state}: {describe_progress(row.progress or {}) or 'nothing yet'}"
        )
        if len(followed_lines) == 1:
            assert row.progress is not None
            assert describe_running(row, row.progress["started"] + 130).startswith(
                "for 2 m 10 s"
            )
            assert find_log(session, None).name == "1.log"

    runner.emit.on_report = look  # type: ignore[attr-defined]
    runner.run_stage("first")
    runner.run_stage("second")
    assert len(followed_lines) == 4
    assert all(line.startswith("running: ") for line in followed_lines)
    log = find_log(session, "second")
    assert "".join(read_log(log, None, follow=True)) == "a line for the log\n"


def test_remaining_time_follows_from_the_speed_of_a_job() -> None:
    progress = {
        "started": 0.0,
        "job_started": 100.0,
        "job_done": 10.0,
        "at": 120.0,
        "done": 20,
        "total": 50,
        "unit": "steps",
        "loss": 3.25,
        "tokens_per_second": 81234.0,
        "job": "",
    }
    assert seconds_left(progress) == 60.0
    assert describe_progress(progress) == "20/50 steps, loss 3.25, 81,234 tokens/s"
    row = StageState(
        stage="pretrain",
        state="running",
        fingerprint="",
        folder="",
        owner="process 7 on here",
        progress=progress,
    )
    assert describe_running(row, 130.0) == (
        "for 2 m 10 s: 20/50 steps, loss 3.25, 81,234 tokens/s, about 50 s left "
        "(process 7 on here)"
    )
    assert [duration(seconds) for seconds in (0.4, 59.6, 3600)] == [
        "0 s",
        "1 m 0 s",
        "1 h 0 m",
    ]


def test_progress_is_written_first_periodically_and_last(
    tmp_path: Path,
) -> None:
    progress = ProgressFile(tmp_path, 3)
    assert describe_progress(read_progress(tmp_path, 3)) == ""
    progress.note({"event": "warning", "message": "not progress"})
    progress.note({"event": "progress", "done": 1, "total": 9, "unit": "shards"})
    assert "done" not in read_json(tmp_path / "3.progress.json"), (
        "progress was written twice within the pause"
    )
    progress.write()
    assert read_json(tmp_path / "3.progress.json")["done"] == 1


def test_unwritable_progress_does_not_end_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def full(path: Path, content: object) -> None:
        tried.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gristmill.core.progress.write_json", full)
    monkeypatch.setattr("gristmill.core.progress.WRITE_SECONDS", 0.0)
    progress = ProgressFile(tmp_path, 1)
    progress.note({"event": "progress", "done": 1, "total": 9, "unit": "shards"})
    assert len(tried) == 1


@pytest.mark.slow
def test_log_of_the_failed_stage_is_shown(toy_runner: Make) -> None:
    runner = toy_runner(first={"n": 1}, exiting={})
    session = runner.session
    with pytest.raises(
        NoLogError, match=r"nothing of toy\.yaml has been run .*gristmill run toy\.yaml"
    ):
        find_log(session, None)
    runner.run_stage("first")
    for _ in range(2):
        with pytest.raises(StageFailedError):
            runner.run_stage("exiting")
    assert find_log(session, None) == runner.folder("exiting").logs / "2.log"
    assert (
        "".join(read_log(find_log(session, "exiting"), 1, follow=False))
        == "last words\n"
    )
    with pytest.raises(UnknownStageError):
        find_log(session, "third")


def test_run_with_a_dead_process_is_killed() -> None:
    living = identity(os.getpid())
    assert run_state({"state": "running", "owner": living}) == "running"
    assert (
        run_state({"state": "running", "owner": {**living, "boot": "another"}})
        == "killed"
    )
    assert (
        run_state(
            {
                "state": "running",
                "owner": {**living, "host": "elsewhere", "boot": "another"},
            }
        )
        == "running"
    )
    assert (
        run_state({"state": "failed", "owner": {**living, "boot": "another"}})
        == "failed"
    )


def test_status_shows_the_rules_that_dropped_most_documents(
    toy_runner: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "modules" / "gristmill_dropping_stages.py").write_text(
        "def first(inputs, config, out, context):\n"
        "    return {'counts': {'read': 28, 'kept': 8, 'quarantined': 1, 'dropped': "
        "{'rules/short': 12, 'b': 7}}}\n"
    )
    runner = toy_runner(first={"n": 1}, second={})
    object.__setattr__(
        runner.session.plan["first"].stage, "run", "gristmill_dropping_stages:first"
    )
    runner.run_stage("first")
    session = runner.session
    rows = stage_states(session)
    assert rows[0].documents == DocumentCounts(
        read=28, kept=8, quarantined=1, dropped={"rules/short": 12, "b": 7}
    )
    print_status(session, rows)
    output = capsys.readouterr().out
    expected_line = (
        "first: kept 8 of 28 documents; dropped most by rules/short 12, "
        "b 7, quarantined 1"
    )
    assert expected_line in " ".join(output.split())
    beyond_quota = DocumentCounts(
        read=28, kept=8, quarantined=0, dropped={"quota": 9, "epochs": 11}
    )
    for documents, tone in (rows[0].documents, "warning"), (beyond_quota, "note"):
        _, (note,) = stage_parts([replace(rows[0], documents=documents)])
        assert note.tone == tone


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (
            errno.EACCES,
            "permission denied: /a/b; .* Make it writable, or name another place "
            "with --store",
        ),
        (
            errno.ENOSPC,
            r"Free some space there \(\S*gristmill gc lists deletable outputs\), then resume with: ",
        ),
        (errno.EIO, "Make sure that it can be reached, then resume with: "),
    ],
)
def test_unwritable_store_error_advises_to_fix_it_first(
    toy_runner: Make, number: int, advice: str
) -> None:
    message = why_the_store_failed(
        OSError(number, os.strerror(number), "/a/b"),
        toy_runner(first={"n": 1}).session,
    )
    assert re.search(advice, message)


def test_full_store_error_names_the_gc_command(
    toy_runner: Make,
) -> None:
    session = replace(toy_runner(first={"n": 1}).session, store_option="small/store")
    message = why_the_store_failed(
        OSError(errno.ENOSPC, "No space left on device"), session
    )
    assert "cannot be used: no space left on device; committed outputs stay." in message
    assert "gc --store small/store lists deletable outputs)" in message
