"""Jobs on a Spark cluster by Spark's Python API, without Beam's job server.

Spark distributes Python functions over machines, retries lost ones and shuffles. Any
version of Spark with a supported Python works, without a server in between. Beam's own
runner for Spark, with its job server, is `runner: SparkRunner`.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gristmill.dataprep.runners.errors import MissingEngineError, WorkerError
from gristmill.dataprep.runners.pool import Element
from gristmill.dataprep.runners.ship_files import carry
from gristmill.mixtures.schema.engine import BeamEngine, EngineOptions

CONNECT_SECONDS = 15
"""Timeout for the answer of a master."""
HERE = ("127.0.0.1", "localhost", "local")
"""Hosts of local masters, which reach this machine by its loopback address."""
HERE_ALONE = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
}
"""Default settings of Spark: no user interface, and only errors in the log."""


def run_on_spark(
    engine: BeamEngine,
    work: Callable[[Sequence[Element]], Iterable[tuple[int, bytes]]],
    groups: Sequence[Sequence[Element]],
    receive: Callable[[tuple[int, Iterable[bytes]]], Iterable[None]] | None,
) -> None:
    """Run a job; each element is its own task, in order.

    Args:
        engine: `address` is the URL of the cluster: `spark://host:7077`,
            `local-cluster[2,1,1024]`, `yarn`, ...; `options` are Spark's configuration,
            such as `spark.executor.memory`.
        work: runs the tasks of an element and yields the data to shuffle.
        groups: all elements.
        receive: receives a number and all bytes yielded with it; None without a
            shuffle.

    Raises:
        WorkerError: the cluster does not answer, has no executor, or gave up.
        MissingEngineError: there is no Spark on this machine.
    """
    session = connect(str(engine.address), engine.options, engine.worker_seconds)
    outputs = session.parallelize(groups, len(groups)).flatMap(carry(work))
    if receive is not None:
        outputs = outputs.groupByKey(len(groups)).flatMap(carry(receive))
    try:
        outputs.count()
    except Exception as error:
        if not type(error).__module__.startswith(("py4j", "pyspark")):
            raise
        raise WorkerError(f"Spark gave up: {_reason(str(error))}") from error


def _reason(text: str) -> str:
    """Shorten Spark's error of a failed job to its message and the last line of the
    underlying Python error.
    """
    java = [
        line.removeprefix(": ") for line in text.splitlines() if line.startswith(": ")
    ] or text.splitlines()
    errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .*", text, re.MULTILINE)
    return f"{java[0].rpartition('Exception: ')[2][:300]} {errors[-1] if errors else ''}".strip()


_session: list[tuple[str, Any]] = []


def connect(master: str, options: EngineOptions, worker_seconds: float) -> Any:
    """Connect to a cluster and wait for an executor; reuses this process's SparkContext
    for the same cluster.

    Raises:
        WorkerError: no master answers, or it has no executor after `worker_seconds`.
        MissingEngineError: there is no Spark on this machine.
    """
    key = f"{master} {sorted(options.items())}"
    if _session and _session[0][0] == key and _session[0][1]._jsc is not None:
        return _session[0][1]
    close()
    check_master(master)
    import_spark()
    from pyspark import SparkConf, SparkContext

    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    settings = SparkConf(loadDefaults=False).setAppName("gristmill").setMaster(master)
    for name, value in {
        **DEFAULTS,
        **(HERE_ALONE if is_here(master) else {}),
        **options,
    }.items():
        settings.set(name, str(value))
    previous_handler = signal.getsignal(signal.SIGINT)
    try:
        with listening_here() if is_here(master) else nullcontext():
            session = SparkContext(conf=settings)
    except Exception as error:
        raise WorkerError(
            f"Spark at {master} does not take the job: {_reason(str(error))}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            # Spark's handler outlives the connection and then fails
            signal.signal(signal.SIGINT, previous_handler)
    session.pythonExec = str(
        options.get("spark.pyspark.python")
        or os.environ.get("PYSPARK_PYTHON", sys.executable)
    )
    _session.append((key, session))
    wait_for_executor(session, master, worker_seconds)
    return session


@contextmanager
def listening_here() -> Iterator[None]:
    """Context in which a started Java process listens only on the loopback address."""
    before = os.environ.get("SPARK_LOCAL_IP")
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["SPARK_LOCAL_IP"]
        else:
            os.environ["SPARK_LOCAL_IP"] = before


def is_here(master: str) -> bool:
    """Test if a master is on this machine."""
    return re.split(r"[:\[-]", master.removeprefix("spark://"))[0] in HERE


@atexit.register
def close() -> None:
    """Close this process's connection to Spark, if any, with its executors and the Java
    process.
    """
    for _, session in _session:
        gateway = session._gateway
        session.stop()
        type(session)._gateway = type(session)._jvm = None
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait()
    _session.clear()


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


def wait_for_executor(session: Any, master: str, worker_seconds: float) -> None:
    """Raise WorkerError if a cluster does not provide an executor in time; Spark would
    wait forever.
    """
    deadline = time.monotonic() + worker_seconds
    while (
        not re.match(r"local(\[|$)", master)
        and session._jsc.sc().getExecutorMemoryStatus().size() < 2
    ):  # the driver counts as 1
        if time.monotonic() > deadline:
            close()
            raise WorkerError(
                f"Spark at {master} has no worker after {worker_seconds:g} s "
                "(engine.worker_seconds) that gives this job an executor; start some, "
                "or ask for less (spark.executor.memory, spark.executor.cores)"
            )
        time.sleep(0.1)
