"""Runs whose process is gone are shown as crashed, other runs stay unchanged; a run
that is cancelled in the UI ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.core.lease import identity
from gristmill.flows.prefect import flow_liveness


@dataclass
class Server:
    """A fake of Prefect's client for the functions under test."""

    runs: list[Any] = field(default_factory=list)
    tasks: list[Any] = field(default_factory=list)
    silent: bool = False

    def __enter__(self) -> Server:
        if self.silent:
            raise ConnectionError("no answer")
        return self

    def __exit__(self, *_: object) -> None:
        return

    def add(
        self,
        name: str,
        state: Any,
        owner: dict[str, Any] | None,
        runner: int = 0,
        task: Any = None,
        attempt_of_task: int = 1,
    ) -> Any:
        labels = (
            {}
            if owner is None
            else {f"gristmill.{key}": value for key, value in owner.items()}
        )
        run = SimpleNamespace(
            id=uuid.uuid4(),
            name=name,
            state=state,
            labels={**labels, "gristmill.runner": runner},
            run_count=1,
        )
        self.runs.append(run)
        if task is not None:
            self.tasks.append(
                SimpleNamespace(
                    id=uuid.uuid4(),
                    flow_run_id=run.id,
                    state=task,
                    flow_run_run_count=attempt_of_task,
                )
            )
        return run

    def read_flow_runs(
        self, flow_run_filter: Any, limit: int, offset: int
    ) -> list[Any]:
        state_types = flow_run_filter.state.type.any_
        return [run for run in self.runs if run.state.type in state_types][
            offset : offset + limit
        ]

    def read_flow_run(self, run: uuid.UUID) -> Any:
        return next(candidate for candidate in self.runs if candidate.id == run)

    def read_task_runs(
        self, flow_run_filter: Any, task_run_filter: Any = None, limit: int = 0
    ) -> list[Any]:
        if flow_run_filter.id is not None:
            return [
                task
                for task in self.tasks
                if task.flow_run_id in flow_run_filter.id.any_
            ]
        ended_runs = {
            run.id
            for run in self.runs
            if run.state.type in flow_run_filter.state.type.any_
        }
        return [
            task
            for task in self.tasks
            if task.flow_run_id in ended_runs
            and task.state.type in task_run_filter.state.type.any_
        ]

    def set_flow_run_state(self, run: uuid.UUID, state: Any, force: bool) -> None:
        assert force, "the owner is gone, so the state must be forced"
        self.read_flow_run(run).state = state

    def set_task_run_state(self, task: uuid.UUID, state: Any, force: bool) -> None:
        assert force, "the owner is gone, so the state must be forced"
        next(
            candidate for candidate in self.tasks if candidate.id == task
        ).state = state

    def update_flow_run_labels(self, run: uuid.UUID, labels: dict[str, Any]) -> None:
        self.read_flow_run(run).labels.update(labels)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    fake = Server()
    monkeypatch.setattr(
        "prefect.client.orchestration.get_client", lambda sync_client: fake
    )
    return fake


