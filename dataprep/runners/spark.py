"""Jobs on a Spark cluster by Spark's Python API, without Beam's job server.

Spark distributes Python functions over machines, retries lost ones and shuffles. Any
version of Spark with a supported Python works, without a server in between. Beam's own
runner for Spark, with its job server, is `runner: SparkRunner`.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import re
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipimport import zipimporter

from gristmill.core.processes import in_environment, wait_until
from gristmill.dataprep.runners import worker_bootstrap
from gristmill.dataprep.runners.connection import (
    Connection,
    GroupWork,
    Job,
    Receive,
    thread_pool,
)
from gristmill.dataprep.runners.errors import MissingEngineError, WorkerError
from gristmill.dataprep.runners.ship_files import package_digest
from gristmill.mixtures.schema.engine import BeamEngine, EngineOptions

CONNECT_SECONDS = 15
"""Timeout for the answer of a master."""
HERE = ("127.0.0.1", "localhost", "local")
"""Hosts of local masters, which reach this machine by its loopback address."""
HERE_ALONE = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xmn32m"
"""Options of Spark's Java processes, which only pass bytes on: the optimizing compiler
and parallel garbage collection took more time than they saved (a chain over 57 MB: 18 s
of CPU in a driver and two executors instead of 38 s), and a larger young generation
only fills memory (75 MB of each process) before it is collected.
"""
DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
    "spark.locality.wait": "0s",
    "spark.driver.extraJavaOptions": JAVA,
    "spark.executor.extraJavaOptions": JAVA,
}
"""Default settings of Spark: no user interface, only errors in the log, and no waiting
for an executor that has a task's data, which takes longer than to fetch them.
"""
DAEMON = {"spark.python.daemon.module": Path(worker_bootstrap.__file__).stem}
"""Setting by which executors fork their Python workers from a process that has imported
the package: each import took 1.5 s of CPU and 110 MB.
"""


def in_worker(function: Callable[[Any], Any], argument: Any) -> Any:
    """Call a function in a Python worker, and keep what Spark does there around each
    task from taking longer than a small task.

    A worker collects garbage after a task, in all loaded modules: 0.1 s unless these
    are frozen. Before it, the worker calls `importlib.invalidate_caches`, which up to
    Python 3.11 reads the directories of archives on the path again: 0.04 s for those of
    Spark, unless their importers are dropped; the next import makes them again.
    """
    gc.freeze()
    for place, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimporter):
            sys.path_importer_cache.pop(place, None)
    return function(argument)


def receive_all(
    receive: Receive, threads: int, pairs: Iterable[tuple[int, bytes]]
) -> list[None]:
    """Receive all numbers of a task, each with all bytes yielded with it."""
    batches = defaultdict[int, list[bytes]](list)
    for number, batch in pairs:
        batches[number].append(batch)
    numbers = list(batches)
    list(thread_pool(threads).map(receive, numbers, map(batches.pop, numbers)))
    return []


def _reason(text: str) -> str:
    """Shorten Spark's error of a failed job to its message and the last line of the
    underlying Python error.
    """
    java = [
        line.removeprefix(": ") for line in text.splitlines() if line.startswith(": ")
    ] or text.splitlines()
    errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .*", text, re.MULTILINE)
    return f"{java[0].rpartition('Exception: ')[2][:300]} {errors[-1] if errors else ''}".strip()


class SparkConnection(Connection):
    """Connection to a Spark cluster, with a Java process here.

    Args:
        engine: its address is the URL of the cluster: `spark://host:7077`,
            `local-cluster[2,1,1024]`, `yarn`, ...; its options are Spark's configuration,
            such as `spark.executor.memory`.

    Raises:
        WorkerError: no master answers, or it has no executor in time.
        MissingEngineError: there is no Spark on this machine.
    """

    cpus_option = "spark.task.cpus"

    def __init__(self, engine: BeamEngine) -> None:
        master, options = str(engine.address), engine.options
        check_master(master)
        import_spark()
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway

        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        conf = SparkConf(loadDefaults=False).setAll(settings(master, options))
        previous_handler = signal.getsignal(signal.SIGINT)
        here = {"SPARK_LOCAL_IP": "127.0.0.1"} if is_here(master) else {}
        try:
            with in_environment(here):
                gateway = launch_gateway(conf)
            self._context = SparkContext(gateway=gateway, conf=conf)
        except Exception as error:
            raise WorkerError(
                f"Spark at {master} does not take the job: {_reason(str(error))}"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                # Spark's handler outlives the connection and then fails
                signal.signal(signal.SIGINT, previous_handler)
        self._context.pythonExec = str(
            options.get("spark.pyspark.python")
            or os.environ.get("PYSPARK_PYTHON", sys.executable)
        )
        if has_executors(master):
            self._context.addFile(worker_bootstrap.__file__)
            self._wait_for_executor(master, engine.worker_seconds)

    @staticmethod
    def sender(work: GroupWork) -> Callable[..., Any]:
        """See `Connection`."""
        return partial(in_worker, work)

    @staticmethod
    def receiver(receive: Receive, threads: int) -> Callable[..., Any]:
        """See `Connection`."""
        return partial(in_worker, partial(receive_all, receive, threads))

    def run(self, job: Job) -> None:
        """Run a job; each element is its own task, in order. It has no time limit."""
        self._context.setJobGroup(str(job.process), "gristmill", interruptOnCancel=True)
        elements = job.elements(self._context.defaultParallelism // job.threads)
        number = len(elements)
        outputs = self._context.parallelize(elements, number).flatMap(
            pickle.loads(job.send)
        )
        if job.receive is not None:
            # `groupByKey` would group the tasks' outputs, too, and spill them to disk
            outputs = outputs.partitionBy(number).mapPartitions(
                pickle.loads(job.receive)
            )
        try:
            outputs.count()
        except Exception as error:
            if not type(error).__module__.startswith(("py4j", "pyspark")):
                raise
            raise WorkerError(f"Spark gave up: {_reason(str(error))}") from error

    def cancel_jobs(self, process: int) -> None:
        """See `Connection`."""
        self._context.cancelJobGroup(str(process))

    def is_alive(self) -> bool:
        """See `Connection`."""
        return self._context._jsc is not None

    def close(self) -> None:
        """Close it, and end the Java process and the executors."""
        gateway, context_type = self._context._gateway, type(self._context)
        self._context.stop()
        context_type._gateway = context_type._jvm = None
        gateway.close()
        gateway.proc.stdin.close()
        gateway.proc.wait()

    def _wait_for_executor(self, master: str, worker_seconds: float) -> None:
        """Raise WorkerError if a cluster does not provide an executor in time; Spark would
        wait forever.
        """
        executors = self._context._jsc.sc().getExecutorMemoryStatus
        # the driver counts as 1
        if not wait_until(lambda: executors().size() > 1, worker_seconds, 0.1):
            self.close()
            raise WorkerError(
                f"Spark at {master} has no worker after {worker_seconds:g} s "
                "(engine.worker_seconds) that gives this job an executor; start some, "
                "or ask for less (spark.executor.memory, spark.executor.cores)"
            )


def settings(master: str, options: EngineOptions) -> list[tuple[str, str]]:
    """Spark's configuration: the defaults, and the user's options."""
    digest = {f"spark.executorEnv.{worker_bootstrap.DIGEST_VARIABLE}": package_digest()}
    configured = {
        "spark.master": master,
        "spark.app.name": "gristmill",
        **DEFAULTS,
        **({**DAEMON, **digest} if has_executors(master) else {}),
        **(HERE_ALONE if is_here(master) else {}),
        **options,
    }
    return [(name, str(value)) for name, value in configured.items()]


def has_executors(master: str) -> bool:
    """Test if tasks run in other processes than the driver's."""
    return re.match(r"local(\[|$)", master) is None


