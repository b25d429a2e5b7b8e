"""What the Prefect UI shows of a run: log lines, a progress artifact per stage, a card per stage, the run's summary.

Everything is sent by one thread of its own, from a bounded queue: a slow or absent server can neither hold up nor
fail a stage.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from gristmill.flows.cards import run_card, stage_card
from gristmill.flows.process import Event
from gristmill.flows.run import Observer, Outcome
from gristmill.flows.runs import RunRecord
from gristmill.flows.session import Session
from gristmill.flows.stages import Node

QUEUE_LENGTH = 1000
PROGRESS_SECONDS = 5.0
CLOSE_SECONDS = 15.0
log = logging.getLogger("gristmill.reporting")


class PrefectObserver:
    """Shows stages in the Prefect UI, and passes everything on to the caller's display."""

    def __init__(self, inner: Observer | None = None) -> None:
        self._inner = inner
        self._queue: queue.Queue[tuple[contextvars.Context, Callable[[], None]] | None] = queue.Queue(QUEUE_LENGTH)
        self._progress: dict[str, Any] = {}
        self._sent: dict[str, float] = {}
        self._failed = False
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def stage_started(self, node: Node, resuming: bool) -> None:
        """See Observer."""
        self._context = contextvars.copy_context()
        if self._inner is not None:
            self._inner.stage_started(node, resuming)
        self._say(f"{node.name}: {'goes on where it stopped' if resuming else 'starts'} ({node.fingerprint[:16]})")

    def stage_waits(self, node: Node, owner: Mapping[str, Any]) -> None:
        """See Observer."""
        if self._inner is not None:
            self._inner.stage_waits(node, owner)
        self._say(f"{node.name}: waits for process {owner['pid']} on {owner['host']}, which makes the same output")

    def stage_event(self, node: Node, event: Event) -> None:
        """See Observer."""
        if self._inner is not None:
            self._inner.stage_event(node, event)
        if event["event"] == "warning":
            self._say(f"{node.name}: {event['message']}", logging.WARNING)
        if event["event"] == "progress":
            now, finished = time.monotonic(), event["done"] >= event["total"]
            if finished or now - self._sent.get(node.name, 0.0) >= PROGRESS_SECONDS:
                self._sent[node.name] = now
                self._send(lambda: self._show_progress(node.name, event))

    def stage_finished(self, node: Node, outcome: Outcome) -> None:
        """See Observer."""
        self._context = contextvars.copy_context()
        if self._inner is not None:
            self._inner.stage_finished(node, outcome)
        note = f" ({outcome.note})" if outcome.note else ""
        self._say(f"{node.name}: {outcome.how} in {outcome.seconds:.1f} s{note}: {outcome.folder.path}")
        self._send(lambda: publish_card(f"{node.name}-card", stage_card(outcome)))

    def close(self) -> None:
        """Send what is left, for a bounded time."""
        try:
            self._queue.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _say(self, line: str, level: int = logging.INFO) -> None:
        def send() -> None:
            from prefect.logging import get_run_logger

            get_run_logger().log(level, line)

        self._send(send)

    def _send(self, action: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait((self._context, action))
        except queue.Full:
            self._complain("the queue to Prefect is full: some lines are not shown there")

    def _show_progress(self, stage: str, event: Event) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        percent = 100.0 * event["done"] / max(event["total"], 1)
        description = f"{event['done']:g} of {event['total']:g} {event['unit']}"
        if stage not in self._progress:
            self._progress[stage] = create_progress_artifact(
                percent, key=f"{stage}-progress", description=f"{stage}: {description}")
            return
        update_progress_artifact(self._progress[stage], percent, description=f"{stage}: {description}")

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            context, action = item
            try:
                context.run(action)
            except Exception as error:  # noqa: BLE001 - the window may break; the work goes on
                self._complain(f"Prefect did not take an update: {error}")

    def _complain(self, message: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("%s (the run goes on; its record is in the store)", message)


def publish_card(key: str, markdown: str) -> None:
    """Create a markdown artifact of the current run."""
    from prefect.artifacts import create_markdown_artifact

    create_markdown_artifact(markdown, key=key)


def publish_run(session: Session, record: RunRecord) -> None:
    """Write the run's report, and show its summary in the UI."""
    from gristmill.flows.report import write_report

    try:
        report = write_report(session, record)
        publish_card("gristmill-run", run_card(session, report))
    except Exception as error:  # noqa: BLE001 - a report that cannot be drawn must not fail the run that it is about
        log.warning("the report could not be finished: %s: %s", type(error).__name__, error)
