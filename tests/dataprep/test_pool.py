"""Worker processes: they share the work, a dead one ends the job, none outlives its
parent.

One server per process forks the workers of all its jobs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.files import atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.readers.ingest import ingest_task
from gristmill.dataprep.runners.errors import WorkerError
from gristmill.dataprep.runners.pool import modules_of
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.mixtures.schema.engine import BeamEngine
from tests.dataprep.process_state import is_running
from tests.servers import wait_for

PATIENCE_SECONDS = 60
TASKS = [Task(f"t{n}", {"n": n}) for n in range(6)]


def context(work: Path, **settings: Any) -> Context:
    return Context(
        work,
        beam=BeamEngine(mode="processes", workers=2),
        emit=lambda event: None,
        **settings,
    )


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def report_pid(out: Path, task: Task) -> Done:
    """Let the first task wait for all others, so that the second worker does the
    rest.
    """
    if task.payload["n"] == 0:
        wait_for(
            lambda: len(list(out.glob("*.done"))) == len(TASKS) - 1,
            "the end of the other tasks",
        )
    path = out / f"{task.name}.done"
    with atomic_write(path) as sink:
        sink.write(b"done")
    return Done([path], {"pid": os.getpid(), "parent": os.getppid()})


def test_long_task_does_not_hold_up_the_others(tmp_path: Path) -> None:
    results = run_tasks(
        "job", TASKS, partial(report_pid, tmp_path), context(tmp_path / "work")
    )
    assert len({result["pid"] for result in results}) == 2
    (server,) = {result["parent"] for result in results}
    assert parent_of(server) == os.getpid()
    assert len({result["pid"] for result in results[1:]}) == 1
    assert not any(is_running(result["pid"]) for result in results)


def die(cause: str, task: Task) -> Done:
    if task.payload["n"] == 3:
        print("the last words", flush=True)
        if cause == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.Signals[cause])
    return Done([], {"n": task.payload["n"]})


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        ("SIGKILL", r"worker [01] \(pid \d+\) .*signal 9.*memory"),
        ("SIGSEGV", r"worker [01] \(pid \d+\) .*signal 11 \(SIGSEGV\)"),
        ("exit", r"worker [01] \(pid \d+\) .*exit code 7"),
    ],
)
def test_dead_worker_ends_the_job_with_the_cause_and_its_output(
    tmp_path: Path, cause: str, message: str
) -> None:
    with pytest.raises(WorkerError, match=message + "(?s:.*)the last words"):
        run_tasks("job", TASKS, partial(die, cause), context(tmp_path / "work"))


def die_beside_a_long_task(out: Path, task: Task) -> Done:
    """Kill the second worker while the first runs a task that does not end by
    itself.
    """
    if task.payload["n"] == 0:
        (out / "started").write_text(str(os.getpid()))
        signal.pause()
    wait_for((out / "started").exists, "the start of the long task")
    os.kill(os.getpid(), signal.SIGKILL)
    return Done()


def test_dead_worker_is_noticed_while_others_are_busy(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"worker 1 \(pid \d+\) .*signal 9"):
        run_tasks(
            "job",
            TASKS[:2],
            partial(die_beside_a_long_task, tmp_path),
            context(tmp_path / "work"),
        )
    assert not is_running(int((tmp_path / "started").read_text()))


def fail_on_three(task: Task) -> Done:
    if task.payload["n"] == 3:
        raise LookupError("three is not allowed")
    return Done([], {})


def test_task_error_keeps_its_type_and_names_the_task(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LookupError) as caught:
        run_tasks("job", TASKS, fail_on_three, context(tmp_path / "work"))
    assert str(caught.value) == "job/t3: LookupError: three is not allowed"
    assert "in fail_on_three" in caught.value.__notes__[0]
    output = capfd.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err


def say(task: Task) -> Done:
    print(f"task {task.name} says hello")
    return Done([], {})


def test_output_of_workers_goes_to_standard_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_tasks("job", TASKS, say, context(tmp_path / "work"))
    output = capfd.readouterr()
    assert output.out == ""
    assert sorted(line.partition(": ")[2] for line in output.err.splitlines()) == [
        f"task t{n} says hello" for n in range(6)
    ]


def tell_pids(task: Task) -> Done:
    return Done([], {"pid": os.getpid(), "server": os.getppid()})


def run(work: Path, process: Any = tell_pids) -> list[dict[str, Any]]:
    return run_tasks("job", TASKS, process, context(work))


@pytest.mark.slow
def test_jobs_of_a_process_share_a_server_but_no_workers(tmp_path: Path) -> None:
    first, second = run(tmp_path / "first"), run(tmp_path / "second")
    assert {result["server"] for result in first + second} == {first[0]["server"]}
    assert not {result["pid"] for result in first} & {
        result["pid"] for result in second
    }


def test_workers_have_the_folder_and_environment_of_the_jobs_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def see(task: Task) -> Done:
        """Local, so that it is pickled by value and not imported from the folder."""
        return Done(
            [],
            {
                "folder": os.getcwd(),
                **{name: os.environ[name] for name in ("SOME", "OMP_NUM_THREADS")},
            },
        )

    run(tmp_path / "before")
    monkeypatch.setenv("SOME", "set later")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.chdir(tmp_path)
    after = run(tmp_path / "after", see)
    assert after == [
        {"folder": str(tmp_path), "SOME": "set later", "OMP_NUM_THREADS": "3"}
    ] * len(TASKS)


def kill_server(task: Task) -> Done:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
    return Done()


@pytest.mark.slow
def test_killed_server_ends_the_job_and_the_next_job_starts_another(
    tmp_path: Path,
) -> None:
    with pytest.raises(WorkerError, match=r"worker [01] \(pid \d+\) "):
        run(tmp_path / "killed", kill_server)
    assert len(run(tmp_path / "next")) == len(TASKS)


def test_only_package_modules_are_imported_before_the_fork() -> None:
    assert list(modules_of(partial(partial(ingest_task, "out"), 5))) == [
        "gristmill.dataprep.readers.ingest"
    ]
    assert list(modules_of(partial(run_tasks, ingest_task))) == [
        "gristmill.dataprep.runners.tasks",
        "gristmill.dataprep.readers.ingest",
    ]
    assert not list(modules_of(tell_pids))
    assert not list(modules_of(partial(len)))


SCRIPT = """
    import os, sys, time
    from pathlib import Path
    from gristmill.core.stage_context import Context
    from gristmill.mixtures.schema.engine import BeamEngine
    from gristmill.dataprep.runners.tasks import Done, Task, run_tasks

    folder = Path(sys.argv[1])

    def wait(task):
        (folder / f"{task.name}.pid").write_text(f"{os.getpid()} {os.getppid()}")
        time.sleep(600)

    run_tasks("job", [Task("a"), Task("b")], wait, Context(folder / "work", beam=BeamEngine(workers=2, mode="processes")))
