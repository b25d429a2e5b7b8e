"""What the Prefect UI shows of a run: log lines, a progress artifact per stage, a card per stage, the run's summary.

Everything is sent by one thread of its own, from a bounded queue: a slow or absent server can neither hold up nor
fail a stage.
"""

from __future__ import annotations

import contextvars
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gristmill.dataprep.secrets import mask_text
from gristmill.flows.orchestration.cards import live_card, run_card, stage_card
from gristmill.flows.orchestration.pace import LineBudget, Pace
from gristmill.flows.orchestration.parameters import without_secrets
from gristmill.flows.report.report_links import report_link
from gristmill.flows.running.process import Event
from gristmill.flows.running.run import Observer, Outcome
from gristmill.flows.running.session import Session
from gristmill.flows.stages.plan import Node
from gristmill.flows.store.runs import RunRecord
from gristmill.flows.store.store import StageFolder

QUEUE_LENGTH = 1000
PROGRESS_SECONDS = 2.0
PROGRESS_LINE_SECONDS = 10.0
CARD_SECONDS = 30.0
"""Between two drawings of a training's curve: one takes a tenth of a second of CPU."""
CLOSE_SECONDS = 15.0
LINE_CHARS = 2000
log = logging.getLogger("gristmill.reporting")


def artifact_key(name: str) -> str:
    """A name as Prefect takes it for the key of an artifact: small letters, digits and dashes."""
    return "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in name.lower())


@dataclass
class StageWindow:
    """What is shown of one stage while it runs."""

    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """Of the task that makes the stage."""
    pace: Pace | None = None
    budget: LineBudget = field(default_factory=LineBudget)
    losses: list[tuple[float, float]] = field(default_factory=list)
    resumed: StageFolder | None = None
    """Has the losses of the attempts before, which come first; they are read when a card is drawn."""
    artifact_sent: float = 0.0
    line_sent: float = 0.0
    card_sent: float = 0.0


    def curve(self) -> list[tuple[float, float]]:
        """The loss by step, of all attempts."""
        if self.resumed is not None:
            self.losses[:0] = losses_before(self.resumed, self.losses[0][0])
            self.resumed = None
        return list(self.losses)


