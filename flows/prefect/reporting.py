"""Cards of runs in the Prefect UI: rejected manifests, and the run's summary."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from gristmill.core.secrets import mask_text
from gristmill.flows.pages.markdown import markdown_page
from gristmill.flows.prefect.parameters import (
    RefusedError,
    without_secrets,
)
from gristmill.flows.report.report import render_report
from gristmill.flows.report.server import report_link
from gristmill.flows.running.events import RunEvent, RunRecorded
from gristmill.flows.running.session import Session

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

ENGINE_LOGGERS = ("prefect.flow_runs", "prefect.engine")
"""Loggers of Prefect's engine for the end of a flow (3.8)."""
log = logging.getLogger("gristmill.reporting")


def publish_card(key: str, markdown: str, description: str) -> None:
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
        is_ours = type(error).__module__.startswith("gristmill.")
        if is_ours or isinstance(error, FileNotFoundError):  # as on the command line
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
        # a logger keeps the same function only once
        logging.getLogger(name).addFilter(_is_not_of_failed_run)
    return Failed(message=str(refusal))


def _is_not_of_failed_run(record: logging.LogRecord) -> bool:
    from prefect.exceptions import FailedRun

    return not (record.exc_info and isinstance(record.exc_info[1], FailedRun))


def publish_run(session: Session, event: RunEvent) -> None:
    """Publish the report of a recorded run, and a link to its page, in the UI."""
    if not isinstance(event, RunRecorded) or event.report is None:
        return
    try:
        link = report_link(event.report)
        card = render_report(session, None, partial(markdown_page, has_pictures=True))
        place = f"`{event.report}`"
        if link is not None:
            place = f"[Open the report]({link}) ({place})"
        name = session.manifest.name
        publish_card("gristmill-run", f"{place}\n\n{card}", f"report of {name}")
        if link is not None:
            from prefect.artifacts import create_link_artifact

            create_link_artifact(
                link,
                link_text=f"Report of {name}",
                key="gristmill-report",
                description=mask_text(str(event.report)),
            )
    except Exception as error:  # noqa: BLE001 - an error of the display does not affect the work
        log.warning(
            "the run's card could not be published: %s: %s", type(error).__name__, error
        )
