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
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from gristmill.core.processes import end_after_parent
from gristmill.dataprep.runners.connections import (
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
        self.environment = {VARIABLE: f"{self._address} {self._key.hex()}"}
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


class SharedDriver:
    """Driver of a run, which runs while stages use it.

    Args:
        start: starts the driver.
    """

    def __init__(self, start: Callable[[], Driver]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._driver: Driver | None = None
        self._users = 0
        self._timer: threading.Timer | None = None

    def start_soon(self) -> None:
        """Start the driver in the background."""
        threading.Thread(target=self._use, daemon=True).start()

    @contextmanager
    def used(self) -> Iterator[Mapping[str, str]]:
        """Context of a stage's process; yields the driver's environment, empty if it
        does not start: then the stage tries it, and reports the reason.
        """
        with self._lock:
            self._users += 1
        try:
            yield self._use()
        finally:
            with self._lock:
                self._users -= 1
                self._end_later()

    def cancel(self, pid: int) -> None:
        """End the jobs of a process that has failed."""
        with self._lock:
            if self._driver is not None and self._driver.is_running():
                self._driver.cancel(pid)

    def close(self) -> None:
        """End the driver."""
        with self._lock:
            self._end()

    def _use(self) -> Mapping[str, str]:
        with self._lock:
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

    def _end_later(self) -> None:
        if self._users:
            return
        self._timer = threading.Timer(IDLE_SECONDS, self._end_if_idle)
        self._timer.daemon = True
        self._timer.start()

    def _end_if_idle(self) -> None:
        with self._lock:
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
