"""`gristmill bench outages`: outages of a minute at their real length, after which the
bytes must be the same.

Tests show the same with pauses of seconds, and shorter leases. Here gristmill is
unchanged: a lease is stale after 90 s, and requests are repeated for ten minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.chaos.fuse import burn_at
from benchmarks.chaos.kills import carriers, still_running
from benchmarks.chaos.network import REFUSE_SECONDS
from benchmarks.chaos.servers import store_refuses_everything
from benchmarks.chaos.surroundings import CannotMountError, Scene
from benchmarks.chaos.undisturbed import (
    RUN_SECONDS,
    Undisturbed,
    finish,
    start,
    wrong_code,
)
from benchmarks.measuring import Row, row
from gristmill.core.heartbeats import STALE_SECONDS

PAST_SECONDS = 60.0
"""Time for which a run is paused after its lease is stale."""
POLL_SECONDS = 0.02
LAST = "dedup"
"""The last stage, whose run is paused."""
ELSEWHERE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Command that starts another one in a process namespace of its own, as on another
host.
"""


@dataclass(frozen=True)
class Outage:
    """An outage.

    Attributes:
        name: of its row.
        seconds: its length.
        cause: function that causes it, and returns sentences about broken promises.
    """

    name: str
    seconds: float
    cause: Callable[[Scene], list[str]]


def rows(folder: Path | None = None) -> Iterator[Row]:
    """Measure seconds of a disturbed run, against those of the outage, and compare the
    bytes.

    Args:
        folder: work folder; a temporary one if None.
    """
    with tempfile.TemporaryDirectory(prefix="gristmill-outages-") as temporary:
        work = Path(temporary) if folder is None else folder
        run = Undisturbed.make(work, until=LAST)
        for number, outage in enumerate(OUTAGES):
            start_time, seconds = time.monotonic(), None
            try:
                wrong = outage.cause(
                    Scene(run, work / f"scene-{number}", LAST, 0, number)
                )
                seconds = time.monotonic() - start_time
            except CannotMountError as error:
                wrong = [str(error)]
            happened = "; ".join(wrong) or "the same bytes, all as promised"
            yield replace(
                row(outage.name, seconds, outage.seconds, "s"), happened=happened
            )


def pause_past_its_lease(scene: Scene) -> list[str]:
    """Stop all processes of a run on another host until a minute after its lease;
    another run makes its stage.

    Raises:
        CannotMountError: a namespace needs the rights of root.
    """
    if subprocess.run(
        [*ELSEWHERE, "true"], capture_output=True, check=False
    ).returncode:
        raise CannotMountError(
            "a namespace of processes needs unshare, and the rights of root"
        )
    scene.run.lend(scene.store, scene.stage)
    fuse = scene.fuse(1 + scene.some_change("pause") // 2, "nothing")
    arguments = scene.run.arguments(scene.store, scene.stage)
    paused = start(arguments, burn_at(fuse), warmed=False, within=ELSEWHERE)
    deadline = time.monotonic() + RUN_SECONDS
    while not fuse.has_burnt() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    pause_start, processes = time.monotonic(), carriers(fuse.log)
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    folder = scene.run.folder_in(scene.store, scene.stage)
    wrong = (
        [] if folder.state() != "committed" else ["it was over before it was paused"]
    )
    wrong += [
        f"the other run {sentence}" for sentence in wrong_code(finish(start(arguments)))
    ]
    wrong += (
        []
        if time.monotonic() > pause_start + STALE_SECONDS
        else ["the lease was taken over before its time"]
    )
    time.sleep(max(0.0, pause_start + STALE_SECONDS + PAST_SECONDS - time.monotonic()))
    for process in processes:
        os.kill(process, signal.SIGCONT)
    done = finish(paused)
    if (
        done.returncode != 1
        or "was taken over by another run" not in done.stdout
        or "Traceback" in done.stdout
    ):
        wrong.append(
            f"the paused run ended with {done.returncode}: {done.stdout[-300:]}"
        )
    return [*wrong, *scene.goes_on(), *still_running([fuse.log])]


OUTAGES = (
    Outage(
        "the object store answers 503 for 60 s",
        REFUSE_SECONDS,
        store_refuses_everything,
    ),
    Outage(
        "a run is paused for 60 s past its lease",
        STALE_SECONDS + PAST_SECONDS,
        pause_past_its_lease,
    ),
)
