"""Driver that the stages of a run share: an engine's process on this machine, such as
Spark's Java process.

A stage is a process of its own. With a driver of its own, too, each would start Java
here, and new workers on the cluster. A stage that runs alone (`gristmill stage`) starts
its own driver.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from gristmill.dataprep.runners.errors import WorkerError

IDLE_SECONDS = 60.0
"""Time without a stage after which the driver ends, and with it its workers: a training
does not keep a cluster. Spark's default for idle executors
(`spark.dynamicAllocation.executorIdleTimeout`).
"""
log = logging.getLogger("gristmill.engine")


@dataclass(frozen=True)
class Driver:
    """A running driver.

    Attributes:
        environment: variables by which a stage's process finds it.
        is_running: test if its process runs.
        cancel: ends the jobs that a process has left, by its number.
        close: ends it.
    """

    environment: Mapping[str, str]
    is_running: Callable[[], bool]
    cancel: Callable[[int], None]
    close: Callable[[], None]


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
