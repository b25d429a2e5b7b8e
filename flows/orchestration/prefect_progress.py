"""Log lines, progress and cards of running stages for Prefect. `reporting.py` sends
them.
"""

from __future__ import annotations

import contextvars
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gristmill.core.store import StageFolder
from gristmill.flows.orchestration.progress_text import LineBudget, Pace
from gristmill.flows.running.process import Event
from gristmill.flows.running.run import Observer, Outcome
from gristmill.flows.stages.plan import Node

PROGRESS_SECONDS = 2.0
PROGRESS_LINE_SECONDS = 10.0
CARD_SECONDS = 30.0
"""Interval of drawing a training's curve, which takes a tenth of a second of CPU."""
LINE_CHARS = 2000


def artifact_key(name: str) -> str:
    """Key of an artifact for a name: lower-case letters, digits and dashes."""
    return "".join(
        letter if letter.isalnum() and letter.isascii() else "-"
        for letter in name.lower()
    )


@dataclass
class StageWindow:
    """Display state of a running stage."""

    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Context of the stage's task."""
    pace: Pace | None = None
    budget: LineBudget = field(default_factory=LineBudget)
    losses: list[tuple[float, float]] = field(default_factory=list)
    resumed: StageFolder | None = None
    """Folder with the losses of earlier attempts, which are read when a card is
    drawn.
    """
    artifact_sent: float = 0.0
    line_sent: float = 0.0
    card_sent: float = 0.0

    def curve(self) -> list[tuple[float, float]]:
        """Loss by step, of all attempts."""
        if self.resumed is not None:
            self.losses[:0] = losses_before(self.resumed, self.losses[0][0])
            self.resumed = None
        return list(self.losses)


def losses_before(folder: StageFolder, step: float) -> list[tuple[float, float]]:
    """Losses logged by an unfinished training before a step."""
    file = folder.work / "metrics.jsonl"
    if not file.exists():
        return []
    record = (
        json.loads(line)
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("}\n")
    )
    return [
        (line["step"], line["loss"])
        for line in record
        if "loss" in line and line["step"] < step
    ]


class WindowObserver(ABC):
    """Shows stages, and forwards all calls to the caller's display."""

    def __init__(self, inner: Observer | None = None) -> None:
        self._inner = inner
        self._windows: dict[str, StageWindow] = {}

    @abstractmethod
    def show_line(self, stage: str, line: str, level: int = logging.INFO) -> None:
        """Show a line of a stage's log."""

    @abstractmethod
    def show_progress(self, stage: str, percent: float, description: str) -> None:
        """Show the progress of a stage."""

    @abstractmethod
    def show_curve(
        self,
        stage: str,
        description: str,
        curve: Callable[[], list[tuple[float, float]]],
    ) -> None:
        """Show the progress of a training, with its loss by step."""

    @abstractmethod
    def show_outcome(self, outcome: Outcome) -> None:
        """Show the output of a stage."""

    def stage_started(self, node: Node, resuming: bool, folder: StageFolder) -> None:
        """See Observer."""
        self._windows[node.name] = StageWindow(resumed=folder if resuming else None)
        if self._inner is not None:
            self._inner.stage_started(node, resuming, folder)
        begins = "resumes where it stopped" if resuming else "starts"
        self.show_line(node.name, f"{node.name}: {begins} ({node.fingerprint[:16]})")

    def stage_waits(self, node: Node, owner: Mapping[str, Any]) -> None:
        """See Observer."""
        if self._inner is not None:
            self._inner.stage_waits(node, owner)
        self.show_line(
            node.name,
            f"{node.name}: waits for process {owner['pid']} on {owner['host']}, "
            "which is making the same output",
        )

    def stage_event(self, node: Node, event: Event) -> None:
        """See Observer."""
        if self._inner is not None:
            self._inner.stage_event(node, event)
        if event["event"] == "warning":
            self.show_line(
                node.name, f"{node.name}: {event['message']}", logging.WARNING
            )
        if event["event"] == "log":
            self._show_log_line(node.name, event["line"])
        if event["event"] == "progress":
            self._show_progress(node.name, event)

    def stage_finished(self, node: Node, outcome: Outcome) -> None:
        """See Observer."""
        if self._inner is not None:
            self._inner.stage_finished(node, outcome)
        # A cached stage was never started; the display belongs to the task that reports
        # it.
        self._window(node.name).context = contextvars.copy_context()
        self._report_held_back(node.name)
        note = f" ({outcome.note})" if outcome.note else ""
        self.show_line(
            node.name,
            f"{node.name}: {outcome.how} in {outcome.seconds:.1f} s{note}: "
            f"{outcome.folder.path}",
        )
        self.show_outcome(outcome)

    def stage_failed(self, node: Node, message: str) -> None:
        """See Observer."""
        if self._inner is not None:
            self._inner.stage_failed(node, message)
        self._report_held_back(node.name)
        self.show_line(node.name, message, logging.ERROR)

    def _window(self, stage: str) -> StageWindow:
        return self._windows.setdefault(stage, StageWindow())

    def _show_log_line(self, stage: str, line: str) -> None:
        """Show a line printed by the stage, unless the rate limit is reached."""
        if line.strip() and self._window(stage).budget.allows(time.monotonic()):
            self._report_held_back(stage)
            self.show_line(stage, f"{stage} | {line[:LINE_CHARS]}")

    def _report_held_back(self, stage: str) -> None:
        held_back = self._window(stage).budget.take_held_back()
        if held_back:
            self.show_line(
                stage,
                f"{stage} | ... {held_back} lines that are only in the stage's log file",
            )

    def _show_progress(self, stage: str, event: Event) -> None:
        window = self._window(stage)
        now = time.monotonic()
        if window.pace is None or window.pace.job != event.get("job", ""):
            window.pace = Pace.begin(event, now)
        # A job with the name of its stage would repeat it.
        description = window.pace.describe(event, now).removeprefix(f"{stage}: ")
        finished = event["done"] >= event["total"]
        if "loss" in event:
            window.losses.append((event["done"], event["loss"]))
        if finished or now - window.artifact_sent >= PROGRESS_SECONDS:
            window.artifact_sent = now
            self.show_progress(
                stage,
                100.0 * event["done"] / max(event["total"], 1),
                f"{stage}: {description}",
            )
        if finished or now - window.line_sent >= PROGRESS_LINE_SECONDS:
            window.line_sent = now
            self.show_line(stage, f"{stage}: {description}")
        if (
            len(window.losses) > 1
            and not finished
            and now - window.card_sent >= CARD_SECONDS
        ):
            window.card_sent = now
            self.show_curve(stage, description, window.curve)
