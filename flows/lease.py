"""Who may write into a stage folder: a numbered lease, whose number is the fencing token.

A lease is taken by creating `lease/<n>.json` exclusively, with n one above the highest there. It holds while its
owner's process lives and its heartbeat is fresh; the number is compared before every commit, so that an owner that
was paused and overtaken cannot commit. Only exclusive create is needed of the file system.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import create_exclusively, read_json, write_json

BEAT_SECONDS = 15.0
STALE_SECONDS = 90.0
WAIT_SECONDS = 0.5
KILL_SECONDS = 5.0
log = logging.getLogger("gristmill.lease")


class LeaseLostError(RuntimeError):
    """Somebody else works on this output now; what this process made must not count."""


@dataclass
class Lease:
    """The right to write into one stage folder."""

    folder: Path
    number: int
    on_lost: Callable[[], None] | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def check(self) -> None:
        """Raise LeaseLostError if a later lease exists."""
        if highest(self.folder) != self.number:
            raise LeaseLostError(f"{self.folder.parent} was taken over by another run; this attempt stops")

    def name_child(self, pid: int) -> None:
        """Write down the process group that does the work, so that whoever takes over can end it."""
        write_json(self.folder / f"{self.number}.child.json", identity(pid))

    def start_heartbeat(self) -> None:
        """Keep the lease fresh, and call `on_lost` once if it is lost."""
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the lease back. The heartbeat ends first, so that it cannot find the lease gone."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        create_exclusively(self.folder / f"{self.number}.done", b"")

    def _beat(self) -> None:
        beats = 0
        while not self._stop.wait(BEAT_SECONDS):
            beats += 1
            try:
                write_json(self.folder / f"{self.number}.beat.json", {"beats": beats})
                lost = highest(self.folder) != self.number
            except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
                # A full disk, or a store that is away for a while, is no loss yet: the next beat tells.
                log.warning("the lease of %s could not be kept fresh: %s", self.folder.parent, error)
                continue
            if lost:
                if self.on_lost is not None:
                    self.on_lost()
                return


def acquire(folder: Path, on_wait: Callable[[dict[str, Any]], None], wanted: Callable[[], bool]) -> Lease | None:
    """Take the lease of a stage folder, waiting for a living owner.

    Args:
        folder: the stage folder's `lease/`.
        on_wait: called once with the owner's identity when this process has to wait.
        wanted: asked before every try; once it is False (the owner committed), None is returned.
    """
    waited = False
    beats = _BeatWatch()
    while wanted():
        number = highest(folder)
        owner = read_json(folder / f"{number}.json") if number else None
        if owner is None or (folder / f"{number}.done").exists() or beats.is_dead(folder, number, owner):
            _end_orphan(folder / f"{number}.child.json")
            content = json.dumps(identity(os.getpid())).encode()
            if create_exclusively(folder / f"{number + 1}.json", content):
                return Lease(folder, number + 1)
            continue
        if not waited:
            on_wait(owner)
            waited = True
        time.sleep(WAIT_SECONDS)
    return None


def running_owner(folder: Path) -> dict[str, Any] | None:
    """The identity of the living owner of a stage folder's lease on this machine, if there is one."""
    number = highest(folder)
    if not number or (folder / f"{number}.done").exists():
        return None
    owner: dict[str, Any] = read_json(folder / f"{number}.json")
    return owner if owner["host"] != socket.gethostname() or is_alive(owner) else None


def identity(pid: int) -> dict[str, Any]:
    """What tells a process apart from all others, also from one with the same number later."""
    return {"host": socket.gethostname(), "boot": _boot_id(), "pid": pid, "ticks": _start_ticks(pid)}


def is_alive(owner: dict[str, Any]) -> bool:
    """Whether a process of this machine still runs."""
    if owner["boot"] != _boot_id():
        return False
    ticks = _start_ticks(owner["pid"])
    return ticks is not None and ticks == owner["ticks"]


def is_gone(owner: dict[str, Any]) -> bool:
    """Whether a process is known to have ended; of one on another machine nothing is known."""
    return owner["host"] == socket.gethostname() and not is_alive(owner)


class _BeatWatch:
    """Finds out whether an owner elsewhere is dead: its heartbeat has not changed for a while, by our own clock."""

    def __init__(self) -> None:
        self._seen: tuple[int, Any, float] = (0, None, 0.0)

    def is_dead(self, folder: Path, number: int, owner: dict[str, Any]) -> bool:
        if owner["host"] == socket.gethostname():
            return not is_alive(owner)
        beat = folder / f"{number}.beat.json"
        current = read_json(beat) if beat.exists() else None
        if self._seen[:2] != (number, current):
            self._seen = (number, current, time.monotonic())
        return time.monotonic() - self._seen[2] > STALE_SECONDS


def _end_orphan(record: Path) -> None:
    """End the process group that a dead owner left behind on this machine, before anything else is written."""
    if not record.exists():
        return
    child = read_json(record)
    if child["host"] != socket.gethostname():
        return
    deadline = time.monotonic() + KILL_SECONDS
    while is_alive(child) and time.monotonic() < deadline:
        try:
            os.killpg(child["pid"], signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.05)


def highest(folder: Path) -> int:
    """The number of the newest lease of a stage folder's `lease/`; 0 where there was none."""
    if not folder.exists():
        return 0
    return max((int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit()), default=0)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _start_ticks(pid: int) -> int | None:
    """Start of a living process in clock ticks since boot (/proc/PID/stat, field 22); None for none or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(fields[18])
