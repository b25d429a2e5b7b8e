"""Liveness of flow runs: a run whose process has ended is marked as crashed instead of
running forever.

Prefect notices the end of a process only through the runner that started it. A run
started from a terminal has no runner, and a runner may be killed too; so every run
records its process in its labels, and processes that serve or start runs look for runs
with a dead process. Processes of other machines are ignored.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, cast
from uuid import UUID

from gristmill.core.heartbeats import Repetition
from gristmill.core.lease import ProcessIdentity, identity, is_alive, is_gone
from gristmill.core.processes import end_with_parent, wait_until

LABEL = "gristmill."
"""Facts about the process in a run's labels, each prefixed with `LABEL`."""
LOOK_SECONDS = 2.0
"""Interval of checking whether a run without a runner was cancelled."""
MARK_SECONDS = 15.0
"""Interval of looking for runs with a dead process."""
POLL_SECONDS = 0.2
MOST_RUNS = 200
"""Runs per request, the limit of Prefect's API."""
CANCELLED = "Cancelled; Retry or the same command resumes it."
log = logging.getLogger("gristmill.owners")


@contextmanager
def owned_run() -> Iterator[None]:
    """Record this process as the owner of the current flow run, and end with its
    parent.

    A run of a deployment ends with the runner that started it. One started from a
    terminal outlives it, and checks whether it is cancelled in the UI: then this
    process gets SIGTERM, and the run's state becomes Cancelled.
    """
    from prefect.runtime import deployment, flow_run

    run = UUID(str(flow_run.id))
    by_runner = deployment.id is not None
    labels = {
        f"{LABEL}{name}": value
        for name, value in identity(os.getpid()).items()
        if isinstance(value, int | str)
    }
    labels[f"{LABEL}runner"] = os.getppid() if by_runner else 0
    with (
        _display_errors("this run's process could not be recorded in Prefect"),
        _client() as client,
    ):
        client.update_flow_run_labels(run, labels)
    if by_runner:
        end_with_parent(signal.SIGTERM)
        yield
        return

    def end_if_cancelled() -> bool:
        with suppress(Exception):  # an unreachable server is no cancellation
            if _is_cancelled(run):
                cancelled_runs.add(run)
                os.kill(os.getpid(), signal.SIGTERM)
                return True
        return False

    with Repetition(end_if_cancelled, LOOK_SECONDS):
        yield


def is_being_cancelled() -> bool:
    """True if the current flow run is being cancelled; False if Prefect does not
    answer.
    """
    from prefect.runtime import flow_run

    with _display_errors("this run's state could not be read"):
        return _is_cancelled(UUID(str(flow_run.id)))
    return False


def mark_crashed(runner: int | None = None) -> list[str]:
    """Mark every run of this machine with a dead process as Crashed (or Cancelled, if
    that was requested).

    Args:
        runner: number of a process, to restrict this to its runs.

    Returns:
        names of the marked runs.
    """
    from prefect.client.schemas import filters
    from prefect.states import Cancelled, Crashed

    marked = []
    with _client() as client:
        for run in _open_runs(client):
            if not _is_ours(run.labels, runner) or is_alive(_owner(run.labels)):
                continue
            message = (
                f"Its process ({run.labels[LABEL + 'pid']}) is gone. Retry or "
                "the same command resumes it."
            )
            is_cancelling = run.state is not None and run.state.is_cancelling()
            # States are forced past Prefect's rules, as the dead process cannot propose
            # one.
            final_state = Cancelled if is_cancelling else Crashed
            client.set_flow_run_state(run.id, final_state(message=message), force=True)
            _mark_tasks(client, run.id, final_state(message=message))
            marked.append(run.name)
        # A runner marks only the run of a killed process, not its tasks.
        tasks = client.read_task_runs(
            flow_run_filter=filters.FlowRunFilter.model_validate(
                _in_states("CRASHED", "FAILED", "CANCELLED")
            ),
            task_run_filter=filters.TaskRunFilter.model_validate(_in_states("RUNNING")),
            limit=MOST_RUNS,
        )
        for run_id in {task.flow_run_id for task in tasks}:
            labels = client.read_flow_run(run_id).labels
            if _is_ours(labels, runner) and not is_alive(_owner(labels)):
                _mark_tasks(client, run_id, Crashed(message="Its process is gone."))
        _mark_cancelled_tasks(client, runner)
    return marked


def mark_crashed_quietly(runner: int | None = None) -> None:
    """`mark_crashed`, but a server that does not answer is only logged."""
    with _display_errors("runs with a dead process could not be looked up"):
        for name in mark_crashed(runner):
            log.warning("%s is marked as crashed: its process is gone", name)


