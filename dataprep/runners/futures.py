"""Jobs on Ray and Dask through their own Python interfaces: futures of tasks.

A job without a shuffle is one future per element. In a shuffle every future of a sender
returns one part per receiver, an array of bytes with the Arrow batches for all keys of
that receiver. Parts stay in the engine's memory or object store; after all senders have
ended, each receiver takes its part of every sender. The number of parts is bounded by MOST_PARTS. One connection serves all
jobs of a process; workers keep what they have imported and loaded.
"""

from __future__ import annotations

import atexit
import logging
import math
import operator
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from tempfile import SpooledTemporaryFile
from typing import Any, NamedTuple

import numpy as np

from gristmill.dataprep.runners.errors import WorkerError
from gristmill.dataprep.runners.pool import Element
from gristmill.dataprep.runners.ship_files import arguments_of, carry
from gristmill.mixtures.schema.encoder_settings import ReadingModel
from gristmill.mixtures.schema.engine import RAY_TASK_OPTIONS, BeamEngine

CONNECT_SECONDS = 15
"""Timeout for the answer of a scheduler or head."""
MOST_PARTS = 1 << 17
"""Maximum number of parts of a shuffle: senders times receivers."""
RECEIVERS_PER_SLOT = 2
SPOOL_BYTES = 64_000_000
"""Bytes that a receiver keeps in memory; it spools more to its temporary folder."""
CHECK_SECONDS = 2.0
"""Interval between checks that Ray's head answers."""
HEAD_SECONDS = 20.0
"""Time without an answer of Ray's head after which a job ends. Less than the minute
after which Ray aborts the process.
"""
ENDED_ADVICE = "rerun on another cluster to do what is missing"
INSTALL = "is not installed; install it with: pip install 'gristmill[engines]'"
Future = Any
"""Reference to a result on a cluster."""
Work = Callable[[Sequence[Element]], Iterable[tuple[int, bytes]]]
"""Function that runs the tasks of an element and yields the data to shuffle."""


class Part(NamedTuple):
    """Batches of one sender for one receiver.

    Attributes:
        lengths: key and number of bytes of each batch.
        content: uint8, the batches back to back.
    """

    lengths: list[tuple[int, int]]
    content: np.ndarray