@pytest.fixture(scope="module")
def gone() -> dict[str, Any]:
    """Identity of an ended process."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process_identity = identity(child.pid)
    child.kill()
    child.wait()
    return process_identity


def states(server: Server) -> dict[str, str]:
    return {run.name: run.state.name for run in server.runs}


def test_only_local_runs_of_dead_processes_are_marked_crashed(
    server: Server, gone: dict[str, Any]
) -> None:
    from prefect.states import Cancelling, Completed, Running

    server.add("gone", Running(), gone, task=Running())
    server.add("gone while cancelled", Cancelling(), gone, task=Running())
    server.add("alive", Running(), identity(os.getpid()), task=Running())
    server.add("elsewhere", Running(), {**gone, "host": "another", "boot": "another"})
    server.add("not ours", Running(), None)
    server.add("over", Completed(), gone)
    assert flow_liveness.mark_crashed() == ["gone", "gone while cancelled"]
    assert states(server) == {
        "gone": "Crashed",
        "gone while cancelled": "Cancelled",
        "alive": "Running",
        "elsewhere": "Running",
        "not ours": "Running",
        "over": "Completed",
    }
    assert [task.state.name for task in server.tasks] == [
        "Crashed",
        "Cancelled",
        "Running",
    ]
    assert f"process ({gone['pid']}) is gone" in server.runs[0].state.message


def test_runner_marks_only_its_own_runs_crashed(
    server: Server, gone: dict[str, Any]
) -> None:
    from prefect.states import Running

    server.add("mine", Running(), gone, runner=7)
    server.add("another's", Running(), gone, runner=8)
    assert flow_liveness.mark_crashed(7) == ["mine"]
    assert states(server) == {"mine": "Crashed", "another's": "Running"}


def test_running_tasks_of_a_crashed_run_are_marked_crashed(
    server: Server, gone: dict[str, Any]
) -> None:
    from prefect.states import Completed, Crashed, Running

    for task in (Running(), Completed()):
        server.add("crashed", Crashed(), gone, task=task)
    server.add("elsewhere", Crashed(), {**gone, "host": "another"}, task=Running())
    assert flow_liveness.mark_crashed() == []
    assert [task.state.name for task in server.tasks] == [
        "Crashed",
        "Completed",
        "Running",
    ]


def test_tasks_of_a_cancelled_run_are_marked_cancelled(
    server: Server, gone: dict[str, Any]
) -> None:
    from prefect.states import Cancelled, Completed, Crashed

    for task in (Crashed(), Completed()):
        server.add("cancelled", Cancelled(), gone, task=task)
    server.add("cancelled later", Cancelled(), gone, task=Crashed(), attempt_of_task=0)
    server.add("crashed", Crashed(), gone, task=Crashed())
    server.add("elsewhere", Cancelled(), {**gone, "host": "another"}, task=Crashed())

    assert flow_liveness.mark_crashed() == []

    assert [task.state.name for task in server.tasks] == [
        "Cancelled",
        "Completed",
        "Crashed",
        "Crashed",
        "Crashed",
    ]


def test_runs_beyond_the_first_page_are_found(
    server: Server, gone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.states import Running

    monkeypatch.setattr(flow_liveness, "MOST_RUNS", 2)
    for number in range(5):
        server.add(f"run {number}", Running(), gone)
    assert flow_liveness.mark_crashed() == [f"run {number}" for number in range(5)]


def test_unreachable_server_does_not_stop_a_run(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.silent = True
    flow_liveness.mark_crashed_quietly()
    flow_liveness.end_runs_of(1, seconds=0)
    flow_liveness.cancelled_runs.add(uuid.uuid4())
    flow_liveness.show_cancelled()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "runs with a dead process could not be looked up",
        "the runs of this runner could not be looked up",
        "the cancellation of this run could not be recorded in Prefect",
    ]
    assert flow_liveness.cancelled_runs == set()


def test_ending_runner_terminates_its_runs_and_marks_them_crashed(
    server: Server,
) -> None:
    from prefect.states import Running

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    server.add("mine", Running(), identity(child.pid), runner=7)
    server.add("another's", Running(), identity(os.getpid()), runner=8)
    flow_liveness.end_runs_of(7, seconds=20)
    assert child.wait() == -signal.SIGTERM
    assert states(server) == {"mine": "Crashed", "another's": "Running"}


@pytest.fixture
def current(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A flow run of this process, without a deployment."""
    from prefect.runtime import deployment, flow_run
    from prefect.states import Running

    run = server.add("current", Running(), None)
    monkeypatch.setattr(flow_run, "id", run.id, raising=False)
    monkeypatch.setattr(deployment, "id", None, raising=False)
    monkeypatch.setattr(flow_liveness, "LOOK_SECONDS", 0.01)
    yield run
    flow_liveness.cancelled_runs.clear()


def test_terminal_run_labels_its_process_and_ends_when_cancelled(
    server: Server, current: Any
) -> None:
    from prefect.states import Cancelling, Crashed

    terminated = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    try:
        with flow_liveness.owned_run():
            assert current.labels["gristmill.pid"] == os.getpid()
            assert current.labels["gristmill.runner"] == 0
            current.state = Cancelling()
            assert terminated.wait(timeout=20)
    finally:
        signal.signal(signal.SIGTERM, previous)
    # Prefect reports a flow that SIGTERM ended as crashed.
    current.state = Crashed()
    flow_liveness.show_cancelled()
    assert current.state.name == "Cancelled"


def test_uncancelled_run_keeps_its_final_state(
    current: Any,
) -> None:
    with flow_liveness.owned_run():
        pass
    flow_liveness.show_cancelled()
    assert current.state.name == "Running"
