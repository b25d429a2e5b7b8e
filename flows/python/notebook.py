"""Notebook display: a live table of a run, and whole pages in frames."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gristmill.core.progress import describe_metrics
from gristmill.core.secrets import mask_text
from gristmill.core.store import StageFolder
from gristmill.flows.pages.page_html import environment
from gristmill.flows.questions.status import duration
from gristmill.flows.running.process import Event
from gristmill.flows.running.run import Outcome
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


def framed(page: str, pixels: int = FRAME_PIXELS) -> str:
    """Embed an HTML page in a sandboxed frame of the given height: scripts do not run,
    and styles stay inside.
    """
    return str(_templates().frame(page, pixels)).strip()


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

    def stage_started(self, node: Node, resuming: bool, folder: StageFolder) -> None:
        """See Observer."""
        self._show(node, "resumes" if resuming else "runs")

    def stage_waits(self, node: Node, owner: Mapping[str, Any]) -> None:
        """See Observer."""
        self._show(
            node,
            "waits",
            f"process {owner['pid']} on {owner['host']} is making this output",
        )

    def stage_event(self, node: Node, event: Event) -> None:
        """See Observer."""
        if event["event"] == "warning":
            self._show(node, "runs", event["message"])
        if (
            event["event"] != "progress"
            or time.monotonic() - self._written < UPDATE_SECONDS
        ):
            return
        job = event.get("job") or ""
        count = f"{event['done']:g}/{event['total']:g} {event['unit']}"
        details = ", ".join(
            [
                f"{job}: {count}" if job not in ("", node.name) else count,
                *describe_metrics(event),
            ]
        )
        self._show(
            node, "runs", Bar(event["done"] / max(event["total"], 1e-9)), details
        )

    def stage_finished(self, node: Node, outcome: Outcome) -> None:
        """See Observer."""
        took = "" if outcome.how == "Cached" else duration(outcome.seconds)
        self._show(node, outcome.how.lower(), took, outcome.note)

    def stage_failed(self, node: Node, message: str) -> None:
        """See Observer."""
        self._show(
            node, "failed", message.splitlines()[0].removeprefix(f"{node.name}: ")
        )

    def stop_bar(self) -> None:
        """Mark stages that are still running as ended."""
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

    def _show(self, node: Node, state: str, *details: Any) -> None:
        with self._lock:
            cells = [
                mask_text(cell) if isinstance(cell, str) else cell for cell in details
            ]
            self._rows[node.name] = [node.name, state, *cells, *[""] * (2 - len(cells))]
            self._written = time.monotonic()
            self._handle.update(self)
