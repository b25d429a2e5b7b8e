"""A worker of Beam for Python as portable engines start one: without a container, from this very installation.

`gristmill-worker` is the program that `environment_type: PROCESS` wants by its path. With `--pool HOST:PORT` it is
what `environment_type: EXTERNAL` wants by its address: a server that starts a worker whenever an engine asks for one.
Engines ask for every job, and what a worker imports takes longer than a small job: the server has it imported once, by
Python's fork server. All end with whoever started them.
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

from gristmill.dataprep.jobs.pool import PRELOADED
from gristmill.dataprep.jobs.portable import PROGRAM
from gristmill.dataprep.jobs.runner import import_beam, listening_on
from gristmill.dataprep.processes import end_after_parent, end_with_parent

IMPORTED = (PRELOADED, "apache_beam.runners.worker.sdk_worker", "apache_beam.runners.worker.worker_id_interceptor")
"""What a pool's fork server imports; the first one sees to it that no thread is started, which a fork would lose."""


def main(arguments: list[str] | None = None) -> int:
    """Be one worker, or a pool that starts them."""
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__)
    parser.add_argument("--pool", metavar="HOST:PORT", help="start workers when asked to, here")
    parser.add_argument("--id", default="", help="what the engine calls this worker")
    parser.add_argument("--provision_endpoint", help="where the engine says the rest")
    parser.add_argument("--control_endpoint", help="where the engine hands out work, unless it says so there")
    given, _ = parser.parse_known_args(arguments)  # engines give more of Beam's than is needed here
    end_after_parent(signal.SIGKILL)
    import_beam()
    if given.pool:
        return serve(given.pool)
    if not (given.control_endpoint or given.provision_endpoint):
        parser.error("an engine starts this, or --pool HOST:PORT is needed")
    work(given.id, given.control_endpoint, given.provision_endpoint)
    return 0


def serve(address: str) -> int:
    """Start workers when an engine asks for them, until a signal comes."""
    host, _, port = address.rpartition(":")
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED))
    multiprocessing.forkserver.ensure_running()
    with listening_on(host or "127.0.0.1"):
        _, server = pool_type().start(use_process=True, port=int(port))
    for number in (signal.SIGTERM, signal.SIGINT):  # its end is what ends the workers: nobody waits for them
        signal.signal(number, lambda *_: os._exit(0))
    print(f"{PROGRAM}: starting workers for whoever asks at {address}", flush=True)
    server.wait_for_termination()
    return 0


def pool_type() -> Any:
    """Beam's pool, with forks as its workers, and for several machines of an engine.

    Two TaskManagers of Flink call their workers alike, and Beam's pool would end the one's where it is told to end the
    other's. Those that are called alike are left to end with the connection to whom they work for.
    """
    from apache_beam.portability.api import beam_fn_api_pb2
    from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer

    class Pool(BeamFnExternalWorkerPoolServicer):  # type: ignore[misc, unused-ignore]
        """Which knows the names that were given twice; `do` is what a worker does."""

        def __init__(self, do: Callable[[str, str | None, str | None], None] = work, **_: Any) -> None:
            super().__init__()
            self.workers: dict[str, BaseProcess] = {}
            self._do, self._alike = do, set[str]()
            self._lock = threading.Lock()  # two machines ask at the same time

        def StartWorker(self, request: Any, context: Any) -> Any:
            name = request.worker_id
            process = multiprocessing.get_context("forkserver").Process(
                target=begin, args=(self._do, name, request.control_endpoint.url, request.provision_endpoint.url)
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
                if request.worker_id not in self._alike and request.worker_id in self.workers:
                    end_worker(self.workers.pop(request.worker_id))
            return beam_fn_api_pb2.StopWorkerResponse()

    return Pool


def end_worker(worker: BaseProcess) -> None:
    """End a worker: what it has done it has told by now."""
    worker.kill()
    worker.join()


def begin(do: Callable[[str, str | None, str | None], None], *asked: str) -> None:
    """What a forked worker does."""
    end_with_parent(signal.SIGKILL, os.getppid())
    import_beam()
    do(*asked)


def work(name: str, control: str | None, provision: str | None) -> None:
    """Do what an engine hands out, until it ends the connection."""
    from apache_beam.runners.worker.sdk_worker import SdkHarness

    SdkHarness(control or find_control(name, str(provision)), worker_id=name).run()


def find_control(name: str, provision: str) -> str:
    """Ask an engine where it hands out work."""
    import grpc
    from apache_beam.portability.api import beam_provision_api_pb2, beam_provision_api_pb2_grpc
    from apache_beam.runners.worker.worker_id_interceptor import WorkerIdInterceptor

    with grpc.insecure_channel(provision) as channel:
        asked = grpc.intercept_channel(channel, WorkerIdInterceptor(name))
        service = beam_provision_api_pb2_grpc.ProvisionServiceStub(asked)
        answer = service.GetProvisionInfo(beam_provision_api_pb2.GetProvisionInfoRequest())
    return str(answer.info.control_endpoint.url)


if __name__ == "__main__":
    sys.exit(main())
