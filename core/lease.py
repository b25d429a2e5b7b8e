"""Leases: the exclusive right to write into a stage folder; a lease's number is the
fencing token.

    lease/<n>.json         owner of lease n
    lease/<n>.beat.json    its heartbeat
    lease/<n>.child.json   process group that does its work
    lease/<n>.commit       its committed manifest, or `fenced`
    lease/<n>.done         marker of its release

A lease is taken by exclusive creation of `<n>.json`, with n one above the highest
there. It is valid while its owner's process lives, which is visible only in the same
PID namespace, or else while its heartbeat changes. A successor to an owner that did not
release its lease first creates `<n>.commit` of that lease, and an owner commits by
creating the same file: only one of them succeeds, however long either was paused. The
file system needs only exclusive creation.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from gristmill.core import heartbeats
from gristmill.core.files import create_exclusively, find_json, read_json, write_json
from gristmill.core.heartbeats import BeatWatch, Repetition
from gristmill.core.processes import wait_until

FORGOTTEN_SECONDS = 3600.0
"""Age of the last heartbeat, by the store's clock and ours, after which a remote owner
no longer counts as running.
"""
FENCED = b"fenced"
"""Content of a commit record whose owner may not commit."""
WAIT_SECONDS = 0.5
KILL_SECONDS = 5.0
log = logging.getLogger("gristmill.lease")


class ProcessIdentity(TypedDict):
    """Identity of a process, unique across machines, containers and reused process
    numbers.
    """

    host: str
    machine: str
    """Id of the operating system installation; may be shared by clones."""
    boot: str
    pids: str
    """PID namespace."""
    pid: int
    ticks: int | None
    """Start time in clock ticks since boot; None if the process has ended."""


class LeaseLostError(RuntimeError):
    """Another process works on this output now; this process's work must not be
    committed.
    """


@dataclass
class Lease:
    """Right to write into one stage folder."""

    folder: Path
    number: int
    on_lost: Callable[[], None] | None = None
    _heartbeat: Repetition | None = None

    def check(self) -> None:
        """Raise LeaseLostError if a later lease exists."""
        if highest(self.folder) != self.number:
            raise LeaseLostError(
                f"{self.folder.parent} was taken over by another "
                "run; this attempt stops"
            )

    def follows_one_given_back(self) -> bool:
        """True if the previous owner released its lease instead of dying."""
        return (self.folder / f"{self.number - 1}.done").exists()

    def commit(self, content: bytes) -> None:
        """Decide that this lease's work is committed, by a record that exists once.

        Args:
            content: committed manifest; any process that reads the record can publish
                it.

        Raises:
            LeaseLostError: a successor has decided otherwise.
        """
        if not create_exclusively(self.folder / f"{self.number}.commit", content):
            raise LeaseLostError(
                f"{self.folder.parent} was taken over by another run; this attempt's "
                "work is not committed"
            )

    def name_child(self, pid: int) -> None:
        """Record the process group that does the work, so that a successor can end
        it.
        """
        write_json(self.folder / f"{self.number}.child.json", identity(pid))

    def start_heartbeat(self) -> None:
        """Start the heartbeat unless it runs; it calls `on_lost` once if the lease is
        lost.
        """
        if self._heartbeat is None and not self._beat():
            self._heartbeat = Repetition(self._beat, heartbeats.BEAT_SECONDS)

    def release(self) -> None:
        """Release the lease. The heartbeat ends first, so that it cannot see the
        release as a loss.
        """
        if self._heartbeat is not None:
            self._heartbeat.stop()
        create_exclusively(self.folder / f"{self.number}.done", b"")

    def _beat(self) -> bool:
        """Write a heartbeat; return True if the lease is lost."""
        try:
            write_json(
                self.folder / f"{self.number}.beat.json",
                {"at": time.time()},
                durable=False,
            )
            is_lost = highest(self.folder) != self.number
        except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
            # A full disk, or a store that is temporarily unreachable, does not lose the
            # lease: the next beat retries.
            log.warning(
                "the lease of %s could not be kept fresh: %s", self.folder.parent, error
            )
            return False
        if is_lost and self.on_lost is not None:
            self.on_lost()
        return is_lost


def acquire(
    folder: Path,
    on_wait: Callable[[ProcessIdentity], None],
    wanted: Callable[[], bool],
    publish: Callable[[bytes], bool] = lambda content: False,
) -> Lease | None:
    """Take the lease of a stage folder, waiting for a living owner.

    Args:
        folder: the stage folder's `lease/`.
        on_wait: called once with the owner's identity when this process has to wait.
        wanted: checked before every try; None is returned once it is False (the owner
            committed).
        publish: called with a dead owner's commit, which may be unpublished; True if it
            published it.
    """
    waited = False
    watch = BeatWatch()
    while wanted():
        number = highest(folder)
        owner = read_json(folder / f"{number}.json") if number else None
        if (
            owner is None
            or (done := (folder / f"{number}.done").exists())
            or (
                not is_alive(owner)
                if is_here(owner)
                else watch.is_stale(folder / f"{number}.beat.json")
            )
        ):
            _kill_child(folder / f"{number}.child.json")
            commit = folder / f"{number}.commit"
            if (
                owner is not None
                and not done
                and not create_exclusively(commit, FENCED)
            ):
                # the owner may not commit any more, or has committed
                content = commit.read_bytes()
                if content != FENCED and publish(content):
                    continue
            # The random id distinguishes two tries of one process if the store's answer
            # was lost.
            content = json.dumps(
                {**identity(os.getpid()), "id": uuid.uuid4().hex}
            ).encode()
            if create_exclusively(folder / f"{number + 1}.json", content):
                return Lease(folder, number + 1)
            continue
        if not waited:
            on_wait(owner)
            waited = True
        time.sleep(WAIT_SECONDS)
    return None


def _kill_child(record: Path) -> None:
    """Kill a dead owner's processes on this machine, before anything is written."""
    child = find_json(record)
    if child is not None and is_alive(child):
        with suppress(ProcessLookupError):
            os.killpg(child["pid"], signal.SIGKILL)
        wait_until(lambda: not is_alive(child), KILL_SECONDS, 0.05)