def is_here(master: str) -> bool:
    """Test if a master is on this machine."""
    return re.split(r"[:\[-]", master.removeprefix("spark://"))[0] in HERE


def import_spark() -> None:
    """Make `pyspark` importable from SPARK_HOME (the cluster's version) or the
    installed package.

    Raises:
        MissingEngineError: it is in neither of them.
    """
    home = os.environ.get("SPARK_HOME")
    if home is None:
        if find_spec("pyspark") is None:
            raise MissingEngineError(
                "there is no Spark on this machine: set SPARK_HOME, or install "
                "`pyspark` of the cluster's version"
            )
        return
    libraries = Path(home) / "python" / "lib"
    for path in (
        str(libraries.parent),
        *map(str, sorted(libraries.glob("py4j-*.zip"))),
    ):
        if path not in sys.path:
            sys.path.insert(0, path)


def check_master(master: str) -> None:
    """Raise WorkerError unless a standalone cluster's master accepts connections; Spark
    would wait a minute.
    """
    if not master.startswith("spark://"):
        return
    failure: object = "it is not spark://host:port"
    for host, port in re.findall(r"([\w.-]+):(\d+)", master):
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            return
        except OSError as error:
            failure = error
    raise WorkerError(
        f"no Spark master answers at {master} ({failure}); start one, "
        "or correct engine.address"
    )