def keep_marking() -> None:
    """Call `mark_crashed_quietly` every `MARK_SECONDS` from now on, in a thread."""
    mark_crashed_quietly()
    Repetition(mark_crashed_quietly, MARK_SECONDS)


def end_runs_of(runner: int, seconds: float) -> None:
    """Terminate the processes of a runner's flow runs, wait for them, and mark those
    that did not report their end.
    """
    with _display_errors("the runs of this runner could not be looked up"):
        with _client() as client:
            owners = [
                _owner(run.labels)
                for run in _open_runs(client)
                if _is_ours(run.labels, runner)
            ]
        for owner in filter(is_alive, owners):
            os.kill(owner["pid"], signal.SIGTERM)
        wait_until(lambda: not any(map(is_alive, owners)), seconds, POLL_SECONDS)
        mark_crashed_quietly(runner)


@contextmanager
def _display_errors(message: str) -> Iterator[None]:
    """Log errors of the display, which do not affect the work."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - Prefect's client raises errors of several libraries
        log.warning("%s: %s", message, error)


def _client() -> Any:
    from prefect.client.orchestration import get_client

    return get_client(sync_client=True)


def _is_cancelled(run: UUID) -> bool:
    with _client() as client:
        state = client.read_flow_run(run).state
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def _in_states(*names: str) -> dict[str, object]:
    """Content of a filter by state."""
    return {"state": {"type": {"any_": names}}}


def _open_runs(client: Any) -> list[Any]:
    """All flow runs shown as running or being cancelled."""
    from prefect.client.schemas.filters import FlowRunFilter

    open_filter = FlowRunFilter.model_validate(_in_states("RUNNING", "CANCELLING"))
    runs: list[Any] = []
    while True:
        page = client.read_flow_runs(
            flow_run_filter=open_filter, limit=MOST_RUNS, offset=len(runs)
        )
        runs += page
        if len(page) < MOST_RUNS:
            return runs


def _mark_tasks(client: Any, run: UUID, state: Any) -> None:
    """Set a final state for the unfinished tasks of a run."""
    from prefect.client.schemas.filters import FlowRunFilter

    run_filter = FlowRunFilter.model_validate({"id": {"any_": [run]}})
    for task in client.read_task_runs(flow_run_filter=run_filter):
        if task.state is not None and not task.state.is_final():
            client.set_task_run_state(task.id, state, force=True)


def _mark_cancelled_tasks(client: Any, runner: int | None = None) -> None:
    """Mark tasks of cancelled runs as cancelled: Prefect marks a task ended by SIGTERM
    as crashed.

    Tasks that crashed in an earlier attempt of such a run stay crashed.
    """
    from prefect.client.schemas import filters
    from prefect.states import Cancelled

    for task in client.read_task_runs(
        flow_run_filter=filters.FlowRunFilter.model_validate(_in_states("CANCELLED")),
        task_run_filter=filters.TaskRunFilter.model_validate(_in_states("CRASHED")),
        limit=MOST_RUNS,
    ):
        run = client.read_flow_run(task.flow_run_id)
        if _is_ours(run.labels, runner) and task.flow_run_run_count == run.run_count:
            client.set_task_run_state(task.id, Cancelled(message=CANCELLED), force=True)


def _owner(labels: Mapping[str, Any]) -> ProcessIdentity:
    keys = ProcessIdentity.__annotations__
    return cast(ProcessIdentity, {key: labels[LABEL + key] for key in keys})


def _is_ours(labels: Mapping[str, Any], runner: int | None) -> bool:
    """True if a run's process is or was on this machine."""
    if LABEL + "ticks" not in labels:
        return False
    if runner is not None and labels.get(LABEL + "runner") != runner:
        return False
    owner = _owner(labels)
    return is_alive(owner) or is_gone(owner)


cancelled_runs: set[UUID] = set()
"""Runs of this process that were cancelled in the UI."""


def show_cancelled() -> None:
    """Mark cancelled runs as Cancelled: Prefect marks a flow ended by SIGTERM as
    crashed.
    """
    from prefect.states import Cancelled

    while cancelled_runs:
        run = cancelled_runs.pop()
        with (
            _display_errors(
                "the cancellation of this run could not be recorded in Prefect"
            ),
            _client() as client,
        ):
            client.set_flow_run_state(run, Cancelled(message=CANCELLED), force=True)
            _mark_cancelled_tasks(client)
