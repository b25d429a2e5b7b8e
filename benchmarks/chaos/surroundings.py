"""Faults around a run: damaged files, full and read-only disks, two runs at once, the
clock set back.
"""

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
from benchmarks.chaos.undisturbed import (
    Undisturbed,
    finish,
    gristmill,
    start,
    wrong_code,
    wrong_end,
)

PAGE_BYTES = 4096
DISK_BYTES = 64 << 20
"""Space of a disk that a fuse fills, beyond that of the stage."""
FULL = ("No space left on device", "was not written whole")
"""Messages about a full disk, of the system and of `core.files.foreign_file`."""
BACK_SECONDS = 400 * 86_400.0
"""Time by which the clock is set back, longer than any expiry."""


@dataclass(frozen=True)
class Scene:
    """A store for a stage, and the numbers drawn for it."""

    run: Undisturbed
    store: Path
    stage: str
    seed: int
    number: int

    def place(self, *key: str) -> float:
        """Return a number in [0, 1) by hash."""
        return draw(self.seed, self.number, *key)

    def gristmill(self) -> subprocess.CompletedProcess[str]:
        """Run the manifest up to the stage."""
        return gristmill(self.run.arguments(self.store, self.stage))

    def fuse(self, at: int, act: Act, late: float = 0.0, back: float = 0.0) -> Fuse:
        """Return a fuse that burns at a change of the stage."""
        root = self.run.folder_in(self.store, self.stage).path
        return Fuse(str(root), new_log(self.store), at, act, "any", late, back)

    def some_change(self, *key: str) -> int:
        """Return the number of a change of the stage."""
        return 1 + int(self.place("change", *key) * self.run.changes()[self.stage])

    def goes_on(self) -> list[str]:
        """Run the same command undisturbed; returns sentences about its failure and its
        differences.
        """
        failure = [
            f"the same command afterwards {sentence}"
            for sentence in wrong_code(self.gristmill())
        ]
        return [*failure, *self.run.differences(self.store, [self.stage])]


def damage_a_file(scene: Scene, how: str) -> list[str]:
    """Delete, truncate or flip a bit of a committed file; returns sentences about
    broken promises.

    A missing or shorter file is detected at its next use; one of the same size by
    `gristmill verify`, whose `--repair` withdraws it. The next run makes it again.
    """
    run, folder = scene.run, scene.run.folder_in(scene.store, scene.stage)
    run.lend(scene.store, scene.stage)
    shutil.copytree(run.session.folder(scene.stage).path, folder.path, symlinks=True)
    files = sorted(
        path
        for path in folder.data.rglob("*")
        if path.is_file() and path.stat().st_size
    )
    if how != "flip":
        files += [folder.path / "manifest.json", folder.path / "_SUCCESS"]
    file = files[int(scene.place("file") * len(files))]
    content = file.read_bytes()
    place = int(scene.place("byte") * len(content))
    if how == "flip":
        flipped = content[place] ^ 1 << int(scene.place("bit") * 8)
        file.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        return [*_verify(scene, file), *scene.goes_on()]
    if how == "delete":
        file.unlink()
    else:
        file.write_bytes(content[:place])
    wrong = (
        []
        if folder.state() in ("corrupt", "unfinished")
        else [f"{file.name}: {how}d, and nobody noticed"]
    )
    return [*wrong, *scene.goes_on()]


def _verify(scene: Scene, file: Path) -> list[str]:
    arguments = ["verify", str(scene.run.manifest), "--store", str(scene.store)]
    verified, repaired = gristmill(arguments), gristmill([*arguments, "--repair"])
    is_named = verified.returncode == 1 and file.name in verified.stdout
    wrong = [] if is_named else [f"verify did not name {file.name}"]
    return [
        *wrong,
        *(f"verify --repair {sentence}" for sentence in wrong_code(repaired)),
    ]


def fill_the_disk(scene: Scene, share: float | None = None) -> list[str]:
    """Fill the disk at one of the stage's changes, except some pages, then free it.

    Every later write of every library really fails, in Python, C and C++. The stage
    must either end with the reason and commit nothing, or make the right bytes.

    Args:
        scene: a store that is mounted here.
        share: of the stage's changes that come before; drawn if None.
    """
    changes = scene.run.changes()[scene.stage]
    at = 1 + int((scene.place("change") if share is None else share) * changes)
    needed = sum(
        file.stat().st_size
        for file in scene.run.session.folder(scene.stage).path.rglob("*")
        if file.is_file()
    )
    pages = needed // PAGE_BYTES
    # as often below 10 pages as above
    spare = int((pages + 1) ** scene.place("spare")) - 1
    ballast = scene.store / "ballast"
    with mounted(scene.store, 3 * needed + DISK_BYTES):
        scene.run.lend(scene.store, scene.stage)
        fuse = replace(
            scene.fuse(at, "fill the disk"), ballast=str(ballast), spare_pages=spare
        )
        done = gristmill(scene.run.arguments(scene.store, scene.stage), burn_at(fuse))
        wrong = _wrong_on_a_full_disk(scene, done)
        ballast.unlink(missing_ok=True)
        wrong += scene.goes_on()
        shutil.rmtree(Path(fuse.log).parent)
        return [
            f"full before change {at} of {changes}, {spare} pages spare: {sentence}"
            for sentence in wrong
        ]


