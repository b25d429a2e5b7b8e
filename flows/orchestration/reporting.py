"""Reporting of runs to the Prefect UI: log lines, progress artifacts, cards per stage,
and the run's summary.

One thread sends everything from a bounded queue: a slow or absent server can neither
delay nor fail a stage.
"""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

from gristmill.core.secrets import mask_text
from gristmill.flows.orchestration.cards import live_card, run_card, stage_card
from gristmill.flows.orchestration.parameters import (
    RefusedError,
    SecretParameterError,
    without_secrets,
)
from gristmill.flows.orchestration.prefect_progress import WindowObserver, artifact_key
from gristmill.flows.report.report_server import report_link
from gristmill.flows.running.events import Outcome, RunEvent, RunRecorded
from gristmill.flows.running.session import Session

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

QUEUE_LENGTH = 1000
CLOSE_SECONDS = 15.0
ENGINE_LOGGERS = ("prefect.flow_runs", "prefect.engine")
"""Loggers of Prefect's engine for the end of a flow (3.8)."""
log = logging.getLogger("gristmill.reporting")


class PrefectObserver(WindowObserver):
    """Shows stages in the Prefect UI."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.Queue[
            tuple[contextvars.Context, Callable[[], None]] | None
        ] = queue.Queue(QUEUE_LENGTH)
        self._artifacts: dict[str, UUID] = {}
        self._has_warned = False
        self._thread = threading.Thread(target=self._send_queued, daemon=True)
        self._thread.start()

    def show_line(self, stage: str, line: str, level: int = logging.INFO) -> None:
        """See WindowObserver."""

        def send() -> None:
            from prefect.logging import get_run_logger

            get_run_logger().log(level, mask_text(line))

        self._send(stage, send)

    def show_progress(self, stage: str, percent: float, description: str) -> None:
        """See WindowObserver."""
        self._send(stage, lambda: self._send_progress(stage, percent, description))

    def show_curve(
        self,
        stage: str,
        description: str,
        curve: Callable[[], list[tuple[float, float]]],
    ) -> None:
        """See WindowObserver."""

        def send() -> None:
            card = live_card(stage, description, curve())
            publish_card(artifact_key(f"{stage}-card"), card, f"{stage}, while it runs")

        self._send(stage, send)

    def show_outcome(self, outcome: Outcome) -> None:
        """See WindowObserver."""
        stage = outcome.stage
        self._send(
            stage,
            lambda: publish_card(
                artifact_key(f"{stage}-card"), stage_card(outcome), stage
            ),
        )

    def __call__(self, event: RunEvent) -> None:
        """Show an event; after the last stage, send what remains."""
        super().__call__(event)
        if isinstance(event, RunRecorded):
            self.close()

    def close(self) -> None:
        """Send the remaining items, for a bounded time."""
        try:
            self._queue.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _send(self, stage: str, action: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait((self._window(stage).context, action))
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


def publish_card(key: str, markdown: str, description: str | None = None) -> None:
    """Create a markdown artifact of the current run."""
    from prefect.artifacts import create_markdown_artifact

    create_markdown_artifact(mask_text(markdown), key=key, description=description)


@contextmanager
def publishing_refusal(manifest: str) -> Iterator[None]:
    """Show all problems of a manifest or of parameters in the run: Prefect's state
    names the first lines only.

    Raises:
        RefusedError: the manifest or a parameter is invalid. Its message is complete,
            so the flow ends without a traceback.
        Exception: any other error, without credentials.
    """
    try:
        yield
    except Exception as error:
        refusal = without_secrets(error)
        if isinstance(error, _user_errors()):
            refusal = RefusedError(str(refusal))
        try:
            card = (
                f"# Refused: {manifest}\n\n```text\n{refusal}\n```\n\nNothing was run."
            )
            publish_card("refused", card, "problems of the manifest and the parameters")
        except Exception as publish_error:  # noqa: BLE001 - the refusal is raised anyway
            log.warning("Prefect did not take an update: %s", publish_error)
        if refusal is error:
            raise
        raise refusal from None


def failed(refusal: RefusedError) -> State:
    """State of a rejected flow.

    Prefect's engine raises the state again after the flow has ended, and logs it with
    its own useless traceback: these two records are filtered out.
    """
    from prefect.states import Failed

    for name in ENGINE_LOGGERS:
        logging.getLogger(name).addFilter(_is_not_of_failed_run)
    return Failed(message=str(refusal))


def _is_not_of_failed_run(record: logging.LogRecord) -> bool:
    from prefect.exceptions import FailedRun

    return not (record.exc_info and isinstance(record.exc_info[1], FailedRun))


def _user_errors() -> tuple[type[Exception], ...]:
    """Errors in opening a manifest that the user can fix, as on the command line."""
    from gristmill.core.store import StoreLocationError
    from gristmill.dataprep.reading.sources import SourceError
    from gristmill.flows.stages.plan import UnknownStageError
    from gristmill.flows.sweeps.grid import SweepError
    from gristmill.mixtures.load import ManifestError

    return (
        ManifestError,
        SourceError,
        UnknownStageError,
        StoreLocationError,
        SweepError,
        SecretParameterError,
        FileNotFoundError,
    )


def publish_run(session: Session, event: RunEvent) -> None:
    """Publish the summary of a recorded run, and a link to its report, in the UI."""
    if not isinstance(event, RunRecorded) or event.report is None:
        return
    try:
        link = report_link(event.report)
        publish_card(
            "gristmill-run",
            run_card(session, event.report, link),
            f"summary of {session.manifest.name}",
        )
        if link is not None:
            from prefect.artifacts import create_link_artifact

            create_link_artifact(
                link,
                link_text=f"Report of {session.manifest.name}",
                key="gristmill-report",
                description=mask_text(str(event.report)),
            )
    except Exception as error:  # noqa: BLE001 - an error of the display does not affect the work
        log.warning(
            "the run's card could not be published: %s: %s", type(error).__name__, error
        )
