"""Who may write into a stage folder: a numbered lease, whose number is the fencing token.

    lease/<n>.json         who owns lease n
    lease/<n>.beat.json    its heartbeat
    lease/<n>.child.json   the process group that does its work
    lease/<n>.commit       what it commits, or `fenced`
    lease/<n>.done         it was given back

A lease is taken by creating `<n>.json` exclusively, with n one above the highest there. It holds while its owner's
process lives, which can be seen from within the same PID namespace alone, or else while its heartbeat changes.
Whoever takes over from an owner that did not give its lease back creates `<n>.commit` of that lease first, and an owner
commits by creating the same file: one of them comes too late, however long either was paused. Only exclusive create is
needed of the file system.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import create_exclusively, read_json, write_json

BEAT_SECONDS = 15.0
STALE_SECONDS = 90.0
BLIND_SECONDS = 20.0
"""Between two looks at a heartbeat: who was away for longer, or whose store was, begins to wait anew."""
FORGOTTEN_SECONDS = 3600.0
"""So long after its last heartbeat, by the store's clock and ours, an owner elsewhere is not said to be running."""
FENCED = b"fenced"
"""The content of a commit record whose owner may not commit."""
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

    def follows_one_given_back(self) -> bool:
        """Whether the owner before this one has given its lease back, rather than died."""
        return (self.folder / f"{self.number - 1}.done").exists()

    def commit(self, content: bytes) -> None:
        """Decide that this lease's work counts, by a record that exists once.

        Args:
            content: what is committed; whoever finds the record can publish it.

        Raises:
            LeaseLostError: somebody who took over has decided otherwise.
        """
        if not create_exclusively(self.folder / f"{self.number}.commit", content):
            raise LeaseLostError(
                f"{self.folder.parent} was taken over by another run; this attempt's work is not committed"
            )

    def name_child(self, pid: int) -> None:
        """Write down the process group that does the work, so that whoever takes over can end it."""
        write_json(self.folder / f"{self.number}.child.json", identity(pid))

    def start_heartbeat(self) -> None:
        """Keep the lease fresh, if nothing does yet, and call `on_lost` once if it is lost."""
        if self._thread is not None:
            return
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
        while beats == 0 or not self._stop.wait(BEAT_SECONDS):
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


def acquire(
    folder: Path,
    on_wait: Callable[[dict[str, Any]], None],
    wanted: Callable[[], bool],
    publish: Callable[[bytes], bool] = lambda content: False,
) -> Lease | None:
    """Take the lease of a stage folder, waiting for a living owner.

    Args:
        folder: the stage folder's `lease/`.
        on_wait: called once with the owner's identity when this process has to wait.
        wanted: asked before every try; once it is False (the owner committed), None is returned.
        publish: given what a dead owner has committed and perhaps not published; returns whether it did so now.
    """
    waited = False
    beats = _BeatWatch()
    while wanted():
        number = highest(folder)
        owner = read_json(folder / f"{number}.json") if number else None
        if owner is None or (done := (folder / f"{number}.done").exists()) or beats.is_dead(folder, number, owner):
            _end_orphan(folder / f"{number}.child.json")
            committed = None if owner is None or done else _fence(folder, number)
            if committed is not None and publish(committed):
                continue
            # The random part tells two tries of one process apart, where a store's answer was lost.
            content = json.dumps({**identity(os.getpid()), "id": uuid.uuid4().hex}).encode()
            if create_exclusively(folder / f"{number + 1}.json", content):
                return Lease(folder, number + 1)
            continue
        if not waited:
            on_wait(owner)
            waited = True
        time.sleep(WAIT_SECONDS)
    return None


def _fence(folder: Path, number: int) -> bytes | None:
    """Keep the owner of a lease from committing; returns what it has committed already, if it has."""
    record = folder / f"{number}.commit"
    if create_exclusively(record, FENCED):
        return None
    content = record.read_bytes()
    return None if content == FENCED else content


def running_owner(folder: Path) -> dict[str, Any] | None:
    """The identity of the owner of a stage folder's lease, if it lives, or may live elsewhere."""
    number = highest(folder)
    if not number or (folder / f"{number}.done").exists():
        return None
    owner: dict[str, Any] = read_json(folder / f"{number}.json")
    if is_here(owner):
        return owner if is_alive(owner) else None
    seen = [
        path.stat().st_mtime for path in (folder / f"{number}.json", folder / f"{number}.beat.json") if path.exists()
    ]
    return owner if time.time() - max(seen, default=0.0) < FORGOTTEN_SECONDS else None


def identity(pid: int) -> dict[str, Any]:
    """What tells a process apart from all others: of other machines and containers, and with the same number later."""
    return {
        "host": socket.gethostname(),
        "machine": _machine_id(),
        "boot": _boot_id(),
        "pids": _pid_namespace(),
        "pid": pid,
        "ticks": _start_ticks(pid),
    }


def is_here(owner: dict[str, Any]) -> bool:
    """Whether this process can see the other one, if that lives: same boot of a machine, same PID namespace.

    Neither names of hosts nor process numbers tell: containers share the first, and each counts its own processes.
    """
    return owner["boot"] == _boot_id() and owner.get("pids") == _pid_namespace()


def is_alive(owner: dict[str, Any]) -> bool:
    """Whether a process that can be seen from here still runs."""
    return is_here(owner) and _runs(owner)


def is_gone(owner: dict[str, Any]) -> bool:
    """Whether a process has ended, or most likely has. For display only: leases ask for certainty.

    One from before this machine's last start has ended. Of one on another machine, or in another container, nothing is
    known.
    """
    mine = identity(os.getpid())
    is_ours = all(owner.get(name, mine[name]) == mine[name] for name in ("host", "machine", "pids"))
    return is_ours and (owner["boot"] != mine["boot"] or not _runs(owner))


def _runs(owner: dict[str, Any]) -> bool:
    ticks = _start_ticks(owner["pid"])
    return ticks is not None and ticks == owner["ticks"]


class _BeatWatch:
    """Finds out whether an owner elsewhere is dead: its heartbeat has not changed for a while, by our own clock.

    A while in which nobody looked does not count: this process was paused, or the store did not answer, so that the
    owner could not show that it lives either.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, Any, float] = (0, None, 0.0)
        self._looked = time.monotonic()

    def is_dead(self, folder: Path, number: int, owner: dict[str, Any]) -> bool:
        if is_here(owner):
            return not is_alive(owner)
        beat = folder / f"{number}.beat.json"
        current = read_json(beat) if beat.exists() else None
        now, last, self._looked = time.monotonic(), self._looked, time.monotonic()
        if self._seen[:2] != (number, current) or now - last > BLIND_SECONDS:
            self._seen = (number, current, now)
        return now - self._seen[2] > STALE_SECONDS


def _end_orphan(record: Path) -> None:
    """End the process group that a dead owner left behind here, before anything else is written."""
    if not record.exists():
        return
    child = read_json(record)
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


def _machine_id() -> str:
    """Of this installation of an operating system; clones and containers may share it. Empty where it has none."""
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown, of {socket.gethostname()}"


def _pid_namespace() -> str:
    """The name of this process's PID namespace; one that no other process has where /proc shows another namespace."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return UNSEEN
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return UNSEEN if Path("/proc/self").exists() else "unknown"


UNSEEN = f"unseen, {uuid.uuid4().hex}"


def _start_ticks(pid: int) -> int | None:
    """Start of a living process in clock ticks since boot (/proc/PID/stat, field 22); None for none or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(fields[18])
