"""What a stage knows about where it runs, and how it reports back. Nothing in here may change a result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gristmill.dataprep.files import as_path
from gristmill.mixtures.engine import Compute, Parallel, Profile, Stream, Trackers

EVENT_PREFIX = "@gristmill "
"""Lines of a stage process that begin so are events in JSON; all others are log."""


def read_inputs(description: Mapping[str, Any]) -> dict[str, Path]:
    """Stage -> folder of what a stage reads, in the order in which these stages ran.

    Edits are applied in this order, so it is a list in the file: the keys of a JSON object have none.

    Args:
        description: a `stage.json`.
    """
    return {entry["stage"]: as_path(entry["folder"]) for entry in description["inputs"]}


def input_fingerprints(description: Mapping[str, Any]) -> dict[str, str]:
    """Stage -> fingerprint of each input of an output, in order."""
    return {entry["stage"]: entry["fingerprint"] for entry in description.get("input_fingerprints", [])}


def print_event(event: dict[str, Any]) -> None:
    """Hand an event to the parent process, which reads this process's standard output."""
    sys.stdout.write(EVENT_PREFIX + json.dumps(event) + "\n")
    sys.stdout.flush()


def print_warning(message: str) -> None:
    """Tell the parent process of what a person should know."""
    print_event({"event": "warning", "message": message})


def print_failure(message: str, is_consequence: bool = False, is_killed: bool = False) -> None:
    """Tell the parent process why this one ends: on a full disk nothing else can.

    Args:
        message: one sentence.
        is_consequence: whether another process has ended before, and this one for that alone.
        is_killed: whether SIGKILL ended a process.
    """
    print_event({"event": "failed", "message": message, "is_consequence": is_consequence, "is_killed": is_killed})


class Following(Protocol):
    """A store that follows the folder of this machine which a training works in (`train.loop.mirror`)."""

    def add(self, folder: Path) -> None:
        """Send all files below a folder; what is in the store besides stays."""

    def saved(self, checkpoint: Path, names: Iterable[str]) -> None:
        """Send what has changed, with the marker of a checkpoint, all of whose files, by name, are somewhere by now."""

    def fetch(self, checkpoint: Path) -> None:
        """Fetch those files of a complete checkpoint that are not here."""


@dataclass(frozen=True)
class Context:
    """Where a stage runs.

    Attributes:
        work: folder that survives attempts: records of finished shards, spills, checkpoints.
        stage: the stage's name.
        workers: parallel Beam workers.
        runner: one of `mixtures.engine.ENGINES`, or the name of a Beam runner.
        mode: what the workers of the local runner are: `threads`, `processes`, `memory` (none), or `auto`.
        nodes: hosts that do the stage's tasks together, by the local runner.
        address: of the cluster.
        options: Beam pipeline options for a runner other than `local`.
        shuffle: which way rows take between jobs (`dataprep/jobs/shuffled.py`): `files`, `engine`, or as the runner
            suggests if None.
        worker_seconds: longest wait for the first worker of a cluster, and for the first task that one does.
        checkpoint_every: training steps between checkpoints.
        keep_checkpoints: how many checkpoints are kept.
        parallel: how a training is spread over its processes.
        compute: how it computes on each of them.
        permanent_every: training steps between checkpoints that are never deleted; none are if absent.
        stream: how training reads its rows.
        deterministic: whether operations whose result may differ between two runs are refused.
        trackers, profile: how a training is watched.
        origins: committed outputs, by stage, that know more of the documents trained on; for loss-spike reports.
        began_with: fingerprints of the models that a training begins with, by stage.
        following: on the first rank of those that work in one folder, the store that follows it.
        apart: whether each host of a training works in a folder of its own, which the same store follows.
        answers: folder of the store in which the answers of models are kept for all stages; in `work` if None.
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
        """Report how far the stage is (units: shards, steps, documents)."""
        self.emit({"event": "progress", "done": done, "total": total, "unit": unit, **extra})

    def warn(self, message: str) -> None:
        """Report something a person should read, which does not end the stage."""
        self.emit({"event": "warning", "message": message})
