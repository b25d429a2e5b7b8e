"""Drawing what the report will show of the documents while the stages after them work; light, as runs wait for it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from gristmill.flows.running.session import Session
from gristmill.mixtures.sources import INGEST

LATER_SECONDS = 0.2
"""Stages that can begin now do so before."""


def drawing_ahead(session: Session) -> Callable[[str], None]:
    """What is to be called with each stage that is made: once the documents are judged, it lets a thread draw what the
    report will show of them, while the stages after these work. What that needs is imported while earlier ones work.
    """
    left = {
        name
        for name, node in session.plan.items()
        if (node.stage.judges or name == INGEST) and session.committed(name) is None
    }
    if left:
        _later(partial(importlib.import_module, "gristmill.flows.orchestration.cards"))

    def draw() -> None:
        from gristmill.flows.report.page import draw_ahead

        draw_ahead(session)

    def made(stage: str) -> None:
        if stage in left:
            left.remove(stage)
            if not left:
                _later(draw)
            elif stage != INGEST:
                _later(partial(importlib.import_module, "matplotlib.figure"))

    return made


def _later(work: Callable[[], Any]) -> None:
    timer = threading.Timer(LATER_SECONDS, work)
    timer.daemon = True
    timer.start()
