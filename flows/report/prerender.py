"""Reading what the report shows while later stages work, so that no run waits for it at
its end.
"""

from __future__ import annotations

import threading

from gristmill.flows.running.events import RunEvent, StageFinished, Subscriber
from gristmill.flows.running.session import Session
from gristmill.mixtures.schema.sources import INGEST

DELAY_SECONDS = 0.2
"""Stages that are ready start before."""


def prerenderer(session: Session) -> Subscriber:
    """Subscriber to a run's events. Once all documents are judged, it renders their
    part of the report on a thread.
    """
    remaining = {
        name
        for name, node in session.plan.items()
        if (node.stage.step or name == INGEST) and session.committed(name) is None
    }

    def prerender() -> None:
        from gristmill.flows.report.report import prerender_report

        prerender_report(session)

    def note(event: RunEvent) -> None:
        if isinstance(event, StageFinished) and event.node.name in remaining:
            remaining.remove(event.node.name)
            if not remaining:
                timer = threading.Timer(DELAY_SECONDS, prerender)
                timer.daemon = True
                timer.start()

    return note