def _wrong_on_a_full_disk(
    scene: Scene, done: subprocess.CompletedProcess[str]
) -> list[str]:
    is_committed = scene.run.folder_in(scene.store, scene.stage).state() == "committed"
    if is_committed and (
        differences := scene.run.differences(scene.store, [scene.stage])
    ):
        return [f"committed on a full disk: {sentence}" for sentence in differences]
    if done.returncode == 0:
        return [] if is_committed else ["ended with code 0 and committed nothing"]
    return _wrong_failure(done, *FULL)


def forbid_writing(scene: Scene) -> list[str]:
    """Run the stage in a read-only store, after a killed attempt; then make the store
    writable.
    """
    with mounted(scene.store, 1 << 30) as remount:
        scene.run.lend(scene.store, scene.stage)
        gristmill(
            scene.run.arguments(scene.store, scene.stage),
            burn_at(scene.fuse(scene.some_change(), "kill it and all above")),
        )
        before = _listing(scene.store)
        remount("ro")
        wrong = _wrong_failure(scene.gristmill(), "Read-only file system")
        status = gristmill(
            ["status", str(scene.run.manifest), "--store", str(scene.store)]
        )
        wrong += [f"status {sentence}" for sentence in wrong_code(status)]
        wrong += (
            [] if _listing(scene.store) == before else ["something has changed in it"]
        )
        remount("rw")
        return [*wrong, *scene.goes_on()]


def _wrong_failure(done: subprocess.CompletedProcess[str], *reasons: str) -> list[str]:
    """Return sentences if a command did not fail with one of the reasons."""
    wrong = wrong_end(done, 1)
    if not any(reason.lower() in done.stdout.lower() for reason in reasons):
        wrong.append(f"does not say {' or '.join(reasons)}: {done.stdout[-300:]}")
    return wrong


def _listing(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def run_two_at_once(scene: Scene, kill_one: bool) -> list[str]:
    """Start the same command twice, and perhaps kill one; the other makes, or waits
    for, the same output.
    """
    scene.run.lend(scene.store, scene.stage)
    fuse = scene.fuse(scene.some_change() if kill_one else 0, "kill it and all above")
    arguments = scene.run.arguments(scene.store, scene.stage)
    started = [start(arguments, burn_at(fuse)), start(arguments)]
    first, second = [finish(command) for command in started]
    wrong = [f"the second run {sentence}" for sentence in wrong_code(second)]
    if not kill_one:
        wrong += [f"the first run {sentence}" for sentence in wrong_code(first)]
    attempts = len(
        list(scene.run.folder_in(scene.store, scene.stage).logs.glob("*.log"))
    )
    if attempts > 1 + kill_one:
        wrong.append(f"it was made {attempts} times")
    return [*wrong, *scene.goes_on(), *still_running([fuse.log])]


def set_the_clock_back(scene: Scene) -> list[str]:
    """Kill an attempt, give its files times in the future, and set the clock back in
    the middle of the next one.
    """
    scene.run.lend(scene.store, scene.stage)
    arguments = scene.run.arguments(scene.store, scene.stage)
    gristmill(
        arguments,
        burn_at(scene.fuse(scene.some_change("kill"), "kill it and all above")),
    )
    future = time.time() + BACK_SECONDS
    for path in scene.store.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (future, future))
    fuse = scene.fuse(
        scene.some_change("back"), "set the clock back", back=BACK_SECONDS
    )
    return [*wrong_code(gristmill(arguments, burn_at(fuse))), *scene.goes_on()]


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[Any]:
    """Mount a small disk in memory at a folder; yields a function that changes its
    options.

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
        yield lambda options: _retry_while_busy(
            "mount", "-o", f"remount,{options}", str(folder)
        )
    finally:
        _retry_while_busy("umount", str(folder))


def _retry_while_busy(*command: str) -> None:
    """Run a command on a disk, again and again while a killed process still has a file
    of it open.

    Raises:
        RuntimeError: it fails for another reason, or for LEAVE_SECONDS; the message has
            its output.
    """
    deadline = time.monotonic() + LEAVE_SECONDS
    while (
        done := subprocess.run(command, capture_output=True, text=True, check=False)
    ).returncode:
        if "busy" not in done.stderr or time.monotonic() > deadline:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        time.sleep(0.05)


class CannotMountError(RuntimeError):
    """This process may not mount a disk, so that full and read-only ones cannot be
    tried.
    """
