"""`gristmill bench outages`: what lasts a minute, at its real length; the bytes must be the same all the same.

Tests show the same with pauses of seconds, and leases that are shorter still. Here nothing of gristmill is changed: a
lease is stale after 90 s, and requests are made again for ten minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.chaos.fuse import burn_at
from benchmarks.chaos.kills import carriers, still_running
from benchmarks.chaos.network import REFUSE_SECONDS
from benchmarks.chaos.servers import store_refuses_everything
from benchmarks.chaos.surroundings import CannotMountError, Scene
from benchmarks.chaos.undisturbed import RUN_SECONDS, Undisturbed, finish, start
from benchmarks.measuring import Row, row
from gristmill.core.lease import STALE_SECONDS

PAST_SECONDS = 60.0
"""So long a run is paused after its lease may be taken over."""
LOOK_SECONDS = 0.02
LAST = "dedup"
"""The last stage that is made, and the one whose run is paused."""
ELSEWHERE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Starts a command where it sees the processes of nobody else, nor they it: as on another host."""


def rows(folder: Path | None = None) -> Iterator[Row]:
    """Seconds of a run that is disturbed, against those of what disturbs it; and whether the bytes are the same.

    Args:
        folder: where to work; a temporary one unless it is given.
    """
    with tempfile.TemporaryDirectory(prefix="gristmill-outages-") as temporary:
        work = Path(temporary) if folder is None else folder
        run = Undisturbed.make(work, until=LAST)
        for number, (name, (seconds, act)) in enumerate(OUTAGES.items()):
            began, ours = time.monotonic(), None
            try:
                wrong = act(Scene(run, work / f"scene-{number}", LAST, 0, number))
                ours = time.monotonic() - began
            except CannotMountError as error:
                wrong = [str(error)]
            yield {**row(name, ours, seconds, "s"), "happened": "; ".join(wrong) or "the same bytes, all as promised"}


def pause_past_its_lease(scene: Scene) -> list[str]:
    """Stop all processes of a run on another host until a minute after its lease; another run makes its stage.

    Raises:
        CannotMountError: there can be no other host without the rights of root.
    """
    if subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False).returncode:
        raise CannotMountError("a namespace of processes needs unshare, and the rights of root")
    scene.run.lend(scene.store, scene.stage)
    fuse = scene.fuse(1 + scene.some_change("pause") // 2, "nothing")
    arguments = scene.run.arguments(scene.store, scene.stage)
    paused = start(arguments, burn_at(fuse), warmed=False, within=ELSEWHERE)
    began = time.monotonic()
    while not fuse.has_burnt() and time.monotonic() < began + RUN_SECONDS:
        time.sleep(LOOK_SECONDS)
    began, processes = time.monotonic(), carriers(fuse.log)
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    folder = scene.run.folder_in(scene.store, scene.stage)
    wrong = [] if folder.state() != "committed" else ["it was over before it was paused"]
    other = finish(start(arguments))
    wrong += [] if other.returncode == 0 else [f"the other run ended with {other.returncode}: {other.stdout[-300:]}"]
    wrong += [] if time.monotonic() > began + STALE_SECONDS else ["the lease was taken over before its time"]
    time.sleep(max(0.0, began + STALE_SECONDS + PAST_SECONDS - time.monotonic()))
    for process in processes:
        os.kill(process, signal.SIGCONT)
    done = finish(paused)
    if done.returncode != 1 or "was taken over by another run" not in done.stdout or "Traceback" in done.stdout:
        wrong.append(f"the paused run ended with {done.returncode}: {done.stdout[-300:]}")
    return [*wrong, *scene.goes_on(), *still_running([fuse.log])]


OUTAGES: Mapping[str, tuple[float, Callable[[Scene], list[str]]]] = {
    "the object store answers 503 for 60 s": (REFUSE_SECONDS, store_refuses_everything),
    "a run is paused for 60 s past its lease": (STALE_SECONDS + PAST_SECONDS, pause_past_its_lease),
}
"""What happens -> how long it lasts, and what brings it about."""
