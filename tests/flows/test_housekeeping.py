"""gc removes outputs that no recent run names; verify finds damage by checksum, and
repair makes the file again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gristmill.core.files import write_json
from gristmill.core.lease import acquire
from gristmill.flows.questions.status import find_damage, repair_damage, stage_states
from gristmill.flows.running.run import Runner
from gristmill.flows.running.run_records import collect
from tests.sessions import finish

Make = Callable[..., Runner]


def record_run(runner: Runner, name: str) -> None:
    stages = {
        stage: {"fingerprint": node.fingerprint}
        for stage, node in runner.session.plan.items()
    }
    write_json(
        runner.session.store.runs / name / "run.json", {"name": "toy", "stages": stages}
    )


@pytest.mark.slow
def test_gc_collects_only_outputs_unused_by_recent_runs(toy_runner: Make) -> None:
    old, new = finish(toy_runner(first={"n": 1})), finish(toy_runner(first={"n": 2}))
    record_run(old, "1")
    record_run(new, "2")
    assert collect(new.session.store, keep_runs=2, delete=False) == []
    ((path, size),) = collect(new.session.store, keep_runs=1, delete=False)
    assert path == old.folder("first").path
    assert size > 0
    assert old.folder("first").state() == "committed"
    collect(new.session.store, keep_runs=1, delete=True)
    assert (old.folder("first").state(), new.folder("first").state()) == (
        "missing",
        "committed",
    )


def test_gc_keeps_a_model_and_its_data_after_shorter_runs(toy_runner: Make) -> None:
    whole = finish(toy_runner(first={"n": 1}, second={}))
    record_run(whole, "1")
    for n in (2, 3):
        record_run(finish(toy_runner(first={"n": n})), str(n))
    garbage = [
        path for path, _ in collect(whole.session.store, keep_runs=1, delete=False)
    ]
    assert garbage == [toy_runner(first={"n": 2}).folder("first").path]


def test_gc_keeps_outputs_being_written(toy_runner: Make) -> None:
    runner = toy_runner(first={"n": 1})
    folder = runner.folder("first")
    folder.begin({})
    lease = acquire(folder.path / "lease", lambda owner: None, lambda: True)
    assert collect(runner.session.store, keep_runs=1, delete=True) == []
    assert lease is not None
    lease.release()
    assert [
        path for path, _ in collect(runner.session.store, keep_runs=1, delete=True)
    ] == [folder.path]


@pytest.mark.slow
def test_verify_withdraws_and_rebuilds_only_the_file_with_a_flipped_byte(
    toy_runner: Make,
) -> None:
    runner = finish(toy_runner(first={"n": 3}, second={}))
    session, folder = runner.session, runner.folder("second")
    kept = (folder.data / "0.txt").stat().st_mtime_ns
    (folder.data / "2.txt").write_bytes(b"5")
    damage = find_damage(session)
    assert list(damage) == ["second"]
    assert damage["second"] == [
        f"{folder.data / '2.txt'} has the committed size but not the committed checksum"
    ]
    repair_damage(session, damage)
    assert folder.state() == "unfinished"
    runner.run_stage("second")
    assert (folder.data / "2.txt").read_bytes() == b"4"
    assert (folder.data / "0.txt").stat().st_mtime_ns == kept
    assert find_damage(session) == {}


def test_status_distinguishes_committed_unfinished_running_and_missing(
    toy_runner: Make,
) -> None:
    runner = toy_runner(first={"n": 1}, second={})
    session = runner.session

    def states() -> list[str]:
        return [row.state for row in stage_states(session)]

    assert states() == ["missing", "missing"]
    runner.run_stage("first")
    runner.folder("second").begin({})
    assert states() == ["committed", "unfinished"]
    lease = acquire(
        runner.folder("second").path / "lease", lambda owner: None, lambda: True
    )
    assert states() == ["committed", "running"]
    assert lease is not None
    lease.release()
