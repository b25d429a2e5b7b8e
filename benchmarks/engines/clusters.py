"""Engines as processes on the loopback address, for tests and measurements."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.request import urlopen

from gristmill.core import processes
from gristmill.dataprep.runners import connections
from gristmill.dataprep.runners.errors import MissingEngineError
from gristmill.dataprep.runners.portable import program
from gristmill.dataprep.runners.servers import ENDING, free_port
from gristmill.mixtures.base import Options

PATIENCE_SECONDS = 240.0
"""Most time for a server to answer, on a busy machine."""
RAY_HEAD = "127.0.0.2"
"""Address of Ray's head on the loopback network: Ray replaces 127.0.0.1 by that of
another interface.
"""
RAY_STORE_BYTES = 200_000_000
EXECUTOR_MEMORY = "480m"
"""Least memory that Spark accepts, also the initial memory of its Java."""
CHECKOUT = str(Path(__file__).resolve().parents[2])
"""Workers find tests and benchmarks in this folder, which no installation has."""
SPARK_SETTINGS = {
    "spark.driver.memory": EXECUTOR_MEMORY,
    "spark.executor.memory": EXECUTOR_MEMORY,
    "spark.executorEnv.PYTHONPATH": CHECKOUT,
}

REGISTERED = "Successfully registered with master"
"""Line that a worker of Spark logs when it can start executors."""

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
taskmanager.numberOfTaskSlots: {slots}
taskmanager.cpu.cores: {slots}.0
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
"""Configuration on the loopback address, with long time limits. Flink's scripts, which
the package lacks, would compute the sizes of memory. Beam's classes are in the job
server's jar, which TaskManagers have, too, and load once for all jobs.
"""
FLINK_JAVA = (
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
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
"""Options for little memory, and for Flink's access to internals of newer Javas. Java
only passes bytes on, which the optimizing compiler does not make cheaper.
"""
UNSTAGED = Path("gradle", "wrapper")
"""Folder of the job server's jar: Beam's job server sends the jars of its class path with
each job, except those below such a folder (`PipelineResources`), and TaskManagers have
this one.
"""


@dataclass
class Cluster:
    """A running engine.

    Attributes:
        engine: its settings of BeamEngine.
        description: its processes, in words.
        processes: all that were started.
        client_address: of Ray, for drivers on other machines.
    """

    engine: Options
    description: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    client_address: str | None = None

    def start(self, folder: Path, *command: str, **environment: str) -> None:
        """Start a process, which ends with this one."""
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
    """Run an engine, by its name in `engine.runner`; the workers of `flink-external`
    come from a pool. This process's connections close before it ends.

    Raises:
        MissingEngineError: it is not on this machine.
    """
    cluster = ENGINES[name](folder)
    try:
        yield cluster
    finally:
        # Ray aborts a process that stays connected to a cluster that has ended
        connections.close()
        for process in reversed(cluster.processes):
            process.terminate()
        for process in cluster.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            # a killed process of Ray leaves its own; each has a session of its own
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def engine_cache() -> Path:
    """Cache folder of engines: GRISTMILL_ENGINES, or `gristmill/engines` in the user's
    cache folder.
    """
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(
        os.environ.get("GRISTMILL_ENGINES") or Path(user_cache, "gristmill", "engines")
    )


def find_engine(pattern: str) -> Path:
    """Find a file of a downloaded engine by its path below the cache folder.

    Raises:
        MissingEngineError: it was not downloaded.
    """
    paths = sorted(engine_cache().glob(pattern))
    if not paths:
        raise MissingEngineError(
            f"{pattern} is not in {engine_cache()}: fetch it with `make engines`"
        )
    return paths[-1]


def start_dask(folder: Path, workers: int = 2, threads: int = 1) -> Cluster:
    """Start a scheduler and workers."""
    file = folder / "scheduler.json"
    cluster = Cluster(
        {"runner": "dask", "workers": 2},
        f"a scheduler and workers with {workers} x {threads} threads",
    )
    loopback = ("--host", "127.0.0.1", "--no-dashboard")
    cluster.start(
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
    cluster.engine["address"] = json.loads(file.read_text())["address"]
    for _ in range(workers):
        cluster.start(
            folder,
            sys.executable,
            "-m",
            "distributed.cli.dask_worker",
            cluster.engine["address"],
            *loopback,
            "--nthreads",
            str(threads),
            "--no-nanny",
            "--local-directory",
            str(folder),
            # samples the stacks of all threads every 10 ms
            DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED="False",
        )
    return cluster


def start_ray(folder: Path, nodes: int = 2, cpus: int = 1) -> Cluster:
    """Start a head without CPUs, and nodes, whose tasks take all their CPUs; each has
    an address of the loopback network and a temporary folder of its own.
    """
    # With a token in the user's home (`ray.init` writes one) a head asks for it, and
    # nodes do not give it.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    port = free_port()
    address = f"{RAY_HEAD}:{port}"
    cluster = Cluster(
        {"runner": "ray", "address": address, "options": {"num_cpus": cpus}},
        f"a head and nodes with {nodes} x {cpus} CPUs",
    )

    def start(name: str, host: str, *arguments: str) -> None:
        cluster.start(
            folder,
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={host}",
            f"--object-store-memory={RAY_STORE_BYTES}",
            # paths of sockets have at most 107 bytes
            f"--temp-dir={tempfile.mkdtemp(prefix=f'ray-{name}-')}",
            *arguments,
            PYTHONPATH=CHECKOUT,
            RAY_worker_niceness="0",  # 15 by default
        )

    client_port = free_port()
    cluster.client_address = f"ray://{RAY_HEAD}:{client_port}"
    start(
        "head",
        RAY_HEAD,
        "--head",
        f"--port={port}",
        f"--ray-client-server-port={client_port}",
        "--num-cpus=0",
        "--include-dashboard=false",
    )
    wait_until(lambda: answers(port, RAY_HEAD))
    for number in range(nodes):
        node = f"127.0.0.{number + 3}"
        start(f"node-{number}", node, f"--address={address}", f"--num-cpus={cpus}")
    log = folder / "cluster.log"
    wait_until(lambda: log.read_text().count("Ray runtime started") == 1 + nodes)
    return cluster


def start_spark(folder: Path, workers: int = 2, cores: int = 1) -> Cluster:
    """Start a master and workers of Spark's standalone cluster, each Java with little
    memory; each worker starts an executor with all its cores.
    """
    if shutil.which("java") is None:
        raise MissingEngineError("spark: needs java, which is not on this machine")
    home = find_engine("spark-*")
    os.environ["SPARK_HOME"] = str(home)
    port = free_port()
    master = f"spark://127.0.0.1:{port}"
    cluster = Cluster(
        {
            "runner": "spark",
            "address": master,
            "options": {
                **SPARK_SETTINGS,
                "spark.executor.cores": str(cores),
                "spark.task.cpus": str(cores),
            },
        },
        f"a master and workers with {workers} x {cores} cores",
    )
    environment = {
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
    }
    program_path = str(home / "bin" / "spark-class")
    cluster.start(
        folder,
        program_path,
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
    for number in range(workers):
        cluster.start(
            folder,
            program_path,
            "org.apache.spark.deploy.worker.Worker",
            "--host",
            "127.0.0.1",
            "--webui-port",
            "0",
            "--cores",
            str(cores),
            "--memory",
            "512m",
            "--work-dir",
            str(folder / f"worker-{number}"),
            master,
            **environment,
        )
    log = folder / "cluster.log"
    wait_until(lambda: log.read_text().count(REGISTERED) == workers)
    return cluster


def start_flink(folder: Path, managers: int = 2, slots: int = 1) -> Cluster:
    """Start a JobManager and TaskManagers, each of which starts a worker (PROCESS)."""
    if shutil.which("java") is None:
        raise MissingEngineError("flink: needs java, which is not on this machine")
    server = find_engine("flink-*-beam-*/*.jar")
    unstaged = folder / UNSTAGED / server.name
    unstaged.parent.mkdir(parents=True)
    shutil.copyfile(server, unstaged)
    jars = find_engine("flink-cluster-*/lib")
    rest, rpc = free_port(), free_port()
    (folder / "config.yaml").write_text(
        FLINK_SETTINGS.format(rest=rest, rpc=rpc, slots=slots, folder=folder)
    )
    command = {"command": str(program()), "env": {"PYTHONPATH": CHECKOUT}}
    cluster = Cluster(
        {
            "runner": "flink",
            "address": f"127.0.0.1:{rest}",
            "options": {
                "flink_job_server_jar": str(unstaged),
                "parallelism": 2,
                "environment_type": "PROCESS",
                "environment_config": json.dumps(command),
                "job_server_jvm_properties": list(FLINK_JAVA[:3]),
            },
        },
        f"a JobManager and TaskManagers with {managers} x {slots} slots, a worker "
        "below each (PROCESS)",
    )
    java = ("java", *FLINK_JAVA, "-cp", f"{jars}/*:{server}")
    config = ("--configDir", str(folder))
    cluster.start(
        folder,
        *java,
        "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint",
        *config,
    )
    for _ in range(managers):
        cluster.start(
            folder,
            *java,
            "org.apache.flink.runtime.taskexecutor.TaskManagerRunner",
            *config,
        )
    wait_until(lambda: has_slots(rest, managers * slots))
    return cluster


def start_flink_external(folder: Path, managers: int = 2, slots: int = 1) -> Cluster:
    """Start Flink with workers from a pool."""
    cluster = start_flink(folder, managers, slots)
    cluster.description = cluster.description.replace(
        "a worker below each (PROCESS)", "workers that a pool starts (EXTERNAL)"
    )
    cluster.engine["options"] |= {
        "environment_type": "EXTERNAL",
        "environment_config": start_pool(cluster, folder),
    }
    return cluster


def has_slots(rest: int, number: int) -> bool:
    """Return True if the JobManager at a port of the loopback address has at least
    `number` slots.
    """
    try:
        with urlopen(f"http://127.0.0.1:{rest}/overview", timeout=5) as answer:
            return bool(json.load(answer)["slots-total"] >= number)
    except OSError:
        return False


def start_pool(cluster: Cluster, folder: Path) -> str:
    """Start a pool of workers; returns its address."""
    port = free_port()
    cluster.start(
        folder,
        sys.executable,
        "-m",
        "gristmill.dataprep.runners.worker",
        f"--pool=127.0.0.1:{port}",
        PYTHONPATH=CHECKOUT,
    )
    wait_until(lambda: answers(port))
    return f"127.0.0.1:{port}"


ENGINES: Mapping[str, Callable[[Path], Cluster]] = {
    "ray": start_ray,
    "ray-host": partial(start_ray, nodes=1, cpus=2),
    "dask": start_dask,
    "dask-host": partial(start_dask, workers=1, threads=2),
    "spark": start_spark,
    "spark-host": partial(start_spark, workers=1, cores=2),
    "flink": start_flink,
    "flink-external": start_flink_external,
    "flink-host": partial(start_flink_external, managers=1, slots=2),
}


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Return True if a server listens on a port of the loopback address."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it does not hold within PATIENCE_SECONDS.
    """
    if not processes.wait_until(condition, PATIENCE_SECONDS, 0.05):
        raise TimeoutError("a server of the cluster did not answer")