def losses_before(folder: StageFolder, step: float) -> list[tuple[float, float]]:
    """What an unfinished training has logged of its loss before a step."""
    file = folder.work / "metrics.jsonl"
    if not file.exists():
        return []
    record = (json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n"))
    return [(line["step"], line["loss"]) for line in record if "loss" in line and line["step"] < step]


class PrefectObserver:
    """Shows stages in the Prefect UI, and passes everything on to the caller's display."""

    def __init__(self, inner: Observer | None = None) -> None:
        self._inner = inner
        self._queue: queue.Queue[tuple[contextvars.Context, Callable[[], None]] | None] = queue.Queue(QUEUE_LENGTH)
        self._artifacts: dict[str, Any] = {}
        self._windows: dict[str, StageWindow] = {}
        self._failed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stage_started(self, node: Node, resuming: bool, folder: StageFolder) -> None:
        """See Observer."""
        self._windows[node.name] = StageWindow(resumed=folder if resuming else None)
        if self._inner is not None:
            self._inner.stage_started(node, resuming, folder)
        begins = "resumes where it stopped" if resuming else "starts"
        self._say(node.name, f"{node.name}: {begins} ({node.fingerprint[:16]})")

    def stage_waits(self, node: Node, owner: Mapping[str, Any]) -> None:
        """See Observer."""
        if self._inner is not None:
            self._inner.stage_waits(node, owner)
        self._say(node.name, f"{node.name}: waits for process {owner['pid']} on {owner['host']}, which makes the same "
                             "output")

    def stage_event(self, node: Node, event: Event) -> None:
        """See Observer."""
        if self._inner is not None:
            self._inner.stage_event(node, event)
        if event["event"] == "warning":
            self._say(node.name, f"{node.name}: {event['message']}", logging.WARNING)
        if event["event"] == "log":
            self._show_line(node.name, event["line"])
        if event["event"] == "progress":
            self._show_progress(node.name, event)

    def stage_finished(self, node: Node, outcome: Outcome) -> None:
        """See Observer."""
        if self._inner is not None:
            self._inner.stage_finished(node, outcome)
        # One that was committed has never been started; what is sent now is of the task that says so.
        self._window(node.name).context = contextvars.copy_context()
        self._say_held_back(node.name)
        note = f" ({outcome.note})" if outcome.note else ""
        self._say(node.name, f"{node.name}: {outcome.how} in {outcome.seconds:.1f} s{note}: {outcome.folder.path}")
        self._send(node.name, lambda: publish_card(artifact_key(f"{node.name}-card"), stage_card(outcome), node.name))

    def _window(self, stage: str) -> StageWindow:
        return self._windows.setdefault(stage, StageWindow())

    def close(self) -> None:
        """Send what is left, for a bounded time."""
        try:
            self._queue.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _show_line(self, stage: str, line: str) -> None:
        """A line of the stage's log, unless there are too many."""
        if line.strip() and self._window(stage).budget.allows(time.monotonic()):
            self._say_held_back(stage)
            self._say(stage, f"{stage} | {line[:LINE_CHARS]}")

    def _say_held_back(self, stage: str) -> None:
        held_back = self._window(stage).budget.take_held_back()
        if held_back:
            self._say(stage, f"{stage} | ... {held_back} lines, which only the stage's log file has")

    def _show_progress(self, stage: str, event: Event) -> None:
        window, now = self._window(stage), time.monotonic()
        if window.pace is None or window.pace.job != event.get("job", ""):
            window.pace = Pace.begin(event, now)
        # A job that is called like its stage would be named twice.
        described = window.pace.describe(event, now).removeprefix(f"{stage}: ")
        finished = event["done"] >= event["total"]
        if "loss" in event:
            window.losses.append((event["done"], event["loss"]))
        if finished or now - window.artifact_sent >= PROGRESS_SECONDS:
            window.artifact_sent = now
            percent = 100.0 * event["done"] / max(event["total"], 1)
            self._send(stage, lambda: self._send_progress(stage, percent, described))
        if finished or now - window.line_sent >= PROGRESS_LINE_SECONDS:
            window.line_sent = now
            self._say(stage, f"{stage}: {described}")
        if len(window.losses) > 1 and not finished and now - window.card_sent >= CARD_SECONDS:
            window.card_sent = now
            self._send(stage, lambda: publish_card(
                artifact_key(f"{stage}-card"), live_card(stage, described, window.curve()),
                f"{stage}, while it runs"))

    def _say(self, stage: str, line: str, level: int = logging.INFO) -> None:
        def send() -> None:
            from prefect.logging import get_run_logger

            get_run_logger().log(level, mask_text(line))

        self._send(stage, send)

    def _send(self, stage: str, action: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait((self._window(stage).context, action))
        except queue.Full:
            self._complain("the queue to Prefect is full: some lines are missing there")

    def _send_progress(self, stage: str, percent: float, described: str) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        description = f"{stage}: {described}"
        if stage not in self._artifacts:
            self._artifacts[stage] = create_progress_artifact(
                percent, key=artifact_key(f"{stage}-progress"), description=description)
            return
        update_progress_artifact(self._artifacts[stage], percent, description=description)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            context, action = item
            try:
                context.run(action)
            except Exception as error:  # noqa: BLE001 - the window may break; the work continues
                self._complain(f"Prefect did not take an update: {error}")

    def _complain(self, message: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("%s (the run continues; its record is in the store)", message)


def warn_of_renamed(session: Session) -> None:
    """Log in the current run what the manifest has under former names."""
    from prefect.logging import get_run_logger

    for message in session.renamed:
        get_run_logger().warning(mask_text(message))


def publish_card(key: str, markdown: str, description: str | None = None) -> None:
    """Create a markdown artifact of the current run."""
    from prefect.artifacts import create_markdown_artifact

    create_markdown_artifact(mask_text(markdown), key=key, description=description)


@contextmanager
def publishing_refusal(what: str) -> Iterator[None]:
    """Show all problems of a manifest or of parameters in the run: Prefect's state names the first lines only.

    The error is raised again, without credentials.
    """
    try:
        yield
    except Exception as error:
        refusal = without_secrets(error)
        try:
            publish_card("refused", f"# Refused: {what}\n\n```text\n{refusal}\n```\n\nNothing was run.",
                         "what is wrong with the parameters")
        except Exception as trouble:  # noqa: BLE001 - the refusal is raised all the same
            log.warning("Prefect did not take an update: %s", trouble)
        if refusal is error:
            raise
        raise refusal from None


def publish_run(session: Session, record: RunRecord) -> None:
    """Write the run's report, and show its summary and a link to it in the UI."""
    from gristmill.flows.report.page import write_report

    try:
        report = write_report(session, record)
        link = report_link(report)
        publish_card("gristmill-run", run_card(session, report, link), f"summary of {session.manifest.name}")
        if link is not None:
            from prefect.artifacts import create_link_artifact

            create_link_artifact(link, link_text=f"Report of {session.manifest.name}", key="gristmill-report",
                                 description=mask_text(str(report)))
    except Exception as error:  # noqa: BLE001 - a report that cannot be drawn must not fail the run that it is about
        log.warning("the report could not be finished: %s: %s", type(error).__name__, error)
