"""The worker processes of the local runner, each with a watchdog: Beam's own hang for ever once a worker is killed.

Beam resolves a bundle when the worker answers. A worker that is gone never answers, so the watchdog answers in its
place, with an error, whatever is asked of it from then on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from apache_beam.portability.api import beam_fn_api_pb2, endpoints_pb2
from apache_beam.runners.portability.fn_api_runner.worker_handlers import GrpcWorkerHandler, WorkerHandler
from apache_beam.transforms import environments
from google.protobuf import text_format

from gristmill.dataprep.jobs.fork_server import ONE_THREAD, Forked, fork_server

URN = "gristmill:env:worker_process:v1"
CLOSE_SECONDS = 5.0
"""How long a worker whose connection was closed may take to end by itself."""
TAIL_LINES = 20
"""Lines of a dead worker's output that its error shows."""


class WorkerProcessEnvironment(environments.Environment):
    """Names `WorkerProcess` as what runs the pipeline's functions.

    Args:
        module: of this package, which the functions need, or empty.
    """

    def __init__(self, module: str) -> None:
        super().__init__(capabilities=environments.python_sdk_capabilities(), artifacts=())
        self._module = module

    def to_runner_api_parameter(self, context: Any) -> tuple[str, bytes]:
        """Beam's form of it."""
        return URN, self._module.encode()


@WorkerHandler.register_environment(URN, bytes)
class WorkerProcess(GrpcWorkerHandler):
    """One worker process, and what is known about its end.

    Attributes:
        process: the process, once asked for.
        death: how it ended, where nobody asked it to: "was killed by signal 9, most likely out of memory".
    """

    def __init__(self, payload: bytes, state: Any, provision_info: Any, grpc_server: Any) -> None:
        super().__init__(state, provision_info, grpc_server)
        self.process: Forked | None = None
        self._modules = [payload.decode()] if payload else []
        self.death: str | None = None
        self._closing = False
        self._over = threading.Event()
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._answer_for_the_dead()

    def start_worker(self) -> None:
        """Ask for the process, and start its watchdog."""
        control = text_format.MessageToString(endpoints_pb2.ApiServiceDescriptor(url=self.control_address))
        environment = {
            **dict.fromkeys(ONE_THREAD, "1"), **os.environ,
            "CONTROL_API_SERVICE_DESCRIPTOR": control,
            "WORKER_ID": self.worker_id,
            "PIPELINE_OPTIONS": json.dumps({"options": {"default_sdk_harness_log_level": "WARNING"}}),
        }  # fmt: skip
        reading, writing = os.pipe()
        try:
            self.process = fork_server().start(environment, self._modules, writing)
        finally:
            os.close(writing)
        reader = threading.Thread(target=self._forward_output, args=(reading,), daemon=True)
        reader.start()
        threading.Thread(target=self._watch, args=(self.process, reader), daemon=True).start()

    def stop_worker(self) -> None:
        """Wait for the process, whose connection is closed, and insist where it stays."""
        if self.process is None:
            return
        if not self._over.wait(CLOSE_SECONDS):
            self.kill()
        self._over.wait()

    def close(self) -> None:
        """Close the connection and wait for the process to end."""
        self._closing = True
        with suppress(grpc.RpcError):  # the data channel raises here what ended it: the death of the worker
            super().close()
        self.stop_worker()

    def kill(self) -> None:
        """End the process at once; what waits for it gets an error."""
        self._closing = True
        if self.process is not None:
            self.process.kill()

    def has_died(self, seconds: float) -> bool:
        """Whether it ended by itself; waits so long for its end to be noticed."""
        self._over.wait(seconds)
        return self.death is not None

    def describe_death(self, number: int) -> str:
        """The sentence about its death, where it is worker `number` of its job."""
        pid = "none" if self.process is None else self.process.pid
        tail = "".join(f"\n  {line}" for line in self._tail)
        return f"worker {number} (pid {pid}) {self.death}{'; it printed:' if tail else ''}{tail}"

    def _watch(self, process: Forked, reader: threading.Thread) -> None:
        code = process.wait()
        if not self._closing:
            self.death = describe_exit(code)
        reader.join(timeout=1)
        self._over.set()
        error = self.death or "was stopped"
        # The queue's own dictionary: a snapshot, since the thread that reads answers removes from it.
        for instruction, future in list(self.control_conn._futures_by_id.items()):
            future.set(beam_fn_api_pb2.InstructionResponse(instruction_id=instruction, error=error))

    def _answer_for_the_dead(self) -> None:
        connection = self.control_conn
        push = connection.push

        def push_or_fail(request: Any) -> Any:
            future = push(request)
            if future is not None and self._over.is_set():
                error = self.death or "was stopped"
                future.set(beam_fn_api_pb2.InstructionResponse(instruction_id=request.instruction_id, error=error))
            return future

        connection.push = push_or_fail
        connection._read_thread = threading.Thread(target=until_gone(connection._read), daemon=True)
        self.data_conn._read_inputs = until_gone(self.data_conn._read_inputs)

    def _forward_output(self, reading: int) -> None:
        """Show what the worker prints, on standard error: standard output is for events."""
        with open(reading, encoding="utf-8", errors="replace", newline="\n") as stream:
            for raw in stream:
                line = raw.rstrip("\n")
                self._tail.append(line)
                sys.stderr.write(f"{self.worker_id}: {line}\n")


def until_gone(read: Callable[..., None]) -> Callable[..., None]:
    """The same function, ending quietly where the worker at the other end is gone: the watchdog says so."""

    def read_until_gone(*arguments: Any) -> None:
        with suppress(grpc.RpcError):
            read(*arguments)

    return read_until_gone


def describe_exit(code: int) -> str:
    """What an exit code says, in words (negative: the signal that ended the process)."""
    if code >= 0:
        return f"ended with exit code {code}"
    if code == -signal.SIGKILL:
        return "was killed by signal 9, most likely out of memory; fewer engine.workers need less"
    return f"was killed by signal {-code} ({signal.Signals(-code).name})"
