"""Notebook display: a live table of a run, and whole pages in frames."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gristmill.core.progress import describe_metrics
from gristmill.core.secrets import mask_text
from gristmill.flows.pages.page_html import environment
from gristmill.flows.questions.status import duration
from gristmill.flows.running.events import (
    RunEvent,
    RunRecorded,
    StageFailed,
    StageFinished,
    StageProgress,
    StageStarted,
    StageWaits,
    StageWarning,
)
from gristmill.flows.stages.plan import Node

UPDATE_SECONDS = 0.5
FRAME_PIXELS = 640


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook, which shows HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def html_table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Render a table in the colours of the surrounding page; every value is escaped."""
    return str(_templates().table(list(header), [list(row) for row in rows])).strip()


def framed(page: str) -> str:
    """Embed an HTML page in a sandboxed frame of FRAME_PIXELS height: scripts do not run,
    and styles stay inside.
    """
    return str(_templates().frame(page, FRAME_PIXELS)).strip()


@cache
def _templates() -> Any:
    return (
        environment(Path(__file__).parent / "templates")
        .get_template("notebook.html.jinja")
        .module
    )


@dataclass(frozen=True)
class Bar:
    """A progress bar, from 0 to 1."""

    done: float


class NotebookObserver:
    """Displays a run as one live table: a row per stage, a progress bar for running
    ones.
    """

    def __init__(self) -> None:
        from IPython.display import display

        self._lock = threading.Lock()
        self._rows: dict[str, list[Any]] = {}
        self._written = 0.0
        self._handle = display(self, display_id=True)

    def _repr_html_(self) -> str:
        return html_table(("stage", "", "", ""), self._rows.values())

    def __repr__(self) -> str:
        return "\n".join(
            "  ".join(str(cell) for cell in row if not isinstance(cell, Bar)).rstrip()
            for row in self._rows.values()
        )

    def __call__(self, event: RunEvent) -> None:
        """Show an event."""
        match event:
            case RunRecorded():
                with self._lock:
                    ended = [
                        name
                        for name, row in self._rows.items()
                        if row[1] in ("runs", "resumes", "waits")
                    ]
                    for name in ended:
                        self._rows[name] = [name, "ended", "", ""]
                if ended:
                    self._handle.update(self)
            case StageStarted(node=node):
                self._show(node, "resumes" if event.resuming else "runs")
            case StageWaits(node=node):
                maker = f"process {event.pid} on {event.host}"
                self._show(node, "waits", f"{maker} is making this output")
            case StageWarning(node=node):
                self._show(node, "runs", event.message)
            case StageProgress(node=node):
                if time.monotonic() - self._written >= UPDATE_SECONDS:
                    count = f"{event.done:g}/{event.total:g} {event.unit}"
                    if event.job not in ("", node.name):
                        count = f"{event.job}: {count}"
                    details = ", ".join([count, *describe_metrics(vars(event))])
                    bar = Bar(event.done / max(event.total, 1e-9))
                    self._show(node, "runs", bar, details)
            case StageFinished(node=node, outcome=outcome):
                took = "" if outcome.how == "Cached" else duration(outcome.seconds)
                self._show(node, outcome.how.lower(), took, outcome.note)
            case StageFailed(node=node):
                reason = event.message.splitlines()[0].removeprefix(f"{node.name}: ")
                self._show(node, "failed", reason)

    def _show(self, node: Node, state: str, *details: Any) -> None:
        with self._lock:
            cells = [
                mask_text(cell) if isinstance(cell, str) else cell for cell in details
            ]
            self._rows[node.name] = [node.name, state, *cells, *[""] * (2 - len(cells))]
            self._written = time.monotonic()
            self._handle.update(self)
