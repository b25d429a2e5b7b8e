"""Engines as processes of their own on the loopback address, for tests and measurements; gone with the `with`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from gristmill.dataprep.jobs import engine_downloads
from gristmill.dataprep.jobs.engine_downloads import MissingEngineError
from gristmill.dataprep.jobs.portable import program
from gristmill.dataprep.jobs.servers import ENDING, free_port
from gristmill.mixtures.engine import FLINK_VERSIONS

PATIENCE_SECONDS = 240.0
"""For a server to answer, on a machine that does much else."""
EXECUTOR_MEMORY = "480m"
"""The least that Spark takes, and with which its Java begins."""
CHECKOUT = str(Path(__file__).resolve().parents[2])
"""Workers find tests and benchmarks there, which no installation has."""
SPARK_SETTINGS = {
    "spark.driver.memory": EXECUTOR_MEMORY,
    "spark.executor.memory": EXECUTOR_MEMORY,
    "spark.executor.cores": "1",
    "spark.executorEnv.PYTHONPATH": CHECKOUT,
}

FLINK_SETTINGS = """\
jobmanager.rpc.address: 127.0.0.1
jobmanager.rpc.port: {rpc}
jobmanager.bind-host: 127.0.0.1
taskmanager.host: 127.0.0.1
taskmanager.bind-host: 127.0.0.1
rest.address: 127.0.0.1
rest.bind-address: 127.0.0.1
rest.port: {rest}
io.tmp.dirs: {folder}
taskmanager.numberOfTaskSlots: 1
taskmanager.cpu.cores: 1.0
taskmanager.memory.framework.heap.size: 64m
taskmanager.memory.framework.off-heap.size: 64m
taskmanager.memory.task.heap.size: 128m
taskmanager.memory.task.off-heap.size: 0m
taskmanager.memory.network.min: 32m
taskmanager.memory.network.max: 32m
taskmanager.memory.managed.size: 32m
taskmanager.memory.jvm-metaspace.size: 256m
taskmanager.memory.jvm-overhead.min: 192m
taskmanager.memory.jvm-overhead.max: 192m
pekko.ask.timeout: 5 min
pekko.startup-timeout: 5 min
heartbeat.timeout: 300000
taskmanager.slot.timeout: 5 min
classloader.resolve-order: parent-first
"""
"""On the loopback address, and patient. Flink's scripts, which the package lacks, would reckon what is said of memory.
Beam's classes are in the job server's jar, which TaskManagers have too, and load once for all jobs."""
FLINK_JAVA = (
    "-Xmx256m",
    "-XX:+UseSerialGC",
    *(
        f"--add-opens=java.base/java.{name}=ALL-UNNAMED"
        for name in (
            "lang",
            "lang.invoke",
            "lang.reflect",
            "io",
            "net",
            "nio",
            "text",
            "time",
            "util",
            "util.concurrent",
            "util.concurrent.atomic",
            "util.concurrent.locks",
        )
    ),
)
"""Little memory, and what Flink takes of newer Javas' innards. Java compiles as it likes: held to its quick compiler it
takes twice the time for a job, most of it for the SHA-1 of the jar that comes with each."""


@dataclass
class Cluster:
    """An engine that runs.

    Attributes:
        engine: what a Context is told of it.
        what: what runs, in words.
        processes: those that were started.
    """

    engine: dict[str, Any]
    what: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, folder: Path, *command: str, **environment: str) -> None:
        """Start one more process, which ends with this one."""
        with open(folder / "cluster.log", "ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", ENDING, str(os.getpid()), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment},
                    cwd=CHECKOUT,
                    start_new_session=True,
                )
            )


@contextmanager
def running(name: str, folder: Path) -> Iterator[Cluster]:
    """An engine by its name in `engine.runner`; `flink-external` has its workers from a pool.

    Raises:
        MissingEngineError: it is not on this machine.
    """
    made = ENGINES[name](folder)
    try:
        yield made
    finally:
        for process in reversed(made.processes):
            process.terminate()
        for process in made.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_dask(folder: Path) -> Cluster:
    """A scheduler and two workers."""
    file = folder / "scheduler.json"
    made = Cluster({"runner": "dask", "workers": 2}, "a scheduler and two workers")
    loopback = ("--host", "127.0.0.1", "--no-dashboard")
    made.start(
        folder,
        sys.executable,
        "-m",
        "distributed.cli.dask_scheduler",
        *loopback,
        "--port",
        "0",
        "--scheduler-file",
        str(file),
    )
    wait_until(lambda: file.exists() and file.read_text().endswith("}"))
    made.engine["address"] = json.loads(file.read_text())["address"]
    for _ in range(2):
        made.start(
            folder,
            sys.executable,
            "-m",
            "distributed.cli.dask_worker",
            made.engine["address"],
            *loopback,
            "--nthreads",
            "1",
            "--no-nanny",
            "--local-directory",
            str(folder),
        )
    return made


def start_spark(folder: Path) -> Cluster:
    """A master and two workers of Spark's standalone cluster, each Java with little memory."""
    if shutil.which("java") is None:
        raise MissingEngineError("spark: needs java, which is not on this machine")
    home = engine_downloads.find(engine_downloads.spark()).parents[1]
    port = free_port()
    master = f"spark://127.0.0.1:{port}"
    made = Cluster({"runner": "spark", "address": master, "options": SPARK_SETTINGS}, "a master and two workers")
    environment = {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m"}
    begin = str(home / "bin" / "spark-class")
    made.start(
        folder,
        begin,
        "org.apache.spark.deploy.master.Master",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--webui-port",
        "0",
        **environment,
    )
    wait_until(lambda: answers(port))
    for number in range(2):
        made.start(
            folder,
            begin,
            "org.apache.spark.deploy.worker.Worker",
            "--host",
            "127.0.0.1",
            "--webui-port",
            "0",
            "--cores",
            "1",
            "--memory",
            "512m",
            "--work-dir",
            str(folder / f"worker-{number}"),
            master,
            **environment,
        )
    return made


def start_flink(folder: Path) -> Cluster:
    """A JobManager and two TaskManagers, each of which starts a worker (PROCESS)."""
    if shutil.which("java") is None:
        raise MissingEngineError("flink: needs java, which is not on this machine")
    lines = [line for line in FLINK_VERSIONS if engine_downloads.is_there(engine_downloads.flink(line))]
    line = lines[-1] if lines else FLINK_VERSIONS[-1]
    server = engine_downloads.find(engine_downloads.flink(line))
    jars = engine_downloads.find(engine_downloads.flink_cluster(line)).parent
    rest, rpc = free_port(), free_port()
    (folder / "config.yaml").write_text(FLINK_SETTINGS.format(rest=rest, rpc=rpc, folder=folder))
    command = {"command": str(program()), "env": {"PYTHONPATH": CHECKOUT}}
    made = Cluster(
        {
            "runner": "flink",
            "address": f"127.0.0.1:{rest}",
            "options": {
                "flink_version": line,
                "parallelism": 2,
                "environment_type": "PROCESS",
                "environment_config": json.dumps(command),
                "job_server_jvm_properties": list(FLINK_JAVA[:2]),
            },
        },
        f"a JobManager and two TaskManagers of Flink {line}, a worker below each (PROCESS)",
    )
    begin = ("java", *FLINK_JAVA, "-cp", f"{jars}/*:{server}")
    config = ("--configDir", str(folder))
    made.start(folder, *begin, "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint", *config)
    for _ in range(2):
        made.start(folder, *begin, "org.apache.flink.runtime.taskexecutor.TaskManagerRunner", *config)
    wait_until(lambda: has_slots(rest, 2))
    return made


def start_flink_external(folder: Path) -> Cluster:
    """Flink whose workers a pool starts."""
    made = start_flink(folder)
    made.what = made.what.replace("a worker below each (PROCESS)", "workers that a pool starts (EXTERNAL)")
    made.engine["options"] |= {"environment_type": "EXTERNAL", "environment_config": start_pool(made, folder)}
    return made


def has_slots(rest: int, number: int) -> bool:
    """Whether Flink's JobManager, which answers at a port of the loopback address, has so many slots."""
    try:
        with urlopen(f"http://127.0.0.1:{rest}/overview", timeout=5) as answer:
            return bool(json.load(answer)["slots-total"] >= number)
    except OSError:
        return False


def start_pool(made: Cluster, folder: Path) -> str:
    """Start a pool of workers; returns its address."""
    port = free_port()
    made.start(
        folder, sys.executable, "-m", "gristmill.dataprep.jobs.worker", f"--pool=127.0.0.1:{port}", PYTHONPATH=CHECKOUT
    )
    wait_until(lambda: answers(port))
    return f"127.0.0.1:{port}"


ENGINES: Mapping[str, Callable[[Path], Cluster]] = {
    "dask": start_dask,
    "spark": start_spark,
    "flink": start_flink,
    "flink-external": start_flink_external,
}


def answers(port: int) -> bool:
    """Whether somebody listens on a port of the loopback address."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: it does not in PATIENCE_SECONDS.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("a server of the cluster did not answer")
        time.sleep(0.05)
