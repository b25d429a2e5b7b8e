"""Process with the connection to a cluster that the stages of a run share
(`connections.py`).

A stage is a process of its own. With a connection of its own, too, each would start
Java for Spark here, and new workers on the cluster. Stages send their jobs through a
socket that only this user can open.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from gristmill.core.processes import end_after_parent
from gristmill.dataprep.runners.connections import (
    PROBED_VARIABLE,
    VARIABLE,
    ConnectionManager,
    connect,
    shared_address,
)
from gristmill.dataprep.runners.errors import WorkerError
from gristmill.mixtures.schema.engine import BeamEngine

IDLE_SECONDS = 60.0
"""Time without a stage after which the driver ends, and with it its workers: a training
does not keep a cluster. Spark's default for idle executors
(`spark.dynamicAllocation.executorIdleTimeout`).
"""
log = logging.getLogger("gristmill.engine")


class Driver:
    """The process.

    Attributes:
        environment: variables by which a stage's process finds it.

    Raises:
        WorkerError: it does not start.
    """

    def __init__(self, engine: BeamEngine) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gristmill-cluster-")
        self._address = str(Path(self._folder.name, "socket"))
        self._key = secrets.token_bytes(32)
        self.environment: Mapping[str, str] = {
            VARIABLE: f"{self._address} {self._key.hex()}",
            PROBED_VARIABLE: str(Path(self._folder.name, "probed")),
        }
        settings = engine.model_dump_json(include=set(BeamEngine.model_fields))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, **self.environment},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        with self._process.stdout as output:
            is_listening = output.readline()
        if not is_listening:
            code = self._process.wait()
            raise WorkerError(f"{engine.runner}: its driver ended with code {code}")

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def is_running(self) -> bool:
        """Test if it runs."""
        return self._process.poll() is None

    def cancel(self, pid: int) -> None:
        """Cancel the jobs that a process has left, by its number."""
        manager: Any = ConnectionManager(self._address, self._key)
        # it has just ended, and its jobs with it; or it never met the cluster
        with suppress(OSError, EOFError, WorkerError):
            manager.connect()
            manager.connection().cancel_jobs(pid)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()


class SharedProcess(Protocol):
    """Process that the stages of a run share: a driver, or Flink's job server."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables by which a stage's process finds it."""

    def is_running(self) -> bool:
        """Test if it runs."""

    def cancel(self, pid: int) -> None:
        """Cancel the jobs that a process has left, by its number."""

    def close(self) -> None:
        """End it."""


class SharedDriver:
    """Driver of a run, which runs while stages use it.

    One thread of this object starts and ends it: Linux ends a job server with the
    thread that started it.

    Args:
        start: starts the driver.
    """

    def __init__(self, start: Callable[[], SharedProcess]) -> None:
        self._start = start
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="driver")
        self._driver: SharedProcess | None = None
        self._users = 0
        self._timer: threading.Timer | None = None

    def start_soon(self) -> None:
        """Start the driver in the background."""
        self._thread.submit(self._use, 0)

    @contextmanager
    def used(self) -> Iterator[Mapping[str, str]]:
        """Context of a stage's process; yields the driver's environment, empty if it
        does not start: then the stage tries it, and reports the reason.
        """
        environment = self._thread.submit(self._use, 1).result()
        try:
            yield environment
        finally:
            self._thread.submit(self._leave)

    def cancel(self, pid: int) -> None:
        """End the jobs of a process that has failed."""
        self._thread.submit(self._cancel, pid).result()

    def close(self) -> None:
        """End the driver."""
        self._thread.submit(self._end).result()

    def _use(self, users: int) -> Mapping[str, str]:
        self._users += users
        if self._timer is not None:
            self._timer.cancel()
        if self._driver is None or not self._driver.is_running():
            self._end()
            try:
                self._driver = self._start()
            except WorkerError as error:
                log.debug("the engine's driver does not start: %s", error)
                return {}
        self._end_later()
        return self._driver.environment

    def _leave(self) -> None:
        self._users -= 1
        self._end_later()

    def _cancel(self, pid: int) -> None:
        if self._driver is not None and self._driver.is_running():
            self._driver.cancel(pid)

    def _end_later(self) -> None:
        if self._users:
            return
        self._timer = threading.Timer(
            IDLE_SECONDS, self._thread.submit, [self._end_if_idle]
        )
        self._timer.daemon = True
        self._timer.start()

    def _end_if_idle(self) -> None:
        if not self._users:
            self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()


def main(settings: str) -> None:
    """Serve the connection until the run ends."""
    end_after_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    engine = BeamEngine.model_validate_json(settings)
    ConnectionManager.register(
        "connection", partial(connect, engine), exposed=("run", "cancel_jobs")
    )
    server = ConnectionManager(*shared_address()).get_server()
    print(flush=True)
    threading.Thread(target=connect_early, args=(engine,), daemon=True).start()
    server.serve_forever()


def connect_early(engine: BeamEngine) -> None:
    """Connect before the first job; if it fails, the stage's attempt reports it."""
    with suppress(WorkerError):
        connect(engine)


if __name__ == "__main__":
    main(sys.argv[1])