"""


@pytest.mark.parametrize("mode", ["memory", "threads", "processes"])
def test_interrupt_reaches_the_caller(tmp_path: Path, mode: str) -> None:
    def interrupt(parent: int, task: Task) -> Done:
        os.kill(parent, signal.SIGINT)
        return Done()

    with pytest.raises(KeyboardInterrupt):
        run_tasks(
            "job",
            TASKS,
            partial(interrupt, os.getpid()),
            Context(
                tmp_path,
                beam=BeamEngine(mode=mode, workers=2),  # type: ignore[arg-type]
                emit=lambda event: None,
            ),
        )


FORGOTTEN = """
    import pickle
    from gristmill.dataprep.runners.pool import Worker, start_fork_server

    start_fork_server(print)
    worker = Worker(0, pickle.dumps(print))
"""


def test_worker_that_no_job_ends_does_not_outlive_the_process() -> None:
    """A second interrupt can end a job before it has killed all workers."""
    command = [sys.executable, "-c", textwrap.dedent(FORGOTTEN)]
    subprocess.run(command, check=True, timeout=PATIENCE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_and_server_end_with_their_parent(
    tmp_path: Path, number: signal.Signals
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        files = [tmp_path / "a.pid", tmp_path / "b.pid"]
        wait_for(
            lambda: all(path.exists() and path.read_text() for path in files),
            "the start of both workers",
        )
        parent.send_signal(number)
        assert parent.wait(PATIENCE_SECONDS) != 0
        started = {int(pid) for path in files for pid in path.read_text().split()}
        assert len(started) == 3
        wait_for(
            lambda: not any(map(is_running, started)),
            "the end of the workers and their server",
        )
    finally:
        parent.kill()
        parent.wait()
