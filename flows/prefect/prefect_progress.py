"""Log lines, progress and cards of running stages in Prefect."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

from gristmill.core.progress import Progress
from gristmill.core.secrets import mask_text
from gristmill.core.store import StageFolder
from gristmill.flows.prefect.cards import live_card, stage_card
from gristmill.flows.prefect.reporting import publish_card
from gristmill.flows.questions.status import describe_job
from gristmill.flows.report.facts import training
from gristmill.flows.report.training import points_of
from gristmill.flows.running.events import (
    RunEvent,
    RunRecorded,
    StageEvent,
    StageFailed,
    StageFinished,
    StageOutput,
    StageProgress,
    StageStarted,
    StageWaits,
    StageWarning,
)

PROGRESS_SECONDS = 2.0
PROGRESS_LINE_SECONDS = 10.0
CARD_SECONDS = 30.0
"""Interval of drawing a training's curve, which takes a tenth of a second of CPU."""
LINE_CHARS = 2000
LINES_PER_SECOND = 5.0
"""Log lines of a stage per second that a Prefect server handles easily (1 to 2 ms
each).
"""
BURST_LINES = 50.0
QUEUE_LENGTH = 1000
CLOSE_SECONDS = 15.0
log = logging.getLogger("gristmill.reporting")


def artifact_key(name: str) -> str:
    """Key of an artifact for a name: lower-case letters, digits and dashes."""
    return "".join(
        letter if letter.isalnum() and letter.isascii() else "-"
        for letter in name.lower()
    )


@dataclass
class LineBudget:
    """Rate limit of `LINES_PER_SECOND` with bursts of `BURST_LINES`; counts suppressed
    lines.

    A training that prints a line per step must not be slowed down by its display; the
    log file has all lines.
    """

    available: float = BURST_LINES
    last: float | None = None
    held_back: int = 0

    def allows(self, now: float) -> bool:
        """True if one more line may be shown now."""
        if self.last is not None:
            self.available = min(
                BURST_LINES, self.available + (now - self.last) * LINES_PER_SECOND
            )
        self.last = now
        if self.available < 1.0:
            self.held_back += 1
            return False
        self.available -= 1.0
        return True

    def take_held_back(self) -> int:
        """Number of lines suppressed since the last call."""
        count = self.held_back
        self.held_back = 0
        return count


@dataclass
class StageWindow:
    """Display state of a running stage."""

    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Context of the stage's task."""
    progress: Progress = field(default_factory=Progress)
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
            first = self.losses[0][0]
            earlier = points_of(training(self.resumed), {"loss": "loss"}).get(
                "loss", []
            )
            self.losses[:0] = [point for point in earlier if point[0] < first]
            self.resumed = None
        return list(self.losses)


