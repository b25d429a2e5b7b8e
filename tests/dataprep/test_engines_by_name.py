"""Flink, Spark and other engines by name: startup, results, and failures
before work begins.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.clusters import (
    PATIENCE_SECONDS,
    find_engine,
    running,
    start_pool,
)
from gristmill.core.files import atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners import cluster_retry, connections, portable, spark
from gristmill.dataprep.runners.errors import MissingEngineError, WorkerError
from gristmill.dataprep.runners.portable import flink_options
from gristmill.dataprep.runners.runner import wait_no_longer
from gristmill.dataprep.runners.shared_driver import Driver
from gristmill.dataprep.runners.tasks import Done, Task, run_tasks
from gristmill.dataprep.runners.worker import end_worker, pool_type
from gristmill.dataprep.runners.worker_bootstrap import PRELOADED
from gristmill.mixtures.schema.engine import BeamEngine
from tests.servers import wait_for

TASKS = [Task(f"t{n}", {"n": n}) for n in range(6)]


def context(work: Path, **settings: Any) -> Context:
    return Context(work, "toy", BeamEngine(**settings), emit=lambda event: None)


def square(out: Path, fatal: int | None, task: Task) -> Done:
    """Write the square of a number; the process of the task `fatal` is killed the first
    time.
    """
    if task.payload["n"] == fatal and not (out / "died").exists():
        (out / "died").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    with atomic_write(out / f"{task.name}.txt") as sink:
        sink.write(str(task.payload["n"] ** 2).encode())
    return Done(
        [out / f"{task.name}.txt"],
        {
            "n": task.payload["n"],
            "pid": os.getpid(),
            "is_preloaded": PRELOADED[-1] in sys.modules,
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flink", "spark", "ray"])
@pytest.mark.timeout(1800)
def test_engine_processes_do_the_work_and_survive_a_kill(
    name: str, tmp_path: Path
) -> None:
    """On Flink with workers that the engine starts (PROCESS) and with those of a pool
    (EXTERNAL).
    """
    try:
        with running(name, tmp_path) as cluster:
            cluster.engine["worker_seconds"] = PATIENCE_SECONDS
            check_jobs(cluster.engine, tmp_path / "own")
            if name == "flink":
                pool = {
                    "environment_type": "EXTERNAL",
                    "environment_config": start_pool(cluster, tmp_path),
                }
                options = {**cluster.engine["options"], **pool}
                check_jobs({**cluster.engine, "options": options}, tmp_path / "pool")
    except MissingEngineError as error:
        pytest.skip(str(error))


def check_jobs(engine: Mapping[str, Any], folder: Path) -> None:
    """Run a job, one whose worker is killed, and one whose task raises."""
    results = run_tasks(
        "calm", TASKS, partial(square, folder, None), context(folder / "work", **engine)
    )
    assert [result["n"] for result in results] == list(range(6))
    assert os.getpid() not in {result["pid"] for result in results}
    results = run_tasks(
        "fatal", TASKS, partial(square, folder, 3), context(folder / "work", **engine)
    )
    assert [result["n"] for result in results] == list(range(6))
    assert (folder / "died").exists()
    with pytest.raises(
        LookupError, match=r"^failing/t2: LookupError: two is not allowed"
    ):
        run_tasks("failing", TASKS, fail_on_two, context(folder / "work", **engine))


def wait_for_a_signal(*_told: str | None) -> None:
    signal.pause()


def test_pool_does_not_end_the_equally_named_worker_of_another_machine() -> None:
    """Two TaskManagers of Flink each have a worker 1-1."""
    from apache_beam.portability.api import beam_fn_api_pb2

    pool = pool_type()(wait_for_a_signal)
    earlier_processes = multiprocessing.active_children()

    def start(name: str) -> None:
        assert not pool.StartWorker(
            beam_fn_api_pb2.StartWorkerRequest(worker_id=name), None
        ).error

    threads = [threading.Thread(target=start, args=("1-1",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    namesakes = [
        process
        for process in multiprocessing.active_children()
        if process not in earlier_processes
    ]
    start("2-1")
    single = pool.workers["2-1"]
    try:
        for name in ("1-1", "2-1"):
            pool.StopWorker(beam_fn_api_pb2.StopWorkerRequest(worker_id=name), None)
        assert [process.is_alive() for process in (*namesakes, single)] == [
            True,
            True,
            False,
        ]
    finally:
        for process in (*namesakes, single):
            end_worker(process)


def fail_on_two(task: Task) -> Done:
    if task.payload["n"] == 2:
        raise LookupError("two is not allowed")
    return Done()


def test_flink_job_server_listens_on_the_loopback_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Sequence[str]] = []

    def job_server(name: str, command: Callable[[int, Path], Sequence[str]]) -> str:
        commands.append(command(8099, tmp_path))
        return "127.0.0.1:8099"

    monkeypatch.setattr(portable, "job_server", job_server)
    java, jar = tmp_path / "java", tmp_path / "server.jar"
    java.write_text("#!/bin/sh\n")
    java.chmod(0o700)
    jar.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    options = flink_options(
        "flink:8081",
        {"flink_job_server_jar": str(jar), "parallelism": 2},
    )
    assert {name: options[name] for name in ("job_endpoint", "parallelism")} == {
        "job_endpoint": "127.0.0.1:8099",
        "parallelism": 2,
    }
    assert "flink_job_server_jar" not in options
    [command] = commands
    assert command[:4] == [str(java), "-Xmx512m", "-jar", str(jar)]
    assert {
        "--flink-master=flink:8081",
        "--job-host=127.0.0.1",
        "--job-port=8099",
    } <= set(command)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, "flink_job_server_jar"),
        ({"flink_job_server_jar": "/nowhere.jar"}, "/nowhere.jar"),
    ],
)
def test_missing_flink_job_server_is_named(
    options: Mapping[str, Any],
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingEngineError, match=missing):
        flink_options("flink:8081", options)


def test_flink_job_server_needs_java(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "server.jar").write_text("")
    with pytest.raises(MissingEngineError, match="Java"):
        flink_options(
            "flink:8081", {"flink_job_server_jar": str(tmp_path / "server.jar")}
        )


@pytest.mark.slow
def test_spark_connections_do_not_share_environment_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second connection's workers run the interpreter that its own options name."""
    ours = ("PYSPARK_PYTHON", "SPARK_LOCAL_IP")
    before = [os.environ.get(name) for name in ours]
    another = tmp_path / "python"
    another.write_text(
        f'#!/bin/sh\ntouch {tmp_path / "asked"}\nexec {sys.executable} "$@"\n'
    )
    another.chmod(another.stat().st_mode | stat.S_IXUSR)
    try:
        monkeypatch.setenv("SPARK_HOME", str(find_engine("spark-*")))
        for options in ({}, {"spark.pyspark.python": str(another)}):
            engine = BeamEngine(runner="spark", address="local[1]", options=options)
            results = run_tasks(
                "calm",
                TASKS,
                partial(square, tmp_path, None),
                context(tmp_path / f"work-{len(options)}", **engine.model_dump()),
            )
            assert [result["n"] for result in results] == list(range(6))
            assert [os.environ.get(name) for name in ours] == before
            assert (tmp_path / "asked").exists() == bool(options)
    except MissingEngineError as error:
        pytest.skip(str(error))
    finally:
        connections.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spark", "ray", "dask"])
