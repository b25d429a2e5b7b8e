"""Runtime environment of a stage, and its reports to the parent process. Nothing here
may change a result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Required, TypedDict

from gristmill.core.files import as_path
from gristmill.mixtures.schema.engine import BeamEngine, TrainingEngine

if TYPE_CHECKING:
    from gristmill.core.store import StageFingerprint

EVENT_PREFIX = "@gristmill "
"""Prefix of JSON events in a stage process's output; all other lines are log."""


Event = dict[str, object]
"""Event of a stage's process, as JSON: `event` is its kind."""


class StageInput(TypedDict):
    """Input of a stage: the stage that made it, and its folder."""

    stage: str
    folder: str


class StageDescription(TypedDict, total=False):
    """Content of a `stage.json`, as far as the stage's process reads it.

    Attributes:
        stage: its name.
        launch: `process` or `torchrun`.
        run: MODULE:FUNCTION.
        config: settings of the function.
        inputs: in the order in which these stages ran. Edits are applied in this order,
            so this is a list: the keys of a JSON object are unordered.
        input_fingerprints: of the inputs.
        trained: inputs that hold a trained model.
        origins: folders, by stage, with details of a training's documents.
        engine: section `engine` of the run.
        fetched: local copies of inputs, by stage.
        outdated: files in the store to delete with the next checkpoint.
        intended_losses: of a stage whose losses are counted: columns, each with a rule
            that is about it.
    """

    stage: Required[str]
    launch: str
    run: Required[str]
    config: Required[dict[str, object]]
    inputs: Required[list[StageInput]]
    input_fingerprints: list[StageFingerprint]
    trained: list[str]
    origins: dict[str, str]
    engine: Required[dict[str, object]]
    fetched: dict[str, str]
    outdated: list[str]
    intended_losses: Sequence[tuple[str, str]] | None


def read_inputs(description: StageDescription) -> dict[str, Path]:
    """Stage -> folder of each input of a stage, or its local copy, in the order in
    which the stages ran.
    """
    folders = {entry["stage"]: entry["folder"] for entry in description["inputs"]}
    folders |= description.get("fetched", {})
    return {stage: as_path(folder) for stage, folder in folders.items()}


def input_fingerprints(entries: Iterable[StageFingerprint]) -> dict[str, str]:
    """Stage -> fingerprint of each input of an output, in order."""
    return {entry["stage"]: entry["fingerprint"] for entry in entries}


def print_event(event: Event) -> None:
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


class WorkMirror(Protocol):
    """A store that mirrors the local work folder of a training
    (`train.store_sync.Mirror`).
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
class Mirroring:
    """Mirroring of a training's work folder in a store.

    Attributes:
        mirror: on the first rank of each work folder that a store mirrors.
        per_host: each host of the training has its own work folder, and all are
            mirrored by the same store.
    """

    mirror: WorkMirror | None = None
    per_host: bool = False

    def is_first_here(self, is_first: bool) -> bool:
        """Return True on the one rank that writes shared files into this work folder.

        Args:
            is_first: this is the training's first rank.
        """
        return self.mirror is not None if self.per_host else is_first


NOT_MIRRORED = Mirroring()


@dataclass(frozen=True)
class Lineage:
    """Committed outputs of other stages that a training refers to.

    Attributes:
        annotations: folders, by stage, with details of the training documents; for
            loss-spike reports.
        start_models: fingerprints, by stage, of the models that the training starts
            from.
    """

    annotations: Mapping[str, Path] = field(default_factory=dict)
    start_models: Mapping[str, str] = field(default_factory=dict)


ONE_WORKER = BeamEngine(workers=1)


@dataclass(frozen=True)
class Context:
    """Runtime environment of a stage.

    Attributes:
        work: folder that survives retries: records of finished shards, spills,
            checkpoints.
        stage: name of the stage.
        beam: execution of its Beam jobs.
        training: execution of a training.
        lineage: outputs that a training refers to.
        mirroring: mirroring of a training's `work` in a store.
        answers: folder of the store with cached model answers for all stages; in `work`
            if None.
        emit: receives events (progress, metrics, warnings).
    """

    work: Path
    stage: str = "stage"
    beam: BeamEngine = ONE_WORKER
    training: TrainingEngine = field(default_factory=TrainingEngine)
    lineage: Lineage = field(default_factory=Lineage)
    mirroring: Mirroring = NOT_MIRRORED
    answers: Path | None = None
    emit: Callable[[Event], None] = print_event

    def with_one_worker(self) -> Context:
        """Return the same context with one worker, for jobs that take less time than
        the start of several, or than their way to a cluster: they run in the stage's
        process, one task after the other.
        """
        is_local = self.beam.runner == "local"
        one_worker = self.beam.model_copy(update={"workers": 1})
        return replace(self, beam=one_worker if is_local else ONE_WORKER)

    def progress(self, done: float, total: float, unit: str, **extra: object) -> None:
        """Report the stage's progress (units: shards, steps, documents)."""
        self.emit(
            {"event": "progress", "done": done, "total": total, "unit": unit, **extra}
        )

    def warn(self, message: str) -> None:
        """Report a warning for the user that does not end the stage."""
        self.emit({"event": "warning", "message": message})