class PrefectObserver:
    """Observer that shows stages in the Prefect UI: log lines, artifacts and cards.

    One thread sends everything from a bounded queue: a slow or absent server can
    neither delay nor fail a stage.
    """

    def __init__(self) -> None:
        self._windows: dict[str, StageWindow] = {}
        self._queue: queue.Queue[
            tuple[contextvars.Context, Callable[[], None]] | None
        ] = queue.Queue(QUEUE_LENGTH)
        self._artifacts: dict[str, UUID] = {}
        self._has_warned = False
        self._thread = threading.Thread(target=self._send_queued, daemon=True)
        self._thread.start()

    def __call__(self, event: RunEvent) -> None:
        """Show an event; after the last stage, send what remains."""
        if isinstance(event, RunRecorded):
            self.close()
        if not isinstance(event, StageEvent):
            return
        stage = event.node.name
        window = self._windows.setdefault(stage, StageWindow())
        match event:
            case StageStarted():
                resumed = event.folder if event.resuming else None
                self._windows[stage] = StageWindow(resumed=resumed)
                begins = "resumes where it stopped" if event.resuming else "starts"
                self._show_line(
                    stage, f"{stage}: {begins} ({event.node.fingerprint[:16]})"
                )
            case StageWaits():
                self._show_line(
                    stage,
                    f"{stage}: waits for process {event.pid} on {event.host}, "
                    "which is making the same output",
                )
            case StageWarning():
                self._show_line(stage, f"{stage}: {event.message}", logging.WARNING)
            case StageOutput(line=line):
                if line.strip() and window.budget.allows(time.monotonic()):
                    self._report_held_back(stage)
                    self._show_line(stage, f"{stage} | {line[:LINE_CHARS]}")
            case StageProgress():
                self._show_progress(stage, event)
            case StageFinished(outcome=outcome):
                # A cached stage was never started; the display belongs to the task that
                # reports it.
                window.context = contextvars.copy_context()
                self._report_held_back(stage)
                note = f" ({outcome.note})" if outcome.note else ""
                self._show_line(
                    stage,
                    f"{stage}: {outcome.how} in {outcome.seconds:.1f} s{note}: "
                    f"{outcome.folder.path}",
                )
                self._send_card(stage, lambda: stage_card(outcome), stage)
            case StageFailed():
                self._report_held_back(stage)
                self._show_line(stage, event.message, logging.ERROR)

    def _show_line(self, stage: str, line: str, level: int = logging.INFO) -> None:
        def send() -> None:
            from prefect.logging import get_run_logger

            get_run_logger().log(level, mask_text(line))

        self._send(stage, send)

    def _report_held_back(self, stage: str) -> None:
        held_back = self._windows[stage].budget.take_held_back()
        if held_back:
            self._show_line(
                stage,
                f"{stage} | ... {held_back} lines that are only in the stage's log file",
            )

    def _show_progress(self, stage: str, event: StageProgress) -> None:
        window = self._windows[stage]
        now = time.monotonic()
        if window.progress.get("job") != event.job:
            window.progress = Progress(
                job=event.job, job_started=now, job_done=event.done
            )
        window.progress |= Progress(
            at=now,
            done=event.done,
            total=event.total,
            unit=event.unit,
            loss=event.loss,
            tokens_per_second=event.tokens_per_second,
        )
        description = describe_job(window.progress, stage, now)
        finished = event.done >= event.total
        if event.loss is not None:
            window.losses.append((event.done, event.loss))
        if finished or now - window.artifact_sent >= PROGRESS_SECONDS:
            window.artifact_sent = now
            percent = 100.0 * event.done / max(event.total, 1)
            self._send(
                stage,
                partial(self._send_progress, stage, percent, f"{stage}: {description}"),
            )
        if finished or now - window.line_sent >= PROGRESS_LINE_SECONDS:
            window.line_sent = now
            self._show_line(stage, f"{stage}: {description}")
        if (
            len(window.losses) > 1
            and not finished
            and now - window.card_sent >= CARD_SECONDS
        ):
            window.card_sent = now
            self._send_card(
                stage,
                lambda: live_card(stage, description, window.curve()),
                f"{stage}, while it runs",
            )

    def _send_card(self, stage: str, card: Callable[[], str], about: str) -> None:
        key = artifact_key(f"{stage}-card")
        self._send(stage, lambda: publish_card(key, card(), about))

    def close(self) -> None:
        """Send the remaining items, for a bounded time."""
        try:
            self._queue.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _send(self, stage: str, action: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait((self._windows[stage].context, action))
        except queue.Full:
            self._warn_once(
                "the queue to Prefect is full: some lines are missing in its log"
            )

    def _send_progress(self, stage: str, percent: float, description: str) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        if stage not in self._artifacts:
            artifact = create_progress_artifact(
                percent, key=artifact_key(f"{stage}-progress"), description=description
            )
            assert isinstance(artifact, UUID)
            self._artifacts[stage] = artifact
            return
        update_progress_artifact(
            self._artifacts[stage], percent, description=description
        )

    def _send_queued(self) -> None:
        while (item := self._queue.get()) is not None:
            context, action = item
            try:
                context.run(action)
            except Exception as error:  # noqa: BLE001 - an error of the display does not affect the work
                self._warn_once(f"Prefect did not take an update: {error}")

    def _warn_once(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s (the run continues; its record is in the store)", message)
