"""Jobs on a Spark cluster by Spark's Python API, without Beam's job server.

Spark distributes Python functions over machines, retries lost ones and shuffles; a job
only has to be translated (`linear_pipeline.py`). Any version of Spark with a supported
Python works, without a server in between. Beam's own runner for Spark, with its job
server, is `runner: SparkRunner`.
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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from apache_beam.runners.runner import PipelineResult, PipelineRunner, PipelineState

from gristmill.dataprep.runners.errors import MissingEngineError, WorkerError
from gristmill.dataprep.runners.linear_pipeline import (
    Chain,
    Counts,
    as_metrics,
    do_steps,
    read_chain,
)
from gristmill.dataprep.runners.ship_files import carry
from gristmill.mixtures.sections.engine import EngineOptions

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


class ChainRunner(PipelineRunner):  # type: ignore[misc]
    """Beam runner of linear pipelines on Spark.

    Args:
        master: URL of the cluster: `spark://host:7077`, `local-cluster[2,1,1024]`,
            `yarn`, ...
        options: Spark's configuration, such as `spark.executor.memory`.
        worker_seconds: timeout for the first executor.
    """

    def __init__(
        self, master: str, options: EngineOptions, worker_seconds: float
    ) -> None:
        super().__init__()
        self._master = master
        self._options = options
        self._worker_seconds = worker_seconds

    def run_pipeline(self, pipeline: Any, options: Any) -> Result:
        """Run a pipeline to its end.

        Raises:
            WorkerError: the cluster does not answer, has no executor, or gave up.
        """
        chain = read_chain(pipeline)
        session = connect(self._master, self._options, self._worker_seconds)
        return Result(run_chain(session, chain))


class Result(PipelineResult):  # type: ignore[misc]
    """Result of a finished job."""

    def __init__(self, counts: Counts) -> None:
        super().__init__(PipelineState.DONE)
        self._counts = counts

    def wait_until_finish(self, duration: int | None = None) -> str:
        """Return the state immediately."""
        return str(self.state)

    def metrics(self) -> Any:
        """Counters of Spark's accumulator."""
        return as_metrics(self._counts)


def run_chain(session: Any, chain: Chain) -> Counts:
    """Run a chain of steps; returns its counters.

    Each input value is its own task, in order. A task that runs again after the loss of
    its worker is counted once; a task of a stage whose shuffled data were lost may be
    counted again.
    """
    from pyspark.accumulators import AccumulatorParam

    class Adding(AccumulatorParam[Any]):
        """Accumulator of counters by name."""

        def zero(self, value: Any) -> Counts:
            """Empty counters."""
            return {}

        def addInPlace(self, total: Any, more: Any) -> Any:
            """Add counters without this package, which a worker does not have while
            unpickling.
            """
            return {
                key: total.get(key, 0) + more.get(key, 0) for key in {**total, **more}
            }

    counts = session.accumulator({}, Adding())
    size = max(len(chain.values), 1)
    values = session.parallelize(chain.values, size)
    for number, steps in enumerate(chain.stages):
        if number:
            values = values.groupByKey(size)
        values = values.mapPartitions(partial(carry(do_steps), steps, counts))
    try:
        values.count()
    except Exception as error:
        if not type(error).__module__.startswith(("py4j", "pyspark")):
            raise
        raise WorkerError(f"Spark gave up: {_reason(str(error))}") from error
    return dict(counts.value)


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
