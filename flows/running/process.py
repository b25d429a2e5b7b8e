"""Starting, watching and ending the process of a stage."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from gristmill.dataprep.context import EVENT_PREFIX
from gristmill.dataprep.files import is_local
from gristmill.dataprep.processes import STAGE_ENVIRONMENT
from gristmill.dataprep.secrets import VARIABLE, mask_addresses, mask_text
from gristmill.flows.running.fork_server import Forked, ForkServer

EXECUTE = "gristmill.flows.running.execute"
"""Does a stage's work."""
TURN_SECONDS = 1.0
"""So long is waited at a time."""
TERMINATE_SECONDS = 15.0
"""For a checkpoint after SIGTERM. Whoever cancels in the UI waits for as long, and Prefect kills after 30 s."""
UNTOLD_SECONDS = 0.5
"""A process that was asked to end is waited for so long without a word."""
KILL_SECONDS = 5.0
LOG_TAIL_LINES = 20
Event = dict[str, Any]
log = logging.getLogger("gristmill.process")


class LogFile:
    """Takes the lines that a stage prints. On a disk that is full they are lost, and the stage is not kept waiting."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sink: IO[bytes] | None = None
        self._lose_on_error(self._open)

    def write(self, line: bytes) -> None:
        """Append a line; unbuffered, so that `gristmill logs` sees it."""
        sink = self._sink
        if sink is not None:
            self._lose_on_error(lambda: sink.write(line))

    def close(self) -> None:
        """Close the file; one in an object store is there only then."""
        sink, self._sink = self._sink, None
        if sink is not None:
            self._lose_on_error(sink.close)

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if is_local(self._path):
            self._sink = open(self._path, "ab", buffering=0)  # noqa: SIM115 - `close` closes it
            return
        earlier = self._path.read_bytes() if self._path.exists() else b""
        self._sink = self._path.open("wb")
        self._sink.write(earlier)

    def _lose_on_error(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
            # A stage whose output nobody reads would wait for good; one that cannot write ends by itself, and says why.
            log.warning("%s cannot be written: %s", self._path, error)
            self._sink = None


class ForkedProcess:
    """A fork, with what of `subprocess.Popen` is needed of it.

    Attributes:
        pid: its number.
    """

    def __init__(self, forked: Forked) -> None:
        self._code: int | None = None
        self._forked = forked
        self.pid = forked.begun()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended (negative: the signal that ended it).

        Raises:
            subprocess.TimeoutExpired: it has not, after so many seconds.
        """
        self._thread.join(timeout)
        if self._code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self._code

    def _wait(self) -> None:
        self._code = self._forked.wait()


class StageProcess:
    """A stage's process group: its output goes to a log file, its events to a callback, on a thread of its own.

    The lines of the log are events too, `{"event": "log", "line": ...}`, for those who watch. `secrets` is what
    `dataprep.secrets.split_secrets` left out of the stage's description. With a `server` it is forked from that, once
    this has imported `imports`. It runs a module with the folder and other `arguments`: that which does the stage's
    work, unless another one is named.
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
    ) -> None:
        environment = {
            **os.environ,
            "GRISTMILL_PARENT": str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
            "PYTHONHASHSEED": "0",
            **{name: os.environ.get(name, value) for name, value in STAGE_ENVIRONMENT.items()},
            VARIABLE: secrets or "[]",
        }
        self._log = log
        self._failures: list[Event] = []
        read, write = os.pipe()
        self._output = open(read, "rb")  # noqa: SIM115 - whoever reads it closes it
        try:
            self._process: subprocess.Popen[bytes] | ForkedProcess = (
                ForkedProcess(server.start(environment, imports, write, [str(stage_folder)]))
                if server is not None
                else subprocess.Popen(
                    [sys.executable, "-m", module, str(stage_folder), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=write,
                    stderr=write,
                    start_new_session=True,
                    env=environment,
                )
            )
        except BaseException:
            self._output.close()
            raise
        finally:
            os.close(write)
        self._on_event = on_event
        self._tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._reader = threading.Thread(target=self._read, args=(on_event,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The leader of the process group."""
        return self._process.pid

    def wait(self) -> int:
        """Wait for the end and return the exit code (negative: the signal that ended it).

        In turns: an interrupt that comes between Python's last look for one and the system call that waits is seen
        when that call ends.
        """
        code = None
        while code is None:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(TURN_SECONDS)
        self._reader.join(timeout=5)
        return code

    def tail(self) -> list[str]:
        """The last lines that the process printed, but for empty and ruled ones."""
        return [line for line in self._tail if line.strip(" =-")]

    def cause(self) -> tuple[str, bool] | None:
        """Why the process says that it ended: the first of its ranks that did not end for another one's end, if any.

        Returns:
            a sentence, and whether another process had ended before, and this one for that alone.
        """
        told = sorted(self._failures, key=lambda event: bool(event["is_consequence"]))
        return (str(told[0]["message"]), bool(told[0]["is_consequence"])) if told else None

    def was_killed(self, code: int) -> bool:
        """True if SIGKILL ended it, one of its workers, or one of its ranks.

        Args:
            code: its exit code.
        """
        return code == -signal.SIGKILL or any(event.get("is_killed", False) for event in self._failures)

    def stop(self) -> None:
        """End the whole group: ask, wait, insist; who watches hears of a wait that is longer than a moment."""
        self._signal(signal.SIGTERM)
        started, told = time.monotonic(), False
        while self._process.poll() is None and time.monotonic() < started + TERMINATE_SECONDS:
            if not told and time.monotonic() >= started + UNTOLD_SECONDS:
                self._on_event({"event": "stopping", "seconds": TERMINATE_SECONDS})
                told = True
            time.sleep(0.05)
        self.kill()
        self._reader.join(timeout=5)  # what it has said of its end

    def kill(self) -> None:
        """End the whole group at once, and return when it is gone."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + KILL_SECONDS
        while self._signal(0) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _signal(self, number: int) -> bool:
        """Send a signal to the group; False if there is no process left in it."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _read(self, on_event: Callable[[Event], None]) -> None:
        log = LogFile(self._log)
        try:
            with self._output as stream:
                for raw in stream:
                    self._take_line(raw, log, on_event)
        finally:
            log.close()

    def _take_line(self, raw: bytes, log: LogFile, on_event: Callable[[Event], None]) -> None:
        said = raw.decode("utf-8", "replace").rstrip("\n")
        before, event = split_event(said)
        if event is None or before:
            line = mask_text(before)
            log.write(raw if line == said else line.encode() + b"\n")
            self._tail.append(line)
            on_event({"event": "log", "line": line})
        if event is not None:
            event = mask_addresses(event)
            if event["event"] == "failed":
                self._failures.append(event)
            on_event(event)


def split_event(line: str) -> tuple[str, Event | None]:
    """What a line of a stage's output begins with, and the event behind it.

    Code of the user's may print without ending the line, and anything: what looks like an event but is none is text.
    """
    before, prefix, told = line.partition(EVENT_PREFIX)
    try:
        event = json.loads(told) if prefix else None
    except ValueError:
        return line, None
    is_event = isinstance(event, dict) and isinstance(event.get("event"), str)
    return (before, event) if is_event else (line, None)
