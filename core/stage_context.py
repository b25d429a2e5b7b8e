"""Runtime environment of a stage, and its reports to the parent process. Nothing here
may change a result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gristmill.core.files import as_path
from gristmill.mixtures.engine import Compute, Parallel, Profile, Stream, Trackers

EVENT_PREFIX = "@gristmill "
"""Prefix of JSON events in a stage process's output; all other lines are log."""


def read_inputs(description: Mapping[str, Any]) -> dict[str, Path]:
    """Stage -> folder of each input of a stage, in the order in which the stages ran.

    Edits are applied in this order, so the file has a list: the keys of a JSON object
    are unordered.

    Args:
        description: a `stage.json`.
    """
    return {entry["stage"]: as_path(entry["folder"]) for entry in description["inputs"]}


def input_fingerprints(description: Mapping[str, Any]) -> dict[str, str]:
    """Stage -> fingerprint of each input of an output, in order."""
    return {
        entry["stage"]: entry["fingerprint"]
        for entry in description.get("input_fingerprints", [])
    }


def print_event(event: dict[str, Any]) -> None:
    """Send an event to the parent process, which reads this process's standard
    output.
    """
    sys.stdout.write(EVENT_PREFIX + json.dumps(event) + "\n")
    sys.stdout.flush()


def print_warning(message: str) -> None:
    """Send a warning for the user to the parent process."""
    print_event({"event": "warning", "message": message})


def print_failure(
    message: str, is_consequence: bool = False, is_killed: bool = False
) -> None:
    """Tell the parent process why this one ends: on a full disk there is no other way.

    Args:
        message: one sentence.
        is_consequence: this process ends only because another one ended before.
        is_killed: SIGKILL ended a process.
    """
    print_event(
        {
            "event": "failed",
            "message": message,
            "is_consequence": is_consequence,
            "is_killed": is_killed,
        }
    )


class Following(Protocol):
    """A store that mirrors the local work folder of a training
    (`train.loop.mirror`).
    """

    def add(self, folder: Path) -> None:
        """Upload all files below a folder; other files in the store stay."""

    def saved(self, checkpoint: Path, names: Iterable[str]) -> None:
        """Upload the changes and a checkpoint's marker; all of the checkpoint's files,
        by name, exist somewhere.
        """

    def fetch(self, checkpoint: Path) -> None:
        """Download the files of a complete checkpoint that are not on this machine."""


@dataclass(frozen=True)
class Context:
    """Runtime environment of a stage.

    Attributes:
        work: folder that survives retries: records of finished shards, spills,
            checkpoints.
        stage: name of the stage.
        workers: parallel Beam workers.
        runner: one of `mixtures.engine.ENGINES`, or the name of a Beam runner.
        mode: workers of the local runner: `threads`, `processes`, `memory` (none), or
            `auto`.
        nodes: hosts that share the stage's tasks, with the local runner.
        address: of the cluster.
        options: Beam pipeline options for a runner other than `local`.
        shuffle: exchange of rows between jobs (`dataprep/jobs/shuffle.py`): `files` or
            `engine`; the runner's default if None.
        worker_seconds: longest wait for the first worker of a cluster, and for its
            first finished task.
        checkpoint_every: training steps between checkpoints.
        keep_checkpoints: number of checkpoints to keep.
        parallel: distribution of a training over its processes.
        compute: settings of the computation in each process.
        permanent_every: training steps between checkpoints that are never deleted; None
            for none.
        stream: reading of training rows.
        deterministic: reject operations whose result may differ between two runs.
        trackers, profile: monitoring of a training.
        origins: committed outputs, by stage, with details of the training documents;
            for loss-spike reports.
        began_with: fingerprints of the models that a training starts from, by stage.
        following: on the first rank of each work folder, the store that mirrors it.
        apart: each host of a training has its own work folder, mirrored by the same
            store.
        answers: folder of the store with cached model answers for all stages; in `work`
            if None.
        emit: receives events (progress, metrics, warnings).
    """

    work: Path
    stage: str = "stage"
    workers: int = 1
    runner: str = "local"
    mode: str = "auto"
    nodes: int = 1
    address: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    shuffle: str | None = None
    worker_seconds: float = 60.0
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    parallel: Parallel = field(default_factory=Parallel)
    compute: Compute = field(default_factory=Compute)
    permanent_every: int | None = None
    stream: Stream = field(default_factory=Stream)
    deterministic: bool = False
    trackers: Trackers = field(default_factory=Trackers)
    profile: Profile | None = None
    origins: Mapping[str, Path] = field(default_factory=dict)
    began_with: Mapping[str, str] = field(default_factory=dict)
    following: Following | None = None
    apart: bool = False
    answers: Path | None = None
    emit: Callable[[dict[str, Any]], None] = print_event

    def progress(self, done: float, total: float, unit: str, **extra: Any) -> None:
        """Report the stage's progress (units: shards, steps, documents)."""
        self.emit(
            {"event": "progress", "done": done, "total": total, "unit": unit, **extra}
        )

    def warn(self, message: str) -> None:
        """Report a warning for the user that does not end the stage."""
        self.emit({"event": "warning", "message": message})
