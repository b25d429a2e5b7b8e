"""What may go wrong around a run: files damaged, disks full or read-only, two runs at once, the clock set back."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos.fuse import Act, Fuse, burn_at, new_log
from benchmarks.chaos.kills import LEAVE_SECONDS, draw, still_running
from benchmarks.chaos.undisturbed import Undisturbed, finish, gristmill, start

PAGE_BYTES = 4096
DISK_BYTES = 64 << 20
"""Of a disk that a fuse fills, besides what the stage needs."""
FULL = ("No space left on device", "was not written whole")
"""What is said of a full disk: by the system, and by `dataprep.files.foreign_file`."""
BACK_SECONDS = 400 * 86_400.0
"""By how much the clock is set back: more than any age that something is kept for."""


@dataclass(frozen=True)
class Scene:
    """A store in which one stage is about to be made, or has been, and the numbers that are drawn for it."""

    run: Undisturbed
    store: Path
    stage: str
    seed: int
    number: int

    def place(self, *what: str) -> float:
        """A number in [0, 1) by hash."""
        return draw(self.seed, self.number, *what)

    def gristmill(self) -> subprocess.CompletedProcess[str]:
        """Run the manifest up to the stage."""
        return gristmill(self.run.arguments(self.store, self.stage))

    def fuse(self, at: int, act: Act, late: float = 0.0, back: float = 0.0) -> Fuse:
        """A fuse that burns at a change of the stage."""
        root = self.run.folder_in(self.store, self.stage).path
        return Fuse(str(root), new_log(self.store), at, act, "any", late, back)

    def some_change(self, *what: str) -> int:
        """The number of a change that the stage makes."""
        return 1 + int(self.place("change", *what) * self.run.changes()[self.stage])

    def goes_on(self) -> list[str]:
        """What is wrong after a last run that nothing disturbs."""
        done = self.gristmill()
        failed = [] if done.returncode == 0 else [f"the same command failed afterwards: {done.stdout[-300:]}"]
        return [*failed, *self.run.differences(self.store, [self.stage])]


def damage_a_file(scene: Scene, how: str) -> list[str]:
    """Delete, truncate or flip a bit of a committed file; returns what is not as promised.

    A file that is gone or shorter is found by whoever needs it; one of the same size by `gristmill verify`, whose
    `--repair` withdraws it. The next run makes it again.
    """
    run, folder = scene.run, scene.run.folder_in(scene.store, scene.stage)
    run.lend(scene.store, scene.stage)
    shutil.copytree(run.session.folder(scene.stage).path, folder.path, symlinks=True)
    files = sorted(path for path in folder.data.rglob("*") if path.is_file() and path.stat().st_size)
    if how != "flip":
        files += [folder.path / "manifest.json", folder.path / "_SUCCESS"]
    file = files[int(scene.place("file") * len(files))]
    content = file.read_bytes()
    at = int(scene.place("byte") * len(content))
    if how == "delete":
        file.unlink()
    elif how == "truncate":
        file.write_bytes(content[:at])
    else:
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << int(scene.place("bit") * 8)]) + content[at + 1 :])
        return [*_verify(scene, file), *scene.goes_on()]
    found = [] if folder.state() in ("corrupt", "unfinished") else [f"{file.name}: {how}d, and nobody noticed"]
    return [*found, *scene.goes_on()]


def _verify(scene: Scene, file: Path) -> list[str]:
    arguments = ["verify", str(scene.run.manifest), "--store", str(scene.store)]
    told, mended = gristmill(arguments), gristmill([*arguments, "--repair"])
    wrong = [] if told.returncode == 1 and file.name in told.stdout else [f"verify did not name {file.name}"]
    return wrong if mended.returncode == 0 else [*wrong, f"verify --repair failed: {mended.stdout[-300:]}"]


def fill_the_disk(scene: Scene, share: float | None = None) -> list[str]:
    """Let the disk be full from one of the stage's changes on, but for some pages, then have space.

    Every write of every library that comes behind fails for real, in Python, C and C++ alike. The stage either ends
    with the reason and commits nothing, or has made the right bytes.

    Args:
        share: of the stage's changes, that come before; drawn if None.
    """
    changes = scene.run.changes()[scene.stage]
    at = 1 + int((scene.place("change") if share is None else share) * changes)
    needed = sum(
        file.stat().st_size for file in scene.run.session.folder(scene.stage).path.rglob("*") if file.is_file()
    )
    pages = needed // PAGE_BYTES
    spare = int((pages + 1) ** scene.place("spare")) - 1  # as often below 10 pages as above
    ballast = scene.store / "ballast"
    with mounted(scene.store, 3 * needed + DISK_BYTES):
        scene.run.lend(scene.store, scene.stage)
        fuse = replace(scene.fuse(at, "fill the disk"), ballast=str(ballast), spare_pages=spare)
        done = gristmill(scene.run.arguments(scene.store, scene.stage), burn_at(fuse))
        wrong = _wrong_on_a_full_disk(scene, done)
        ballast.unlink(missing_ok=True)
        wrong += scene.goes_on()
        shutil.rmtree(Path(fuse.log).parent)
        return [f"full before change {at} of {changes}, {spare} pages spare: {sentence}" for sentence in wrong]


def _wrong_on_a_full_disk(scene: Scene, done: subprocess.CompletedProcess[str]) -> list[str]:
    is_committed = scene.run.folder_in(scene.store, scene.stage).state() == "committed"
    if is_committed and (wrong := scene.run.differences(scene.store, [scene.stage])):
        return [f"committed on a full disk: {sentence}" for sentence in wrong]
    if done.returncode == 0:
        return [] if is_committed else ["ended with code 0 and committed nothing"]
    return _is_told(done, *FULL)


def forbid_writing(scene: Scene) -> list[str]:
    """Make the stage in a store that cannot be written, after a killed attempt; then let it be written."""
    with mounted(scene.store, 1 << 30) as remount:
        scene.run.lend(scene.store, scene.stage)
        gristmill(
            scene.run.arguments(scene.store, scene.stage),
            burn_at(scene.fuse(scene.some_change(), "kill it and all above")),
        )
        before = _listing(scene.store)
        remount("ro")
        wrong = _is_told(scene.gristmill(), "Read-only file system")
        status = gristmill(["status", str(scene.run.manifest), "--store", str(scene.store)])
        wrong += [] if status.returncode == 0 else [f"status failed: {status.stdout[-300:]}"]
        wrong += [] if _listing(scene.store) == before else ["something has changed in it"]
        remount("rw")
        return [*wrong, *scene.goes_on()]


def _is_told(done: subprocess.CompletedProcess[str], *reasons: str) -> list[str]:
    wrong = [] if done.returncode == 1 else [f"ended with code {done.returncode} instead of 1: {done.stdout[-300:]}"]
    if not any(reason.lower() in done.stdout.lower() for reason in reasons):
        wrong.append(f"does not say {' or '.join(reasons)}: {done.stdout[-300:]}")
    return [*wrong, "ended with a traceback"] if "Traceback" in done.stdout else wrong


def _listing(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def run_two_at_once(scene: Scene, kill_one: bool) -> list[str]:
    """Start the same command twice; one may be killed on its way. The other makes, or waits for, the same output."""
    scene.run.lend(scene.store, scene.stage)
    fuse = scene.fuse(scene.some_change() if kill_one else 0, "kill it and all above")
    arguments = scene.run.arguments(scene.store, scene.stage)
    both = [start(arguments, burn_at(fuse)), start(arguments)]
    codes = [finish(process).returncode for process in both]
    folder = scene.run.folder_in(scene.store, scene.stage)
    wrong = [] if codes[1] == 0 else [f"the second run ended with {codes[1]}"]
    if not kill_one and codes[0] != 0:
        wrong.append(f"the first run ended with {codes[0]}")
    made = len(list(folder.logs.glob("*.log")))
    if made > 1 + kill_one:
        wrong.append(f"it was made {made} times")
    return [*wrong, *scene.goes_on(), *still_running([fuse.log])]


def set_the_clock_back(scene: Scene) -> list[str]:
    """Kill an attempt, let its files come from the future, and set the clock back in the midst of the next one."""
    scene.run.lend(scene.store, scene.stage)
    arguments = scene.run.arguments(scene.store, scene.stage)
    gristmill(arguments, burn_at(scene.fuse(scene.some_change("kill"), "kill it and all above")))
    future = time.time() + BACK_SECONDS
    for path in scene.store.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (future, future))
    fuse = scene.fuse(scene.some_change("back"), "set the clock back", back=BACK_SECONDS)
    done = gristmill(arguments, burn_at(fuse))
    wrong = [] if done.returncode == 0 else [f"ended with code {done.returncode}: {done.stdout[-300:]}"]
    return [*wrong, *scene.goes_on()]


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[Any]:
    """A small disk in memory at a folder; yields what changes its options.

    Raises:
        CannotMountError: this process may not mount.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "gristmill-chaos", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mount.returncode:
        raise CannotMountError(mount.stderr.strip())

    try:
        yield lambda options: _once_let_go("mount", "-o", f"remount,{options}", str(folder))
    finally:
        _once_let_go("umount", str(folder))


def _once_let_go(*command: str) -> None:
    """Run a command on a disk, again and again while what was just killed still has a file of it open.

    Raises:
        RuntimeError: it fails for another reason, or for too long; with what it said.
    """
    deadline = time.monotonic() + LEAVE_SECONDS
    while (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
        if "busy" not in done.stderr or time.monotonic() > deadline:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        time.sleep(0.05)


class CannotMountError(RuntimeError):
    """This process may not mount a disk, so that nothing is known of full and read-only ones."""
