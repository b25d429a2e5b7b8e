"""Drawing the report's pictures while later stages work, so that no run waits for them
at its end.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from gristmill.flows.running.events import RunEvent, StageFinished, Subscriber
from gristmill.flows.running.session import Session
from gristmill.mixtures.schema.sources import INGEST

DELAY_SECONDS = 0.2
"""Stages that are ready start before."""


def prerenderer(session: Session) -> Subscriber:
    """Subscriber to a run's events. Once all documents are judged, it draws their
    part of the report on a thread.

    The libraries for it are imported while earlier stages work.
    """
    remaining = {
        name
        for name, node in session.plan.items()
        if (node.stage.step or name == INGEST) and session.committed(name) is None
    }
    if remaining:
        _start_later(partial(importlib.import_module, "gristmill.flows.report.report"))

    def prerender() -> None:
        from gristmill.flows.report.report import prerender_report

        prerender_report(session)

    def note(event: RunEvent) -> None:
        if not isinstance(event, StageFinished) or event.node.name not in remaining:
            return
        stage = event.node.name
        remaining.remove(stage)
        if not remaining:
            _start_later(prerender)
        elif stage != INGEST:
            _start_later(partial(importlib.import_module, "matplotlib.figure"))

    return note


def _start_later(work: Callable[[], Any]) -> None:
    timer = threading.Timer(DELAY_SECONDS, work)
    timer.daemon = True
    timer.start()
