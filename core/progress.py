"""Progress of a stage's attempt, stored beside its lease so that `status` can read it
from another terminal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from gristmill.core.files import find_json, write_json

WRITE_SECONDS = 2.0
Event = Mapping[str, Any]
"""Event that a stage sends (`stage_context.print_event`)."""
log = logging.getLogger("gristmill.progress")


class ProgressFile:
    """`lease/<n>.progress.json` of one attempt, rewritten at most every WRITE_SECONDS
    and at its end.

    Attributes:
        furthest: largest `done` of all events.
    """

    def __init__(self, lease_folder: Path, number: int) -> None:
        self._path = progress_path(lease_folder, number)
        now = time.time()
        self._job: Progress = {"started": now, "job_started": now, "job_done": 0.0}
        self._event: Event = {}
        self._written = 0.0
        self._broken = False
        self.furthest = 0.0
        self.write()

    def note(self, event: Event) -> None:
        """Record a stage's event if it is progress; warns once if the store fails."""
        if event["event"] != "progress":
            return
        now, done = time.time(), float(event["done"])
        self.furthest = max(self.furthest, done)
        if event.get("job", "") != self._event.get("job", ""):
            self._job |= {"job_started": now, "job_done": done}
        self._event = event
        if now - self._written >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the last event, unless the store has failed before."""
        if self._broken:
            return
        self._written = time.time()
        try:
            write_json(self._path, {**self._job, "at": self._written, **self._event})
        except Exception as error:  # noqa: BLE001 - object stores' libraries raise errors of their own
            # A full disk ends the stage at its own next write; the thread that reads
            # its output must go on.
            self._broken = True
            log.warning("`status` cannot show progress any more: %s", error)


def progress_path(lease_folder: Path, number: int) -> Path:
    """File of an attempt's progress."""
    return lease_folder / f"{number}.progress.json"


class Progress(TypedDict, total=False):
    """Progress of an attempt; times are seconds since 1970."""

    started: float
    at: float
    """Time of the last event."""
    job_started: float
    job_done: float
    """Units done when the job started."""
    job: str
    done: float
    total: float
    unit: str
    loss: float | None
    """Loss of a training."""
    tokens_per_second: float | None
    """Speed of a training."""


def read_progress(lease_folder: Path, number: int) -> Progress:
    """Read an attempt's progress; empty if it has none."""
    return find_json(progress_path(lease_folder, number), {})


def describe_progress(progress: Progress) -> str:
    """`dedup sketch: 3/16 shards`, with a training's loss; empty before the first
    event.
    """
    if "done" not in progress:
        return ""
    job = f"{progress['job']}: " if progress.get("job") else ""
    metrics = "".join(f", {part}" for part in describe_metrics(progress))
    return (
        f"{job}{progress['done']:g}/{progress['total']:g} {progress['unit']}{metrics}"
    )


def describe_metrics(event: Mapping[str, object]) -> list[str]:
    """Loss and throughput of a training, as short as for a progress bar; empty for
    other events.
    """
    formats = {"loss": "loss {:.4g}", "tokens_per_second": "{:,.0f} tokens/s"}
    return [
        words.format(event[key])
        for key, words in formats.items()
        if isinstance(event.get(key), int | float)
    ]


def seconds_left(progress: Progress) -> float | None:
    """Seconds until the job's last unit at its mean rate so far, counted from `at`;
    None without a rate.
    """
    num_done = progress.get("done", 0.0) - progress.get("job_done", 0.0)
    spent = progress.get("at", 0.0) - progress.get("job_started", 0.0)
    if num_done <= 0 or spent <= 0:
        return None
    return (progress["total"] - progress["done"]) * spent / num_done
