"""Beam worker for portable engines, started from this installation without a container.

`gristmill-worker` is the program for `environment_type: PROCESS`, given by its path.
With `--pool HOST:PORT` it is the server for `environment_type: EXTERNAL`, given by its
address: it starts a worker whenever an engine requests one. Engines request workers for
every job, and a worker's imports take longer than a small job, so Python's fork server
imports them once. All processes end with the process that started them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from gristmill.core.processes import end_after_parent, end_with_parent
from gristmill.dataprep.runners.pool import PRELOADED
from gristmill.dataprep.runners.portable import PROGRAM
from gristmill.dataprep.runners.runner import import_beam, listening_on
from gristmill.dataprep.runners.worker_bootstrap import PRELOADED as MOST_NEEDED

IMPORTED = (
    PRELOADED,
    "apache_beam.runners.worker.sdk_worker",
    "apache_beam.runners.worker.worker_id_interceptor",
    *MOST_NEEDED,
)
"""Modules that a pool's fork server imports; the first prevents imports from starting
threads, which forks lose.
"""


Do = Callable[[str, str | None, str | None], None]
"""Function of a worker: its name, and the control and provision endpoints."""


def main(arguments: list[str] | None = None) -> int:
    """Run a worker, or a pool that starts workers."""
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__)
    parser.add_argument(
        "--pool", metavar="HOST:PORT", help="start workers when asked to, here"
    )
    parser.add_argument("--id", default="", help="what the engine calls this worker")
    parser.add_argument("--provision_endpoint", help="where the engine says the rest")
    parser.add_argument(
        "--control_endpoint",
        help="where the engine hands out work, unless it says so there",
    )
    # engines pass further Beam arguments
    parsed, _ = parser.parse_known_args(arguments)
    end_after_parent(signal.SIGKILL)
    import_beam()
    if parsed.pool:
        return serve(parsed.pool)
    if not (parsed.control_endpoint or parsed.provision_endpoint):
        parser.error("an engine starts this, or --pool HOST:PORT is needed")
    work(parsed.id, parsed.control_endpoint, parsed.provision_endpoint)
    return 0


def serve(address: str) -> int:
    """Start workers on request of an engine, until a signal arrives."""
    host, _, port = address.rpartition(":")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED))
    multiprocessing.forkserver.ensure_running()
    with listening_on(host or "127.0.0.1"):
        _, server = pool_type().start(use_process=True, port=int(port))
    for number in (signal.SIGTERM, signal.SIGINT):  # workers end with this process
        signal.signal(number, lambda *_: os._exit(0))
    print(f"{PROGRAM}: starting workers for whoever asks at {address}", flush=True)
    server.wait_for_termination()
    return 0


def pool_type() -> Any:
    """Make Beam's worker pool with forked workers, safe for several machines of an
    engine.

    Two TaskManagers of Flink may give their workers the same id, and Beam's pool would
    stop the wrong one. Workers with a shared id are not stopped; they end when their
    connection closes.
    """
    from apache_beam.portability.api import beam_fn_api_pb2
    from apache_beam.runners.worker.worker_pool_main import (
        BeamFnExternalWorkerPoolServicer,
    )

    class Pool(BeamFnExternalWorkerPoolServicer):  # type: ignore[misc, unused-ignore]
        """Pool that records ids used twice; `do` is the function of a worker."""

        def __init__(self, do: Do = work, **_: Any) -> None:
            super().__init__()
            self.workers: dict[str, BaseProcess] = {}
            self._do, self._alike = do, set[str]()
            self._lock = threading.Lock()  # machines may send requests concurrently

        def StartWorker(self, request: Any, context: Any) -> Any:
            name = request.worker_id
            process = multiprocessing.get_context("forkserver").Process(
                target=begin,
                args=(
                    self._do,
                    name,
                    request.control_endpoint.url,
                    request.provision_endpoint.url,
                ),
            )
            with self._lock:
                earlier = self.workers.get(name)
                if earlier is not None and earlier.is_alive():
                    self._alike.add(name)
                try:
                    process.start()
                except OSError as error:
                    return beam_fn_api_pb2.StartWorkerResponse(error=str(error))
                self.workers[name] = process
            return beam_fn_api_pb2.StartWorkerResponse()

        def StopWorker(self, request: Any, context: Any) -> Any:
            with self._lock:
                if (
                    request.worker_id not in self._alike
                    and request.worker_id in self.workers
                ):
                    end_worker(self.workers.pop(request.worker_id))
            return beam_fn_api_pb2.StopWorkerResponse()

    return Pool


def end_worker(worker: BaseProcess) -> None:
    """Kill a worker, which has reported its results by now."""
    worker.kill()
    worker.join()


def begin(do: Do, *arguments: str) -> None:
    """Run a forked worker."""
    end_with_parent(signal.SIGKILL, os.getppid())
    import_beam()
    do(*arguments)


def work(name: str, control: str | None, provision: str | None) -> None:
    """Do the work of an engine until it closes the connection."""
    import grpc
    from apache_beam.portability.api import (
        beam_provision_api_pb2,
        beam_provision_api_pb2_grpc,
    )
    from apache_beam.runners.worker.sdk_worker import SdkHarness
    from apache_beam.runners.worker.worker_id_interceptor import WorkerIdInterceptor

    if not control:
        with grpc.insecure_channel(str(provision)) as channel:
            identified = grpc.intercept_channel(channel, WorkerIdInterceptor(name))
            service = beam_provision_api_pb2_grpc.ProvisionServiceStub(identified)
            answer = service.GetProvisionInfo(
                beam_provision_api_pb2.GetProvisionInfoRequest()
            )
        control = str(answer.info.control_endpoint.url)
    SdkHarness(control, worker_id=name).run()


if __name__ == "__main__":
    sys.exit(main())
