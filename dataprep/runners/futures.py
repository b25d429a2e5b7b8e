"""Jobs on Ray and Dask through their own Python interfaces: futures of tasks.

A job without a shuffle is one future per element. In a shuffle every future of a sender
returns one part per receiver, an array of bytes with the Arrow batches for all keys of
that receiver. Parts stay in the engine's memory or object store; after all senders have
ended, each receiver takes its part of every sender. The number of parts is bounded by
MOST_PARTS. Workers keep what they have imported and loaded.
"""

from __future__ import annotations

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
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np

from gristmill.dataprep.runners.connection import (
    INSTALL,
    Connection,
    GroupWork,
    Job,
    Receive,
    thread_pool,
)
from gristmill.dataprep.runners.errors import WorkerError
from gristmill.dataprep.runners.pool import Element
from gristmill.mixtures.schema.engine import RAY_TASK_OPTIONS, BeamEngine

CONNECT_SECONDS = 15
"""Timeout for the answer of a scheduler or head."""
MOST_PARTS = 1 << 17
"""Maximum number of parts of a shuffle: senders times receivers."""
RECEIVERS_PER_SLOT = 2
CHECK_SECONDS = 2.0
"""Interval between checks that Ray's head answers."""
HEAD_SECONDS = 20.0
"""Time without an answer of Ray's head after which a job ends. Less than the minute
after which Ray aborts the process.
"""
ENDED_ADVICE = "rerun on another cluster to do what is missing"
Future = Any
"""Reference to a result on a cluster."""


class Part(NamedTuple):
    """Batches of one sender for one receiver.

    Attributes:
        lengths: key and number of bytes of each batch.
        content: uint8, the batches back to back.
    """

    lengths: list[tuple[int, int]]
    content: np.ndarray