def run_by_futures(
    engine: BeamEngine,
    work: Work,
    groups: Sequence[Sequence[Element]],
    receive: Callable[[int, Iterable[bytes]], None] | None,
    seconds: float | None,
) -> None:
    """Run a job on Ray or Dask; see `runner.run_there`.

    Raises:
        WorkerError: the cluster does not answer, has no worker in time, or gave up.
        TimeoutError: the job exceeded its time limit.
    """
    cluster = connect(engine)
    gpu = wants_gpu(work)
    futures: list[Future] = []

    def run(function: Callable[..., Any], arguments: Sequence[Any], parts: int) -> Any:
        shipped = cluster.put(carry(function))
        outputs = [
            cluster.submit(shipped, value, 1 + parts, gpu) for value in arguments
        ]
        futures[:] = [done for done, *_ in outputs]
        cluster.wait(futures, seconds)
        return [sent_parts for _, *sent_parts in outputs]

    try:
        if receive is None:
            run(partial(run_element, work), groups, 0)
            return
        num_receivers = RECEIVERS_PER_SLOT * cluster.num_slots()
        num_receivers = max(1, min(num_receivers, MOST_PARTS // len(groups)))
        sent = run(partial(scatter, work, num_receivers), groups, num_receivers)
        parts_by_receiver = [list(parts) for parts in zip(*sent, strict=True)]
        sent.clear()
        run(partial(gather, receive, cluster.fetch), parts_by_receiver, 0)
    except BaseException:
        cluster.cancel(futures)
        raise


def wants_gpu(work: Work) -> bool:
    """Test if a job's function reads documents with a model on a GPU."""
    return any(
        isinstance(value, ReadingModel) and value.device == "gpu"
        for value in arguments_of(work)
    )


def run_element(work: Work, group: Sequence[Element]) -> list[None]:
    """Run the tasks of an element on a worker."""
    for _ in work(group):
        pass
    return [None]


def scatter(
    work: Work, num_receivers: int, group: Sequence[Element]
) -> list[Part | None]:
    """Run the tasks of an element on a worker; returns None, which tells the driver
    that it has ended, and a part per receiver.
    """
    sinks = [BytesIO() for _ in range(num_receivers)]
    lengths: list[list[tuple[int, int]]] = [[] for _ in sinks]
    for key, batch in work(group):
        sinks[key % num_receivers].write(batch)
        lengths[key % num_receivers].append((key, len(batch)))
    contents = [np.frombuffer(sink.getbuffer(), np.uint8) for sink in sinks]
    return [None, *map(Part, lengths, contents)]


def gather(
    receive: Callable[[int, Iterable[bytes]], None],
    fetch: Callable[[Any], Part],
    parts: list[Any],
) -> list[None]:
    """Receive the batches of some keys on a worker, one part after another."""
    places = defaultdict[int, list[tuple[int, int]]](list)
    with SpooledTemporaryFile(SPOOL_BYTES) as spool:
        while parts:
            lengths, content = fetch(parts.pop())
            start = spool.tell()
            spool.write(content.data)
            for key, length in lengths:
                places[key].append((start, length))
                start += length
            del content
        for key in sorted(places):
            receive(key, _spooled(spool, places[key]))
    return [None]


def value_of(part: Part) -> Part:
    """The value of a part on an engine that passes values."""
    return part


def _spooled(
    spool: SpooledTemporaryFile[bytes], places: list[tuple[int, int]]
) -> Iterator[bytes]:
    for start, length in places:
        spool.seek(start)
        yield spool.read(length)


_open: dict[str, Cluster] = {}
"""Cluster and its options -> this process's connection."""


def connect(engine: BeamEngine) -> Cluster:
    """Connect to a cluster; reuses this process's connection to the same one.

    Raises:
        WorkerError: it does not answer, or has no worker in time.
    """
    key = f"{engine.runner} {engine.address} {sorted(engine.options.items())}"
    cluster = _open.get(key)
    if cluster is None or not cluster.is_alive():
        close()
        connection = RayCluster if engine.runner == "ray" else DaskCluster
        cluster = _open[key] = connection(engine)
    return cluster


@atexit.register
def close() -> None:
    """Close this process's connection, if any."""
    while _open:
        _, cluster = _open.popitem()
        cluster.close()


class DaskCluster:
    """Connection to a Dask scheduler.

    Args:
        engine: its options are keyword arguments of `distributed.Client`; without an
            address they have a `scheduler_file`.
    """

    def __init__(self, engine: BeamEngine) -> None:
        try:
            from distributed import Client
        except ImportError as error:
            raise WorkerError(f"engine.runner is dask, which {INSTALL}") from error
        self.fetch = value_of
        # it logs tracebacks of lost connections, which end the job with a sentence
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        where = engine.address or engine.options.get("scheduler_file")
        settings = {"timeout": CONNECT_SECONDS, "set_as_default": False}
        settings |= engine.options
        try:
            self._client = Client(address=engine.address, **settings)
        except (OSError, ValueError) as error:
            raise WorkerError(
                f"no Dask scheduler answers at {where} ({type(error).__name__}: "
                f"{error}); start one with `dask scheduler`, or correct engine.address"
            ) from error
        try:
            self._client.wait_for_workers(1, timeout=engine.worker_seconds)
        except TimeoutError as error:
            self._client.close()
            raise WorkerError(
                f"the Dask scheduler at {where} has no worker after "
                f"{engine.worker_seconds:g} s (engine.worker_seconds); start some with "
                f"`dask worker {where}`"
            ) from error

    def num_slots(self) -> int:
        """Number of threads of the workers."""
        return sum(self._client.nthreads().values())

    def put(self, function: Callable[..., Any]) -> Future:
        """Load the function of many tasks on the cluster."""
        import cloudpickle

        # a task, so that it is repeated if the worker with its result dies
        content = cloudpickle.dumps(function)
        return self._client.submit(pickle.loads, content, pure=False)

    def submit(
        self, function: Future, argument: Any, outputs: int, gpu: bool
    ) -> list[Future]:
        """Submit a task, whose function returns a list of `outputs` results."""
        submit = partial(self._client.submit, pure=False)
        results = submit(operator.call, function, argument)
        return [submit(operator.getitem, results, place) for place in range(outputs)]

    def wait(self, futures: Sequence[Future], seconds: float | None) -> None:
        """Wait for all tasks.

        Raises:
            TimeoutError: they did not end in time.
            WorkerError: the cluster gave up a task, or does not answer.
            Exception: the exception of a task.
        """
        from distributed import KilledWorker, as_completed

        for future in as_completed(futures, loop=self._client.loop, timeout=seconds):
            if future.status == "finished":
                continue
            error = future.exception() if future.status == "error" else None
            if isinstance(error, KilledWorker):
                raise WorkerError(
                    f"the Dask cluster gave up: {error} Most likely a shard needs "
                    "more memory."
                ) from error
            raise error or WorkerError(
                "the Dask scheduler ended, or the job was cancelled there; rerun to do "
                "what is missing"
            )

    def cancel(self, futures: Sequence[Future]) -> None:
        """Cancel tasks."""
        if self.is_alive():
            self._client.cancel(futures)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def is_alive(self) -> bool:
        """Test if the connection can run further jobs."""
        return bool(self._client.status == "running")


class RayCluster:
    """Connection to a Ray cluster.

    Args:
        engine: its address is `auto`, `HOST:PORT` or `ray://HOST:PORT`; its options are
            those of each task (RAY_TASK_OPTIONS), and keyword arguments of `ray.init`.
    """

    def __init__(self, engine: BeamEngine) -> None:
        try:
            import ray
        except ImportError as error:
            raise WorkerError(f"engine.runner is ray, which {INSTALL}") from error
        address = str(engine.address)
        if address == "auto":
            address = os.environ.get("RAY_ADDRESS", address)
        if address != "auto":  # Ray would wait for minutes
            check_head(
                address,
                CONNECT_SECONDS,
                "start one with `ray start --head`, or correct engine.address",
            )
        self._ray = ray
        settings = {"log_to_driver": False, "logging_level": "error"}
        self._options: dict[str, Any] = {}
        for name, value in engine.options.items():
            of_task = name in RAY_TASK_OPTIONS
            (self._options if of_task else settings)[name] = value
        previous_handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address, **settings)
        except (RuntimeError, OSError, ValueError) as error:
            raise WorkerError(
                f"Ray at {address} does not take the job: {error}"
            ) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                # Ray's handler replaces ours
                signal.signal(signal.SIGTERM, previous_handler)
        if not address.startswith("ray://"):
            address = ray.get_runtime_context().gcs_address
        self._address = address
        self._has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        # defined here, so that it travels by value
        self._call = ray.remote(lambda function, argument: function(argument))
        self.fetch = ray.get

    def num_slots(self) -> int:
        """Number of threads of the workers."""
        num_cpus = self._ray.cluster_resources().get("CPU", 1)
        return max(1, int(num_cpus / (self._options.get("num_cpus") or 1)))

    def put(self, function: Callable[..., Any]) -> Future:
        """See `DaskCluster`."""
        check_head(self._address, HEAD_SECONDS, ENDED_ADVICE)
        return self._ray.put(function)

    def submit(
        self, function: Future, argument: Any, outputs: int, gpu: bool
    ) -> list[Future]:
        """See `DaskCluster`."""
        options = {"num_gpus": int(gpu and self._has_gpus), **self._options}
        call = self._call.options(name="gristmill", num_returns=outputs, **options)
        # Ray leaves the references to parts as they are, since they are in a list
        futures = call.remote(function, argument)
        return [futures] if outputs == 1 else futures

    def wait(self, futures: Sequence[Future], seconds: float | None) -> None:
        """See `DaskCluster`."""
        errors = self._ray.exceptions
        deadline = time.monotonic() + (seconds or math.inf)
        pending = list(futures)
        try:
            while pending:
                ended, pending = self._ray.wait(
                    pending, num_returns=len(pending), timeout=CHECK_SECONDS
                )
                self._ray.get(ended)
                if pending and time.monotonic() > deadline:
                    raise TimeoutError(f"the job was not done after {seconds:g} s")
                if pending:  # Ray would abort this process
                    check_head(self._address, HEAD_SECONDS, ENDED_ADVICE)
        except errors.RayTaskError:
            raise
        except (errors.RayError, ConnectionError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise WorkerError(
                f"Ray gave up: {type(error).__name__}: {first_line} Most likely a shard "
                "needs more memory (engine.options.memory), or the head ended."
            ) from error

    def cancel(self, futures: Sequence[Future]) -> None:
        """See `DaskCluster`."""
        for future in futures:
            self._ray.cancel(future, force=True)

    def close(self) -> None:
        """See `DaskCluster`."""
        self._ray.shutdown()

    def is_alive(self) -> bool:
        """See `DaskCluster`."""
        return bool(self._ray.is_initialized())


Cluster = DaskCluster | RayCluster
"""Connection to a cluster."""


def check_head(address: str, seconds: float, advice: str) -> None:
    """Raise WorkerError unless the head of Ray at HOST:PORT or ray://HOST:PORT accepts
    a connection within `seconds`.
    """
    match = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)
    if match is None:
        raise WorkerError(
            f"{address!r} is not an address of Ray; write auto, HOST:PORT or "
            "ray://HOST:PORT (engine.address)"
        )
    deadline = time.monotonic() + seconds
    while True:
        try:
            place = match[1].strip("[]"), int(match[2])
            socket.create_connection(place, timeout=seconds).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"no head of Ray answers at {address} ({error}); {advice}"
                ) from error
        time.sleep(0.2)
