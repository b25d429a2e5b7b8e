"""Starting, watching and ending the process of a stage."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from gristmill.core.files import is_local
from gristmill.core.processes import STAGE_ENVIRONMENT, wait_until
from gristmill.core.secrets import VARIABLE, mask_addresses, mask_text
from gristmill.core.stage_context import EVENT_PREFIX
from gristmill.flows.running.fork_server import Forked, ForkServer

EXECUTE = "gristmill.flows.running.execute"
"""Module that does a stage's work."""
TURN_SECONDS = 1.0
"""Interval of waiting."""
TERMINATE_SECONDS = 15.0
"""Time for a checkpoint after SIGTERM. Cancelling in the UI takes as long; Prefect
kills the flow after 30 s.
"""
QUIET_SECONDS = 0.5
"""Time after SIGTERM before a message about the wait."""
KILL_SECONDS = 5.0
LOG_TAIL_LINES = 20
Event = dict[str, Any]
log = logging.getLogger("gristmill.process")


class LogFile:
    """Log file of a stage's output. If the disk is full, lines are dropped instead of
    blocking the stage.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sink: IO[bytes] | None = None

        def open_sink() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_local(path):
                self._sink = open(path, "ab", buffering=0)  # noqa: SIM115 - `close` closes it
                return
            earlier = path.read_bytes() if path.exists() else b""
            self._sink = path.open("wb")
            self._sink.write(earlier)

        self._lose_on_error(open_sink)

    def write(self, line: bytes) -> None:
        """Append a line, unbuffered, so that `gristmill logs` sees it."""
        sink = self._sink
        if sink is not None:
            self._lose_on_error(lambda: sink.write(line))

    def close(self) -> None:
        """Close the file; one in an object store exists only then."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._lose_on_error(sink.close)

    def _lose_on_error(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
            # Output must be read on, or the stage would block; if the stage cannot
            # write either, it reports the reason.
            log.warning("%s cannot be written: %s", self._path, error)
            self._sink = None


class ForkedProcess:
    """A fork with the needed part of the interface of `subprocess.Popen`.

    Attributes:
        pid: process number.
    """

    def __init__(self, forked: Forked) -> None:
        self._end: Future[int] = Future()
        self.pid = forked.begun()
        threading.Thread(
            target=lambda: self._end.set_result(forked.wait()), daemon=True
        ).start()

    def poll(self) -> int | None:
        """Exit code, once it has ended."""
        return self._end.result() if self._end.done() else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code (negative: the signal that ended it).

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        try:
            return self._end.result(timeout)
        except TimeoutError as error:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from error


class StageProcess:
    """A stage's process group, with its output in a log file, and its events passed to
    a callback on a thread.

    Lines of the log are events too, `{"event": "log", "line": ...}`, for subscribers.
    `secrets` holds the part of the stage's description split off by
    `core.secrets.split_secrets`. With a `server`, the process is forked from it after
    importing `imports`. Otherwise it runs a module (`EXECUTE` by default) with the
    folder and further `arguments`. `environment` is added to that of this process.
    """

    def __init__(
        self,
        stage_folder: Path,
        log: Path,
        on_event: Callable[[Event], None],
        secrets: str | None = None,
        server: ForkServer | None = None,
        module: str = EXECUTE,
        arguments: Sequence[str] = (),
        imports: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        environment = {
            **os.environ,
            **environment,
            "GRISTMILL_PARENT": str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
            "PYTHONHASHSEED": "0",
            **{
                name: os.environ.get(name, value)
                for name, value in STAGE_ENVIRONMENT.items()
            },
            VARIABLE: secrets or "[]",
        }
        self._log = log
        self._failures: list[Event] = []
        read, write = os.pipe()
        self._output = open(read, "rb")  # noqa: SIM115 - whoever reads it closes it
        self._process: subprocess.Popen[bytes] | ForkedProcess
        try:
            if server is not None:
                self._process = ForkedProcess(
                    server.start(environment, imports, write, [str(stage_folder)])
                )
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(stage_folder), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=write,
                    stderr=write,
                    start_new_session=True,
                    env=environment,
                )
        except BaseException:
            self._output.close()
            raise
        finally:
            os.close(write)
        self._on_event = on_event
        self._tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process number of the group's leader."""
        return self._process.pid

    def wait(self) -> int:
        """Wait for the end, and return the exit code (negative: the signal that ended
        it).

        Waits in intervals, because an interrupt right before the waiting system call is
        seen only when the call returns.
        """
        code = None
        while code is None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(TURN_SECONDS)
        self._reader.join(timeout=5)
        return code

    def tail(self) -> list[str]:
        """Last lines of the process's output, without empty lines and rules."""
        return [line for line in self._tail if line.strip(" =-")]

    def cause(self) -> tuple[str, bool] | None:
        """Cause of the end as reported by the process: by the first rank that failed by
        itself, if there is one.

        Returns:
            a sentence, and True if the rank ended only because another one did.
        """
        if not self._failures:
            return None
        failure = min(self._failures, key=lambda event: bool(event["is_consequence"]))
        return str(failure["message"]), bool(failure["is_consequence"])

    def was_killed(self, code: int) -> bool:
        """True if SIGKILL ended the process, one of its workers, or one of its ranks.

        Args:
            code: its exit code.
        """
        return code == -signal.SIGKILL or any(
            event.get("is_killed", False) for event in self._failures
        )

    def stop(self) -> None:
        """End the group: SIGTERM, wait, SIGKILL. Subscribers get an event if it does
        not end within `QUIET_SECONDS`.
        """
        self._signal(signal.SIGTERM)

        def has_ended() -> bool:
            return self._process.poll() is not None

        if not wait_until(has_ended, QUIET_SECONDS, 0.05):
            self._on_event({"event": "stopping", "seconds": TERMINATE_SECONDS})
            wait_until(has_ended, TERMINATE_SECONDS - QUIET_SECONDS, 0.05)
        self.kill()
        self._reader.join(timeout=5)  # for the last output

    def kill(self) -> None:
        """Kill the group, and return when it is gone."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        wait_until(lambda: not self._signal(0), KILL_SECONDS, 0.01)

    def _signal(self, number: int) -> bool:
        """Send a signal to the group; False if it has no process left."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _read(self) -> None:
        log = LogFile(self._log)
        try:
            with self._output as stream:
                for raw_line in stream:
                    line = raw_line.decode("utf-8", "replace").rstrip("\n")
                    text, event = split_event(line)
                    if event is None or text:
                        masked = mask_text(text)
                        log.write(
                            raw_line if masked == line else masked.encode() + b"\n"
                        )
                        self._tail.append(masked)
                        self._on_event({"event": "log", "line": masked})
                    if event is not None:
                        event = mask_addresses(event)
                        if event["event"] == "failed":
                            self._failures.append(event)
                        self._on_event(event)
        finally:
            log.close()


def split_event(line: str) -> tuple[str, Event | None]:
    """Split a line of a stage's output into text and the event after it.

    User code may print anything without ending the line: invalid events are text.
    """
    before, prefix, content = line.partition(EVENT_PREFIX)
    try:
        event = json.loads(content) if prefix else None
    except ValueError:
        return line, None
    if isinstance(event, dict) and isinstance(event.get("event"), str):
        return before, event
    return line, None
