"""The fork server: one for all jobs of a process, workers as if started by themselves, nothing left when it is gone."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gristmill.dataprep.context import Context
from gristmill.dataprep.jobs.engine import Done, Task, run_tasks
from gristmill.dataprep.jobs.fork_server import fork_server, module_of
from gristmill.dataprep.jobs.job_errors import WorkerError
from gristmill.dataprep.reading.ingest import ingest_task

TASKS = [Task(f"t{n}", {"n": n}) for n in range(4)]


def tell_pids(task: Task) -> Done:
    return Done([], {"pid": os.getpid(), "server": os.getppid()})


def run(work: Path, process: Any = tell_pids) -> list[dict[str, Any]]:
    return run_tasks("job", TASKS, process, Context(work=work, emit=lambda event: None, mode="processes", workers=2))


def test_the_jobs_of_a_process_share_a_server_but_no_workers(tmp_path: Path) -> None:
    first, second = run(tmp_path / "first"), run(tmp_path / "second")
    assert {result["server"] for result in first + second} == {first[0]["server"]}
    assert not {result["pid"] for result in first} & {result["pid"] for result in second}


def test_workers_have_the_folder_and_the_environment_of_when_the_job_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def see(task: Task) -> Done:
        """In here, so that it is sent as it is, and need not be found below the folder."""
        return Done([], {"folder": os.getcwd(), **{name: os.environ[name] for name in ("SOME", "OMP_NUM_THREADS")}})

    run(tmp_path / "before")
    monkeypatch.setenv("SOME", "set later")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.chdir(tmp_path)
    after = run(tmp_path / "after", see)
    assert after == [{"folder": str(tmp_path), "SOME": "set later", "OMP_NUM_THREADS": "3"}] * len(TASKS)


def kill_server(task: Task) -> Done:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
    return Done()


def test_a_server_that_is_killed_ends_the_job_and_the_next_job_starts_another(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"worker [01] \(pid \d+\) was killed by signal 9"):
        run(tmp_path / "killed", kill_server)
    assert len(run(tmp_path / "next")) == len(TASKS)
    assert fork_server().is_running


def test_only_modules_of_the_package_are_imported_before_the_fork() -> None:
    assert module_of(partial(partial(ingest_task, "out"), 5)) == "gristmill.dataprep.reading.ingest"
    assert module_of(tell_pids) == ""
    assert module_of(partial(len)) == ""
