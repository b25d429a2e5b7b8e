"""Engine processes killed in the middle of a job: it completes, or ends with one
error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.clusters import PATIENCE_SECONDS, Cluster, running
from gristmill.core.files import atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners import futures, servers
from gristmill.dataprep.runners.errors import MissingEngineError, WorkerError
from gristmill.dataprep.runners.shared_driver import Driver
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.mixtures.schema.engine import BeamEngine
from tests.dataprep.process_state import is_running
from tests.servers import wait_for

TASKS = [Task(f"t{n}", {"n": n}) for n in range(6)]
MOST_SECONDS = 120.0


def square(out: Path, task: Task) -> Done:
    """Write the square of a number; the third task waits until a process has been
    killed.
    """
    if task.payload["n"] == 3:
        (out / "reached").touch()
        deadline = time.monotonic() + MOST_SECONDS
        while not (out / "killed").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    with atomic_write(out / f"{task.name}.txt") as sink:
        sink.write(str(task.payload["n"] ** 2).encode())
    return Done([out / f"{task.name}.txt"], {"n": task.payload["n"]})


def descendants(pid: int) -> Iterator[int]:
    """Ids of the processes below one."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


@contextmanager
def killing(out: Path, find: Callable[[], int]) -> Iterator[None]:
    """Kill the process that `find` returns once the third task waits."""

    out.mkdir(exist_ok=True)

    def kill() -> None:
        wait_for((out / "reached").exists, "the third task")
        os.kill(find(), signal.SIGKILL)
        (out / "killed").touch()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    yield
    thread.join()
    assert (out / "killed").exists()


def do(cluster: Cluster, out: Path, find: Callable[[], int]) -> list[Any]:
    with killing(out, find):
        return list(
            run_tasks(
                "job",
                TASKS,
                partial(square, out),
                Context(
                    work=out / "work",
                    stage="toy",
                    emit=lambda event: None,
                    beam=BeamEngine(**cluster.engine),
                ),
            )
        )


@pytest.fixture
def clusters(tmp_path: Path) -> Callable[[str], Any]:
    """Start an engine by name; skips the test where it is not installed."""

    @contextmanager
    def start(name: str) -> Iterator[Cluster]:
        try:
            with running(name, tmp_path) as cluster:
                yield cluster
        except MissingEngineError as error:
            pytest.skip(str(error))

    return start