def running_owner(folder: Path) -> ProcessIdentity | None:
    """Identity of the owner of a stage folder's lease, if it lives, or may live
    elsewhere.
    """
    number = highest(folder)
    if not number or (folder / f"{number}.done").exists():
        return None
    owner: ProcessIdentity = read_json(folder / f"{number}.json")
    if is_here(owner):
        return owner if is_alive(owner) else None
    beat = folder / f"{number}.beat.json"
    file = beat if beat.exists() else folder / f"{number}.json"
    return owner if time.time() - file.stat().st_mtime < FORGOTTEN_SECONDS else None


def identity(pid: int) -> ProcessIdentity:
    """Identity of a process of this machine."""
    return {
        "host": socket.gethostname(),
        # clones and containers may share it
        "machine": _first_line("/etc/machine-id", ""),
        "boot": _boot_id(),
        "pids": _pid_namespace(),
        "pid": pid,
        "ticks": _start_ticks(pid),
    }


def is_here(owner: ProcessIdentity) -> bool:
    """True if this process can see the other one while it lives: same boot of a
    machine, same PID namespace.

    Host names and process numbers do not tell: containers share the first, and number
    their own processes.
    """
    return owner["boot"] == _boot_id() and owner["pids"] == _pid_namespace()


def is_alive(owner: ProcessIdentity) -> bool:
    """True if a process that is visible from here is running."""
    return is_here(owner) and _runs(owner)


def is_gone(owner: ProcessIdentity) -> bool:
    """True if a process has ended, or most likely has. For display only: leases need
    certainty.

    A process from before this machine's last boot has ended. Processes of other
    machines or containers are unknown.
    """
    mine = identity(os.getpid())
    return (
        owner["host"] == mine["host"]
        and owner["machine"] == mine["machine"]
        and owner["pids"] == mine["pids"]
        and (owner["boot"] != mine["boot"] or not _runs(owner))
    )


def _runs(owner: ProcessIdentity) -> bool:
    ticks = _start_ticks(owner["pid"])
    return ticks is not None and ticks == owner["ticks"]


def highest(folder: Path) -> int:
    """Number of the newest lease in a stage folder's `lease/`; 0 if there is none."""
    return max(
        (int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit()),
        default=0,
    )


def _first_line(path: str, missing: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return missing


def _boot_id() -> str:
    missing = f"unknown, of {socket.gethostname()}"
    return _first_line("/proc/sys/kernel/random/boot_id", missing)


def _pid_namespace() -> str:
    """Name of this process's PID namespace; a unique one if /proc shows another
    namespace.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return UNSEEN
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return UNSEEN if Path("/proc/self").exists() else "unknown"


UNSEEN = f"unseen, {uuid.uuid4().hex}"


def _start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot (/proc/PID/stat, field
    22); None if missing or a zombie.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(fields[18])
