"""Progress of a stage's attempt, stored beside its lease so that `status` can read it
from another terminal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from gristmill.core.files import read_json, write_json

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
        self._started = self._job_started = time.time()
        self._job, self._job_done, self._written = "", 0.0, 0.0
        self._broken = False
        self._unwritten: Event | None = None
        self.furthest = 0.0
        self._write({})

    def note(self, event: Event) -> None:
        """Record a stage's event if it is progress; warns once if the store fails."""
        if event["event"] != "progress":
            return
        self.furthest = max(self.furthest, float(event["done"]))
        now, job = time.time(), str(event.get("job", ""))
        if job != self._job:
            self._job = job
            self._job_started = now
            self._job_done = float(event["done"])
        if now - self._written >= WRITE_SECONDS:
            self._write(event)
        else:
            self._unwritten = event

    def close(self) -> None:
        """Write the last event of an attempt that has ended."""
        if self._unwritten is not None:
            self._write(self._unwritten)

    def _write(self, event: Event) -> None:
        if self._broken:
            return
        self._written, self._unwritten = time.time(), None
        try:
            write_json(
                self._path,
                {
                    "started": self._started,
                    "at": self._written,
                    "job_started": self._job_started,
                    "job_done": self._job_done,
                    **event,
                },
            )
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
    path = progress_path(lease_folder, number)
    if not path.exists():
        return {}
    progress: Progress = read_json(path)
    return progress


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
