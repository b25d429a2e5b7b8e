"""Jobs on a real Dask cluster over TCP: results, killed workers, errors."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gristmill.core.files import atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners import futures
from gristmill.dataprep.runners.errors import WorkerError
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.dataprep.user_code import annotate
from gristmill.mixtures.schema.engine import BeamEngine
from tests.dataprep.dask_processes import Cluster
from tests.dataprep.own_steps import TEXTS, step, write_documents, written

TASKS = [Task(f"t{n}", {"n": n}) for n in range(6)]


def context(work: Path, address: str, **settings: Any) -> Context:
    return Context(
        work=work,
        emit=lambda event: None,
        beam=BeamEngine(runner="dask", address=address, workers=2, **settings),
    )


def square(out: Path, task: Task) -> Done:
    with atomic_write(out / f"{task.name}.txt") as sink:
        sink.write(str(task.payload["n"] ** 2).encode())
    return Done(
        [out / f"{task.name}.txt"], {"n": task.payload["n"], "pid": os.getpid()}
    )


@pytest.mark.slow
def test_cluster_workers_run_the_tasks(tmp_path: Path, cluster: Cluster) -> None:
    results = run_tasks(
        "job",
        TASKS,
        partial(square, tmp_path),
        context(tmp_path / "work", cluster.address),
    )
    assert [result["n"] for result in results] == list(range(6))
    assert [(tmp_path / f"t{n}.txt").read_text() for n in range(6)] == [
        "0",
        "1",
        "4",
        "9",
        "16",
        "25",
    ]
    assert {result["pid"] for result in results} <= {
        worker.pid for worker in cluster.workers
    }


@pytest.mark.slow
def test_cluster_workers_get_user_code_by_value(
    tmp_path: Path, cluster: Cluster
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "words.py").write_text(
        "def count(text):\n    return len(text.split())\n"
    )
    config = step(
        tmp_path / "code",
        "import words\ndef step(text: str) -> int:\n    return words.count(text)\n",
    )
    shutil.rmtree(tmp_path / "code")
    documents = write_documents(tmp_path / "ingest", 2)
    annotate.run(
        {"ingest": documents},
        config,
        tmp_path / "out",
        context(tmp_path / "work", cluster.address),
    )
    assert [row["step"] for row in written(tmp_path / "out")] == [
        len(text.split()) for text in TEXTS
    ] * 2


def fail_on_three(task: Task) -> Done:
    if task.payload["n"] == 3:
        raise LookupError("three is not allowed")
    return Done([], {})


def test_task_error_keeps_its_type_and_names_the_task(
    tmp_path: Path, cluster: Cluster
) -> None:
    with pytest.raises(LookupError) as caught:
        run_tasks(
            "job", TASKS, fail_on_three, context(tmp_path / "work", cluster.address)
        )
    assert str(caught.value) == "job/t3: LookupError: three is not allowed"


def die_once(out: Path, task: Task) -> Done:
    """Kill the worker in the middle of one task, the first time."""
    if task.payload["n"] == 3 and not (out / "died").exists():
        (out / "died").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    with atomic_write(out / f"{task.name}.txt") as sink:
        sink.write(str(task.payload["n"]).encode())
    return Done([out / f"{task.name}.txt"], {"n": task.payload["n"]})


def test_killed_worker_is_replaced(tmp_path: Path, cluster: Cluster) -> None:
    cluster.add_worker()
    results = run_tasks(
        "job",
        TASKS,
        partial(die_once, tmp_path),
        context(tmp_path / "work", cluster.address),
    )
    assert [result["n"] for result in results] == list(range(6))
    dead = [worker.pid for worker in cluster.workers if worker.poll() is not None]
    assert dead == [int((tmp_path / "died").read_text())]


def die(pid: int | None, task: Task) -> Done:
    """Kill a process, by default the worker."""
    os.kill(os.getpid() if pid is None else pid, signal.SIGKILL)
    return Done([], {})


@pytest.mark.slow
def test_task_that_kills_every_worker_ends_the_job(tmp_path: Path) -> None:
    strict = Cluster(tmp_path, allowed_failures=0)
    try:
        strict.add_worker()
        with pytest.raises(WorkerError, match=r"Dask.*memory"):
            run_tasks(
                "job",
                TASKS[:1],
                partial(die, None),
                context(tmp_path / "work", strict.address),
            )
    finally:
        strict.close()


@pytest.mark.slow
def test_scheduler_that_dies_ends_the_job(tmp_path: Path) -> None:
    doomed = Cluster(tmp_path)
    try:
        doomed.add_worker()
        with pytest.raises(WorkerError, match="Dask scheduler"):
            run_tasks(
                "job",
                TASKS,
                partial(die, doomed.scheduler.pid),
                context(tmp_path / "work", doomed.address),
            )
    finally:
        doomed.close()


def test_unreachable_scheduler_is_named_with_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "CONNECT_SECONDS", 0.5)
    with pytest.raises(
        WorkerError, match=r"Dask scheduler .*tcp://127.*:9 .*engine\.address"
    ):
        run_tasks(
            "job", TASKS, fail_on_three, context(tmp_path / "work", "tcp://127.0.0.1:9")
        )


@pytest.mark.slow
def test_scheduler_without_workers_is_rejected_with_the_setting(tmp_path: Path) -> None:
    empty = Cluster(tmp_path)
    try:
        with pytest.raises(
            WorkerError, match=r"worker .*0\.5 s \(engine\.worker_seconds\)"
        ):
            run_tasks(
                "job",
                TASKS,
                fail_on_three,
                context(tmp_path / "work", empty.address, worker_seconds=0.5),
            )
    finally:
        empty.close()