def scatter(
    work: GroupWork, num_receivers: int, group: Sequence[Element]
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


def gather(receive: Receive, threads: int, *parts: Part) -> list[None]:
    """Receive the batches of some keys on a worker, from the parts of all senders."""
    batches = defaultdict[int, list[np.ndarray]](list)
    for lengths, content in parts:
        start = 0
        for key, length in lengths:
            batches[key].append(content[start : start + length])
            start += length
    keys = sorted(batches)
    contents = (map(np.ndarray.tobytes, batches.pop(key)) for key in keys)
    list(thread_pool(threads).map(receive, keys, contents))
    return [None]


class FuturesConnection(Connection):
    """Connection that runs tasks as futures."""

    def __init__(self) -> None:
        self._futures: dict[int, list[Future]] = {}

    @staticmethod
    def sender(work: GroupWork) -> Callable[..., Any]:
        """See `Connection`."""
        return partial(scatter, work)

    @staticmethod
    def receiver(receive: Receive, threads: int) -> Callable[..., Any]:
        """See `Connection`."""
        return partial(gather, receive, threads)

    def run(self, job: Job) -> None:
        """See `Connection`."""
        try:
            num_slots = self.num_slots()
            elements = job.elements(num_slots)
            num_receivers = 0
            if job.receive is not None:
                num_receivers = max(
                    1, min(RECEIVERS_PER_SLOT * num_slots, MOST_PARTS // len(elements))
                )
            pairs = [(num_receivers, element) for element in elements]
            sent = self._run_tasks(job, job.send, pairs, num_receivers)
            if job.receive is not None:
                parts_by_receiver = list(zip(*sent, strict=True))
                sent.clear()
                self._run_tasks(job, job.receive, parts_by_receiver, 0)
            self._futures.pop(job.process, None)
        except BaseException:
            self.cancel_jobs(job.process)
            raise

    def _run_tasks(
        self,
        job: Job,
        function: bytes,
        arguments: Sequence[Sequence[Any]],
        parts: int,
    ) -> list[list[Future]]:
        """Run a function with each tuple of arguments; returns the parts of each
        result.
        """
        shipped = self.put(function)
        futures = self._futures[job.process] = list[Future]()
        outputs = []
        for values in arguments:
            # a task may run, and its job be cancelled, before all are submitted
            done, *sent_parts = self.submit(job, shipped, values, 1 + parts)
            futures.append(done)
            outputs.append(sent_parts)
        self.wait(futures, job.seconds)
        return outputs

    def cancel_jobs(self, process: int) -> None:
        """See `Connection`."""
        self.cancel(self._futures.pop(process, []))

    @abstractmethod
    def num_slots(self) -> int:
        """Number of tasks that run at the same time."""

    @abstractmethod
    def put(self, function: bytes) -> Future:
        """Load the pickled function of many tasks on the cluster."""

    @abstractmethod
    def submit(
        self, job: Job, function: Future, arguments: Sequence[Any], outputs: int
    ) -> list[Future]:
        """Submit a task of a job, whose function returns a list of `outputs` results."""

    @abstractmethod
    def wait(self, futures: Sequence[Future], seconds: float | None) -> None:
        """Wait for all tasks.

        Raises:
            TimeoutError: they did not end in time.
            WorkerError: the cluster gave up a task, or does not answer.
            Exception: the exception of a task.
        """

    @abstractmethod
    def cancel(self, futures: Sequence[Future]) -> None:
        """Cancel tasks."""


class DaskConnection(FuturesConnection):
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
        super().__init__()
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
        """See `FuturesConnection`."""
        return sum(self._client.nthreads().values())

    def put(self, function: bytes) -> Future:
        """See `FuturesConnection`."""
        # a task, so that it is repeated if the worker with its result dies
        return self._client.submit(pickle.loads, function, pure=False)

    def submit(
        self, job: Job, function: Future, arguments: Sequence[Any], outputs: int
    ) -> list[Future]:
        """See `FuturesConnection`."""
        submit = partial(self._client.submit, pure=False)
        results = submit(operator.call, function, *arguments)
        return [submit(operator.getitem, results, place) for place in range(outputs)]

    def wait(self, futures: Sequence[Future], seconds: float | None) -> None:
        """See `FuturesConnection`."""
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
        """See `FuturesConnection`."""
        if self.is_alive():
            self._client.cancel(futures)

    def close(self) -> None:
        """See `Connection`."""
        self._client.close()

    def is_alive(self) -> bool:
        """See `Connection`."""
        return bool(self._client.status == "running")


class RayConnection(FuturesConnection):
    """Connection to a Ray cluster.

    Args:
        engine: its address is `auto`, `HOST:PORT` or `ray://HOST:PORT`; its options are
            those of each task (RAY_TASK_OPTIONS), and keyword arguments of `ray.init`.
    """

    cpus_option = "num_cpus"

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
        super().__init__()
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
        self._call = ray.remote(
            lambda function, *arguments: pickle.loads(function)(*arguments)
        )

    def num_slots(self) -> int:
        """See `FuturesConnection`."""
        num_cpus = self._ray.cluster_resources().get("CPU", 1)
        return max(1, int(num_cpus / (self._options.get("num_cpus") or 1)))

    def put(self, function: bytes) -> Future:
        """See `FuturesConnection`."""
        check_head(self._address, HEAD_SECONDS, ENDED_ADVICE)
        return self._ray.put(function)

    def submit(
        self, job: Job, function: Future, arguments: Sequence[Any], outputs: int
    ) -> list[Future]:
        """See `FuturesConnection`."""
        options = {"num_gpus": int(job.gpu and self._has_gpus), **self._options}
        if job.threads < self.num_threads(self._options):
            options["num_cpus"] = job.threads
        call = self._call.options(name="gristmill", num_returns=outputs, **options)
        futures = call.remote(function, *arguments)
        return [futures] if outputs == 1 else futures

    def wait(self, futures: Sequence[Future], seconds: float | None) -> None:
        """See `FuturesConnection`."""
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
        """See `FuturesConnection`."""
        for future in futures:
            self._ray.cancel(future, force=True)

    def close(self) -> None:
        """See `Connection`."""
        self._ray.shutdown()

    def is_alive(self) -> bool:
        """See `Connection`."""
        return bool(self._ray.is_initialized())


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
