"""Events of a run, which its subscribers receive: the record, a terminal, JSON lines,
Prefect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from gristmill.core.store import StageFolder
from gristmill.flows.stages.plan import Node

How = Literal["Cached", "Completed", "Resumed"]


@dataclass(frozen=True)
class Outcome:
    """Result of a stage with a committed output."""

    stage: str
    fingerprint: str
    how: How
    seconds: float
    folder: StageFolder
    note: str = ""


@dataclass(frozen=True)
class RunStarted:
    """A run begins."""

    manifest_file: str
    name: str
    stages: tuple[str, ...]


@dataclass(frozen=True)
class RunNotice:
    """A sentence for the user."""

    message: str


@dataclass(frozen=True)
class RunRecorded:
    """The stages have ended, and the run's record and report are written.

    Attributes:
        folder: folder of the record.
        report: path of the report; None if it could not be written.
    """

    folder: Path
    report: Path | None


@dataclass(frozen=True)
class RunEnded:
    """End of a run that a command has started.

    Attributes:
        message: the error; empty if the run is completed.
        folder: folder of the record of a completed run.
    """

    state: Literal["completed", "failed", "interrupted"]
    message: str = ""
    folder: Path | None = None


@dataclass(frozen=True)
class StageEvent:
    """An event of one stage."""

    node: Node


@dataclass(frozen=True)
class StageStarted(StageEvent):
    """The stage's process is about to start, in its folder."""

    folder: StageFolder
    resuming: bool


@dataclass(frozen=True)
class StageWaits(StageEvent):
    """Another run is making the same output, and this one waits for it."""

    host: str
    pid: int


@dataclass(frozen=True)
class StageProgress(StageEvent):
    """Progress of a job of the stage, with the loss and throughput of a training."""

    done: float
    total: float
    unit: str
    job: str = ""
    loss: float | None = None
    tokens: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class StageOutput(StageEvent):
    """A line that the stage printed."""

    line: str


@dataclass(frozen=True)
class StageWarning(StageEvent):
    """A warning for the user; the message does not repeat the stage's name."""

    message: str


@dataclass(frozen=True)
class StageStopping(StageEvent):
    """The stage was told to end, and may save its progress for some seconds."""

    seconds: float


@dataclass(frozen=True)
class StageFinished(StageEvent):
    """The stage's output is committed."""

    outcome: Outcome


@dataclass(frozen=True)
class StageFailed(StageEvent):
    """The stage has failed; parallel stages continue."""

    message: str


RunEvent = RunStarted | RunNotice | RunRecorded | RunEnded | StageEvent
Subscriber = Callable[[RunEvent], None]
"""Receives the events of a run, some of them from a thread that must not block. It
cannot change the run.
"""


def to_all(*subscribers: Subscriber) -> Subscriber:
    """Subscriber that passes every event to several others, in order."""

    def publish(event: RunEvent) -> None:
        for subscriber in subscribers:
            subscriber(event)

    return publish


def parse_event(node: Node, content: Mapping[str, Any]) -> StageEvent | None:
    """Event that a stage's process reported as JSON; None if it is not for subscribers.

    Args:
        content: see `gristmill.core.stage_context.print_event`.
    """
    match content["event"]:
        case "progress":
            keys = {key.name for key in fields(StageProgress)}
            values = {key: content[key] for key in keys.intersection(content)}
            return StageProgress(node, **values)
        case "log":
            return StageOutput(node, content["line"])
        case "warning":
            return StageWarning(
                node, str(content["message"]).removeprefix(f"{node.name}: ")
            )
        case "stopping":
            return StageStopping(node, content["seconds"])
    return None