def test_stages_share_the_connection_of_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of several processes meet the same workers, which are probed once; `cancel`
    ends those of one. Spark forks its workers from a process that has imported the package.
    """
    try:
        with running(name, tmp_path) as cluster:
            engine = BeamEngine(**cluster.engine)
            driver = Driver(engine)
            for variable, value in driver.environment.items():
                monkeypatch.setenv(variable, value)
            workers = set[int]()
            probe = pytest.MonkeyPatch()
            for number in range(2):
                work = partial(square, tmp_path, None)
                here = context(tmp_path / f"work-{number}", **engine.model_dump())
                rows = run_tasks("calm", TASKS, work, here)
                workers |= {row["pid"] for row in rows}
                probe.setattr(cluster_retry, "answer_probe", see_nothing)
                assert all(row["is_preloaded"] for row in rows) == (name == "spark")
            probe.undo()
            assert os.getpid() not in workers
            assert len(workers) <= 3
            waiting = threading.Thread(target=cancel, args=(tmp_path, driver))
            waiting.start()
            with pytest.raises(Exception, match=r"(?i)cancel"):
                run_tasks("job", TASKS[:1], partial(wait_for_cancel, tmp_path), here)
            waiting.join()
            assert driver.is_running()
            driver.close()
            assert not driver.is_running()
            results = run_tasks("alone", TASKS, partial(square, tmp_path, None), here)
            assert [row["n"] for row in results] == list(range(6))
    except MissingEngineError as error:
        pytest.skip(str(error))


def wait_for_cancel(folder: Path, task: Task) -> Done:
    """Wait until the job was cancelled: Dask does not end a running task."""
    (folder / "reached").touch()
    wait_for((folder / "cancelled").exists, "the cancellation")
    return Done()


def cancel(folder: Path, driver: Driver) -> None:
    wait_for((folder / "reached").exists, "the job")
    driver.cancel(os.getpid())
    (folder / "cancelled").touch()


def test_missing_spark_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setattr(spark, "find_spec", lambda name: None)
    with pytest.raises(MissingEngineError, match=r"SPARK_HOME.*pyspark"):
        spark.import_spark()


def test_unreachable_spark_master_is_named() -> None:
    with pytest.raises(WorkerError, match=r"spark://127.0.0.1:9 \(.*refused.*\)"):
        connections.connect(BeamEngine(runner="spark", address="spark://127.0.0.1:9"))


def test_spark_master_without_a_port_is_rejected() -> None:
    with pytest.raises(WorkerError):
        spark.check_master("spark://host")


def see_nothing(question: str, answer: str, group: Any) -> tuple[()]:
    return ()


@pytest.mark.slow
def test_job_ends_before_work_if_workers_do_not_see_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"job_endpoint": "embed", "environment_type": "LOOPBACK"}
    monkeypatch.setattr(cluster_retry, "answer_probe", see_nothing)
    with pytest.raises(WorkerError, match=rf"^PortableRunner: .*{tmp_path}"):
        run_tasks(
            "job",
            TASKS,
            partial(square, tmp_path, None),
            context(tmp_path / "work", runner="PortableRunner", options=options),
        )
    assert not list(tmp_path.glob("*.txt"))
    assert not list((tmp_path / "work").glob("probe*"))


class WaitingJob:
    """Job that no worker takes."""

    state = "RUNNING"
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def test_cluster_without_workers_is_named_with_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = WaitingJob()
    monkeypatch.setattr(
        cluster_retry, "run_there", lambda *told, seconds: wait_no_longer(job, seconds)
    )
    with pytest.raises(
        WorkerError, match=r"^flink at flink:8081: .* 0\.2 s \(engine\.worker_seconds\)"
    ):
        run_tasks(
            "job",
            TASKS,
            partial(square, tmp_path, None),
            context(
                tmp_path / "work",
                runner="flink",
                address="flink:8081",
                worker_seconds=0.2,
            ),
        )
    assert job.cancelled
