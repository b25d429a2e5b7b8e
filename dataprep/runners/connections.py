"""Connections to Ray, Dask and Spark, each opened once.

The stages of a run share one connection, in a process of its own (`shared_driver.py`):
engines start workers for each connection, and every worker imports everything again. A
stage that runs alone (`gristmill stage`) connects by itself.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing.managers import BaseManager
from typing import Any

from gristmill.dataprep.runners.connection import (
    Connection,
    GroupWork,
    Job,
    Receive,
    run_in_threads,
)
from gristmill.dataprep.runners.pool import Element, Mode
from gristmill.dataprep.runners.ship_files import arguments_of, carry
from gristmill.mixtures.schema.encoder_settings import ReadingModel
from gristmill.mixtures.schema.engine import BeamEngine

VARIABLE = "GRISTMILL_CLUSTER"
"""Environment variable of a stage's process with the socket of the run's connection,
and its key.
"""
PROBED_VARIABLE = "GRISTMILL_PROBED"
"""Environment variable of a stage's process with the path of a file that exists once a
worker has answered a stage of the run.
"""


class ConnectionManager(BaseManager):
    """Client and server of the socket by which stages share a connection."""


ConnectionManager.register("connection", exposed=("run", "cancel_jobs"))

_open: dict[str, Connection] = {}
"""Cluster and its options -> this process's connection."""
_opening = threading.Lock()


def run_by_connection(
    engine: BeamEngine,
    work: GroupWork,
    groups: Sequence[Sequence[Element]],
    receive: Receive | None,
    seconds: float | None,
    mode: Mode = "threads",
) -> None:
    """Run a job by the connection of the run, or of this process; see
    `runner.run_there`.

    Raises:
        WorkerError: the cluster does not answer, has no worker in time, or gave up.
        TimeoutError: the job exceeded its time limit.
        ConnectionError: the process with the run's connection has ended.
        MissingEngineError: the engine is not on this machine.
    """
    import cloudpickle

    kind = connection_type(engine)
    threads = 1 if mode == "processes" else kind.num_threads(engine.options)
    gpu = wants_gpu(work)
    if threads > 1:
        work = partial(run_in_threads, threads, work)
    job = Job(
        os.getpid(),
        cloudpickle.dumps(carry(kind.sender(work))),
        receive and cloudpickle.dumps(carry(kind.receiver(receive, threads))),
        groups,
        gpu,
        seconds,
        threads,
    )
    shared = find_shared()
    if shared is None:
        connect(engine).run(job)
        return
    try:
        shared.run(job)
    except (EOFError, ConnectionError) as error:
        # `run_on_cluster` tries again, by a connection of this process
        raise ConnectionError(
            f"the run's connection to {engine.runner} has ended"
        ) from error


def find_shared() -> Connection | None:
    """Connection of the run; None if it has none, or if it has ended."""
    if VARIABLE not in os.environ:
        return None
    manager: Any = ConnectionManager(*shared_address())
    try:
        manager.connect()
    except OSError:
        return None
    shared: Connection = manager.connection()
    return shared


def shared_address() -> tuple[str, bytes]:
    """Socket of the run's connection, and its key."""
    address, key = os.environ[VARIABLE].split()
    return address, bytes.fromhex(key)


def wants_gpu(work: GroupWork) -> bool:
    """Test if a job's function reads documents with a model on a GPU."""
    return any(
        isinstance(value, ReadingModel) and value.device == "gpu"
        for value in arguments_of(work)
    )


def connection_type(engine: BeamEngine) -> type[Any]:
    """Class of the connections to an engine."""
    if engine.runner == "spark":
        from gristmill.dataprep.runners.spark import SparkConnection

        return SparkConnection
    from gristmill.dataprep.runners import futures

    return {"dask": futures.DaskConnection, "ray": futures.RayConnection}[engine.runner]


def connect(engine: BeamEngine) -> Connection:
    """Connect to a cluster; reuses this process's connection to the same one.

    Raises:
        WorkerError: it does not answer, or has no worker in time.
        MissingEngineError: the engine is not on this machine.
    """
    key = f"{engine.runner} {engine.address} {sorted(engine.options.items())}"
    with _opening:
        connection = _open.get(key)
        if connection is None or not connection.is_alive():
            close()
            connection = _open[key] = connection_type(engine)(engine)
        return connection


@atexit.register
def close() -> None:
    """Close this process's connection, if any."""
    while _open:
        _, connection = _open.popitem()
        connection.close()
