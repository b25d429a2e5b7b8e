"""Fuse in every process of a run, which counts their changes in the store, and burns
before the n-th.

`burn_at` puts it into the environment of a run. Each of the run's processes, however it
was started, then imports a `sitecustomize` that lays it: an audit hook (PEP 578) that
sees each file opened for writing, linked, renamed or removed before the operating
system does. The changes of all processes are appended to one log, whose length is their
count, so that they agree on the n-th change of the whole run. Written content is not a
change of its own: a file is opened, filled and renamed, and a late fuse burns some
milliseconds after its change, in the middle of that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.checkout import ROOT

VARIABLE = "GRISTMILL_CHAOS_FUSE"
FLOW_VARIABLE = "GRISTMILL_CHAOS_FLOW"
"""Variable with the run's first process, which that process sets for its children."""
RECORD_BYTES = 240
CHANGES = {
    "open": 0,
    "os.rmdir": 0,
    "os.remove": 0,
    "os.rename": 1,
    "os.link": 1,
    "os.truncate": 0,
}
"""Audit event -> index of the argument with the changed path."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
HOOK = f"""\
import sys

sys.path.append({str(ROOT)!r})
from benchmarks.chaos.fuse import lay

lay()
"""
Role = Literal["any", "flow", "stage", "worker", "rank"]
Act = Literal[
    "nothing",
    "kill the flow",
    "kill it and all above",
    "kill it",
    "terminate the flow",
    "set the clock back",
    "fill the disk",
]


@dataclass(frozen=True)
class Fuse:
    """Place of a fuse, and its act.

    Attributes:
        root: the store; changes elsewhere do not count.
        log: file that counts the changes.
        at: change, counted from 1, before which it burns; 0 for never.
        act: what it does.
        role: of processes whose changes count.
        late_seconds: delay after the change, instead of burning before it.
        back_seconds: time by which the act sets the clock back.
        before: beginning of the changes that count, such as `link _SUCCESS`.
        ballast: file by which the act fills the disk.
        spare_pages: pages that it leaves free, so that later writes are cut anywhere.
    """

    root: str
    log: str
    at: int = 0
    act: Act = "nothing"
    role: Role = "any"
    late_seconds: float = 0.0
    back_seconds: float = 0.0
    before: str = ""
    ballast: str = ""
    spare_pages: int = 0

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event of this process; all but changes in the store are
        ignored.
        """
        index = CHANGES.get(event)
        if index is None or (event == "open" and not _writes(arguments)):
            return
        path = arguments[index]
        if not isinstance(path, str | os.PathLike) or not str(path).startswith(
            self.root + os.sep
        ):
            return
        role = own_role()
        if self.role not in ("any", role):
            return
        change = f"{event.removeprefix('os.')} {str(path)[len(self.root) + 1 :]}"
        if (
            change.startswith(self.before)
            and self._count(f"{role} {change}") == self.at
        ):
            self._burn()

    def changes(self) -> list[str]:
        """Return the changes so far: `role event path-in-the-store`."""
        content = Path(self.log).read_bytes() if Path(self.log).exists() else b""
        return [
            content[start : start + RECORD_BYTES].decode(errors="replace").rstrip()
            for start in range(0, len(content), RECORD_BYTES)
        ]

    def has_burnt(self) -> bool:
        """Return True if the run has come to its change."""
        return 0 < self.at <= len(self.changes())

    def _count(self, change: str) -> int:
        """Append a change to the log and return its number: the file's own offset after
        the append is exact.
        """
        sink = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(
                sink,
                change.encode()[: RECORD_BYTES - 1].ljust(RECORD_BYTES - 1) + b"\n",
            )
            return os.lseek(sink, 0, os.SEEK_CUR) // RECORD_BYTES
        finally:
            os.close(sink)

    def _burn(self) -> None:
        if not self.late_seconds:
            self._do()
            return
        timer = threading.Timer(self.late_seconds, self._do)
        timer.daemon = True
        timer.start()

    def _do(self) -> None:
        flow = int(os.environ[FLOW_VARIABLE])
        if self.act == "terminate the flow":
            os.kill(flow, signal.SIGTERM)
        elif self.act == "kill the flow":
            os.kill(flow, signal.SIGKILL)
        elif self.act == "kill it":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.act == "fill the disk":
            fill_disk(Path(self.ballast), self.spare_pages)
        elif self.act == "kill it and all above":
            for process in _ancestors_from(flow):
                os.kill(process, signal.SIGKILL)


