"""Heartbeats: files that change while a process lives, for processes on other machines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from gristmill.core.files import read_bytes

BEAT_SECONDS = 15.0
STALE_SECONDS = 90.0
BLIND_SECONDS = 20.0
"""Longest gap between two looks at a heartbeat: after a longer one (of this process or
of the store) waiting restarts.
"""


class Repetition:
    """Thread that calls a function every few seconds, until that returns True.

    As a context manager it stops at the end.
    """

    def __init__(self, function: Callable[[], bool | None], seconds: float) -> None:
        self._function = function
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Repetition:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop, and wait for a call that has begun."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            if self._function():
                return


class BeatWatch:
    """Detector of heartbeats that do not change, by this machine's clock.

    Gaps between looks do not count: if this process was paused or the store did not
    answer, the owner could not show that it lives.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[bytes | None, float, float]] = {}

    def is_stale(self, file: Path) -> bool:
        """True if a file, which may be missing, has not changed for STALE_SECONDS."""
        try:
            beat = read_bytes(file)
        except FileNotFoundError:
            beat = None
        now = time.monotonic()
        earlier_beat, changed, looked = self._seen.get(file, (beat, now, now))
        if beat != earlier_beat or now - looked > BLIND_SECONDS:
            changed = now
        self._seen[file] = beat, changed, now
        return now - changed > STALE_SECONDS