def check(results: list[Any], out: Path) -> None:
    assert [result["n"] for result in results] == list(range(6))
    assert [(out / f"t{n}.txt").read_text() for n in range(6)] == [
        str(n * n) for n in range(6)
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_spark_completes_without_an_executor_a_worker_and_its_master(
    clusters: Callable[[str], Any], tmp_path: Path
) -> None:
    def find(killed: str) -> int:
        pids = [pid for process in cluster.processes for pid in process_tree(process)]
        return next(
            pid
            for pid in pids
            if killed.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        )

    with clusters("spark") as cluster:
        for killed in (
            "CoarseGrainedExecutorBackend",
            "deploy.worker.Worker",
            "deploy.master.Master",
        ):
            check(
                do(cluster, tmp_path / killed, partial(find, killed)), tmp_path / killed
            )


def process_tree(process: subprocess.Popen[bytes]) -> list[int]:
    """Ids of a process and its descendants; empty if it has ended."""
    return (
        [] if process.poll() is not None else [process.pid, *descendants(process.pid)]
    )


WAITING = """
import time

def wait_for_ever(text):
    open({path!r}, "w").close()
    time.sleep(600)
    return {{"length": len(text)}}
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", ["spark", "ray"])
def test_interrupted_run_ends_its_processes_and_prints_the_resume_command(
    name: str,
    number: signal.Signals,
    clusters: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "steps.py").write_text(WAITING.format(path=str(tmp_path / "reached")))
    with clusters(name) as cluster:
        cluster.engine["worker_seconds"] = PATIENCE_SECONDS
        (tmp_path / "m.yaml").write_text(
            json.dumps(
                {
                    "name": "stopped",
                    "sources": {"docs": {"path": str(tmp_path / "docs.jsonl")}},
                    "prepare": [{"annotate": {"use": "./steps.py:wait_for_ever"}}],
                    "engine": cluster.engine,
                }
            )
        )
        with subprocess.Popen(
            [
                sys.executable,
                "-m",
                "gristmill",
                "run",
                str(tmp_path / "m.yaml"),
                "--no-ui",
                "--store",
                str(tmp_path / "store"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as run:
            wait_for(
                lambda: (tmp_path / "reached").exists() or run.poll() is not None,
                "the step on the cluster",
            )
            children = [*descendants(run.pid), *ray_workers(cluster)]
            run.send_signal(number)
            output = run.communicate(timeout=120)[0]
        assert run.returncode == 130, output
        assert "interrupted; resume with: " in output
        assert "Traceback" not in output
        wait_for(
            lambda: not any(map(is_running, children)),
            "the end of what the run had started",
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_flink_completes_without_its_job_server_and_a_taskmanager(
    clusters: Callable[[str], Any], tmp_path: Path
) -> None:
    def find_server() -> int:
        return next(
            server.process.pid
            for name, server in servers._running.items()
            if name.startswith("Flink ")
        )

    def find_taskmanager() -> int:
        return next(
            process.pid
            for process in cluster.processes
            if any(descendants(process.pid))
        )

    with clusters("flink") as cluster:
        # so that there is a TaskManager to spare
        cluster.engine["options"]["parallelism"] = 1
        cluster.engine["worker_seconds"] = PATIENCE_SECONDS
        for name, find in (("server", find_server), ("taskmanager", find_taskmanager)):
            check(do(cluster, tmp_path / name, find), tmp_path / name)


def ray_workers(cluster: Cluster) -> list[int]:
    """Processes of Ray that run our tasks, whose titles have their names."""
    pids = [pid for process in cluster.processes for pid in process_tree(process)]
    return [pid for pid in pids if title(pid).startswith("ray::gristmill")]


def title(pid: int) -> str:
    """Title of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_completes_without_a_worker_process_and_a_node(
    clusters: Callable[[str], Any], tmp_path: Path
) -> None:
    def find_node() -> int:
        status = Path(f"/proc/{ray_workers(cluster)[0]}/status").read_text()
        parent = int(status.partition("PPid:")[2].split()[0])
        assert "raylet" in title(parent)
        return parent

    with clusters("ray") as cluster:
        cluster.engine["worker_seconds"] = PATIENCE_SECONDS
        for name, find in (
            ("worker", lambda: ray_workers(cluster)[0]),
            ("node", find_node),
        ):
            check(do(cluster, tmp_path / name, find), tmp_path / name)


def run_squares(cluster: Cluster, out: Path) -> list[Any]:
    """Run the tasks; none waits."""
    out.mkdir(exist_ok=True)
    (out / "killed").touch()
    context = Context(
        work=out / "work",
        stage="toy",
        emit=lambda event: None,
        beam=BeamEngine(**cluster.engine),
    )
    return list(run_tasks("job", TASKS, partial(square, out), context))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_job_without_a_head_of_ray_ends_and_is_done_on_another(
    clusters: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "HEAD_SECONDS", 1.0)
    with clusters("ray") as cluster:
        cluster.engine["worker_seconds"] = PATIENCE_SECONDS
        check(run_squares(cluster, tmp_path / "first"), tmp_path / "first")
        head = process_tree(cluster.processes[0])
        os.kill(next(pid for pid in head if "gcs_server" in title(pid)), signal.SIGKILL)
        with pytest.raises(WorkerError, match="head of Ray"):
            run_squares(cluster, tmp_path / "second")
    with clusters("ray") as cluster:
        cluster.engine["worker_seconds"] = PATIENCE_SECONDS
        check(run_squares(cluster, tmp_path / "second"), tmp_path / "second")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["spark", "ray", "dask"])
def test_job_completes_without_the_driver_of_its_run(
    name: str,
    clusters: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with clusters(name) as cluster:
        cluster.engine["worker_seconds"] = PATIENCE_SECONDS
        driver = Driver(BeamEngine(**cluster.engine))
        for variable, value in driver.environment.items():
            monkeypatch.setenv(variable, value)
        check(do(cluster, tmp_path, lambda: driver.pid), tmp_path)
        assert not driver.is_running()
        driver.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_job_resumes_on_another_dask_scheduler(
    clusters: Callable[[str], Any], tmp_path: Path
) -> None:
    with (
        clusters("dask") as cluster,
        pytest.raises(WorkerError, match="Dask scheduler"),
    ):
        do(cluster, tmp_path, lambda: cluster.processes[0].pid)
    (tmp_path / "scheduler.json").unlink()
    with clusters("dask") as cluster:
        check(run_squares(cluster, tmp_path), tmp_path)