def fill_disk(ballast: Path, spare_pages: int) -> None:
    """Fill a disk by a file, except some pages."""
    disk = os.statvfs(ballast.parent)
    size = (disk.f_bavail - spare_pages) * disk.f_frsize
    if size > 0:
        with open(ballast, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)


def burn_at(fuse: Fuse) -> dict[str, str]:
    """Return the environment of a run whose processes lay the fuse."""
    folder = Path(fuse.log).parent / "fuse-hook"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        name: value for name, value in os.environ.items() if name != FLOW_VARIABLE
    }
    return {**environment, "PYTHONPATH": path, VARIABLE: json.dumps(asdict(fuse))}


def lay(environment: Mapping[str, str] = os.environ) -> None:
    """Lay the fuse of the environment in this process."""
    fuse = Fuse(**json.loads(environment[VARIABLE]))
    os.environ.setdefault(FLOW_VARIABLE, str(os.getpid()))
    sys.addaudithook(fuse.see)
    if fuse.act == "set the clock back":
        _bend_clock(fuse)


def hold() -> None:
    """Keep the folder of the fuse's log open, as a mark of this process for
    `kills.still_running`.
    """
    if VARIABLE in os.environ:
        os.open(
            Path(json.loads(os.environ[VARIABLE])["log"]).parent,
            os.O_RDONLY | os.O_DIRECTORY,
        )


def own_role() -> Role:
    """Return the role of this process: the flow, the leader of a stage, a training
    rank, or another worker.
    """
    if os.getpid() == int(os.environ[FLOW_VARIABLE]):
        return "flow"
    if "RANK" in os.environ:
        return "rank"
    return "stage" if os.getpid() == os.getpgid(0) else "worker"


def new_log(store: Path) -> str:
    """Return a unique path of a log, in a folder beside a store."""
    store.parent.mkdir(parents=True, exist_ok=True)
    return str(
        Path(tempfile.mkdtemp(prefix=f"{store.name}-fuse-", dir=store.parent))
        / "changes"
    )


def _writes(arguments: tuple[Any, ...]) -> bool:
    """Return True if an `open` event is for writing: by its mode, or by its flags if it
    has no mode.
    """
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & WRITING)


def _ancestors_from(flow: int) -> list[int]:
    """Return the flow, and every process between it and this one, the eldest first and
    this one last.
    """
    processes = [os.getpid()]
    while processes[0] not in (flow, 1):
        stat = Path(f"/proc/{processes[0]}/stat").read_text()
        processes.insert(0, int(stat.rpartition(")")[2].split()[1]))
    return processes if processes[0] == flow else [flow, *processes[1:]]


def _bend_clock(fuse: Fuse) -> None:
    """Set Python's clock back, in all processes at once, when the fuse burns."""
    real, real_ns, real_local, real_strftime = (
        time.time,
        time.time_ns,
        time.localtime,
        time.strftime,
    )

    def back() -> float:
        try:
            return (
                fuse.back_seconds
                if os.stat(fuse.log).st_size >= fuse.at * RECORD_BYTES
                else 0.0
            )
        except FileNotFoundError:
            return 0.0

    def bent() -> float:
        return real() - back()

    def local(seconds: float | None = None) -> time.struct_time:
        return real_local(bent() if seconds is None else seconds)

    time.time = bent
    time.time_ns = lambda: real_ns() - int(back() * 1e9)
    time.localtime = local  # type: ignore[assignment]
    time.strftime = lambda form, moment=None: real_strftime(
        form, local() if moment is None else moment
    )  # type: ignore[assignment]
