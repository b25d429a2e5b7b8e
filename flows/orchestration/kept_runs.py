"""The story of a run that no Prefect server watches, written down as it goes: a file per run, in Prefect's folder.

To start a server for a run takes longer than most runs, and nobody looks at it meanwhile. So such a run writes what it
would tell one, line by line: its tasks and their states with their times, their logs, their cards. The first server
that `gristmill up` or a run of gristmill meets is told all of it, also while the run still goes on (`tell_server.py`).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from gristmill.dataprep.secrets import mask_secrets, mask_text
from gristmill.flows.orchestration.parameters import run_name
from gristmill.flows.orchestration.server_settings import prefect_folder
from gristmill.flows.orchestration.stage_windows import WindowObserver, artifact_key
from gristmill.flows.report.report_links import report_link
from gristmill.flows.running.run import Observer, Outcome, RunStoppedError
from gristmill.flows.running.session import Session
from gristmill.flows.store.lease import identity
from gristmill.flows.store.runs import RunRecord

FOLDER = "gristmill-runs"
"""In Prefect's own."""
SUFFIX = ".jsonl"
MOST_KEPT = 100
"""The newest ones; a run says of older ones no more than it does itself."""
ENDS = {"completed": "COMPLETED", "failed": "FAILED", "interrupted": "CRASHED"}
"""How a run ended -> the type of Prefect's state."""
Line = dict[str, Any]
Made = TypeVar("Made")
log = logging.getLogger("gristmill.kept-runs")


@dataclass
class KeptRun:
    """Takes what is to be told of a run. One without a file takes nothing; nor does one whose disk is full."""

    sink: BinaryIO | None = None
    tasks: tuple[str, ...] = ()
    running: str | None = None
    """The task that began last: what a stage that is no task itself has to say belongs to it."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def begin(cls, flow: str, name: str, parameters: Mapping[str, Any], tasks: Mapping[str, Iterable[str]]) -> KeptRun:
        """Begin the story of a flow's run.

        Args:
            flow, name: of the flow, and of its run.
            parameters: of the flow.
            tasks: name -> those that it waits for, which stand before it.
        """
        kept = cls(tasks=tuple(tasks))
        try:
            kept.sink = _new_file(prefect_folder() / FOLDER)
        except OSError as error:  # the window may break; the run's record is in the store
            log.warning("this run is not shown in Prefect: %s", error)
        kept.write(
            {
                "flow": flow,
                "name": mask_text(name),
                "parameters": mask_secrets(dict(parameters)),
                "owner": identity(os.getpid()),
                "at": time.time(),
                "tasks": {task: list(needs) for task, needs in tasks.items()},
            }
        )
        return kept

    def write(self, line: Line) -> None:
        """Add a line; it is there whole or not at all to whoever reads the file meanwhile."""
        with self._lock:
            if self.sink is None:
                return
            try:
                self.sink.write(json.dumps(line).encode() + b"\n")
            except OSError as error:
                log.warning("this run is not shown in Prefect to its end: %s", error)
                self.sink = None

    def task(self, name: str, make: Callable[[], Made]) -> Made:
        """Do what a task does, and write down when it began and how it ended."""
        began, self.running = time.time(), name
        self._state(name, began, "RUNNING", "Running")
        try:
            made = make()
        except RunStoppedError as error:
            self._state(name, began, "CRASHED", "Crashed", str(error))
            raise
        except BaseException as error:
            self._state(name, began, "FAILED", "Failed", str(error))
            raise
        if isinstance(made, Outcome):
            self._state(name, began, "COMPLETED", made.how, made.note or str(made.folder.path))
        else:
            self._state(name, began, "COMPLETED", "Completed")
        return made

    def task_of(self, stage: str) -> str | None:
        """The task that a stage belongs to."""
        return stage if stage in self.tasks else self.running

    def card(self, key: str, markdown: str, description: str, task: str | None = None) -> None:
        """Show a card."""
        self.write({"card": mask_text(markdown), "key": key, "description": mask_text(description), "task": task})

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """End the story as what is done inside ends."""
        try:
            yield
        except BaseException as error:
            self.end("failed" if isinstance(error, Exception) else "interrupted", str(error))
            raise
        self.end("completed")

    def end(self, how: str, message: str = "") -> None:
        """End the story.

        Args:
            how: a key of ENDS.
            message: why, where it has one.
        """
        self.write({"end": ENDS[how], "message": mask_text(message), "at": time.time()})
        with self._lock:
            if self.sink is not None:
                self.sink.close()
                self.sink = None

    def _state(self, task: str, began: float, kind: str, name: str, message: str = "") -> None:
        self.write(
            {
                "task": task,
                "state": kind,
                "name": name,
                "message": mask_text(message),
                "began": began,
                "at": time.time(),
            }
        )


def _new_file(folder: Path) -> BinaryIO:
    """Open the file of a new run, and make room for it; names sort by age."""
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / f"{time.time_ns()}-{uuid.uuid4().hex[:8]}{SUFFIX}", "xb", buffering=0)  # noqa: SIM115
    for path in kept_files()[:-MOST_KEPT]:
        path.unlink(missing_ok=True)
    return file


def kept_files() -> list[Path]:
    """The files of all kept runs, oldest first."""
    folder = prefect_folder() / FOLDER
    return sorted(folder.glob(f"*{SUFFIX}")) if folder.exists() else []


def keep_run(session: Session, stages: list[str], force: frozenset[str]) -> KeptRun:
    """Begin the story of a run of stages, as the flows of `pipeline.py` would tell it."""
    shown = {
        "manifest": session.manifest_file,
        "overrides": list(session.overrides),
        "store": session.store_option or "",
    }
    tasks = {stage: [name for name in session.plan[stage].inputs if name in stages] for stage in stages}
    name = run_name(session.manifest_file, session.overrides)
    if len(stages) == 1 and list(session.plan) != stages:
        return KeptRun.begin(
            "gristmill-stage",
            f"{stages[0]} of {name}",
            {**shown, "stage": stages[0], "force": bool(force)},
            tasks,
        )
    return KeptRun.begin("gristmill", name, {**shown, "until": list(session.plan)[-1], "force": sorted(force)}, tasks)


def end_run(kept: KeptRun, session: Session, record: RunRecord, report: Path) -> None:
    """End the story of a run of stages with its card."""
    if kept.sink is None:
        return
    link, stages = report_link(report), record.content["stages"].values()
    try:
        if record.content["state"] == "completed" and all(stage.get("how", "Cached") == "Cached" for stage in stages):
            card = f"# {session.manifest.name}\n\nEverything was committed already; nothing was made.\n\n" + (
                f"[Open the report]({link}) (`{report}`)" if link else f"Report: `{report}`"
            )
        else:
            from gristmill.flows.orchestration.cards import run_card

            card = run_card(session, report, link)
        kept.card("gristmill-run", card, f"summary of {session.manifest.name}")
    except Exception as error:  # noqa: BLE001 - a card that cannot be drawn must not fail the run that it is about
        log.warning("the run's card could not be drawn: %s: %s", type(error).__name__, error)
    kept.end(record.content["state"], record.content["message"])


class KeptObserver(WindowObserver):
    """Writes down what stages would show in Prefect, and passes everything on to the caller's display."""

    def __init__(self, kept: KeptRun, inner: Observer) -> None:
        super().__init__(inner)
        self._kept = kept

    def show_line(self, stage: str, line: str, level: int = logging.INFO) -> None:
        """See WindowObserver."""
        self._kept.write({"log": mask_text(line), "level": level, "task": self._kept.task_of(stage), "at": time.time()})

    def show_progress(self, stage: str, percent: float, description: str) -> None:
        """Nothing: lines of the log tell it."""

    def show_curve(self, stage: str, described: str, curve: Callable[[], list[tuple[float, float]]]) -> None:
        """Nothing: it is drawn when it is whole."""

    def show_outcome(self, outcome: Outcome) -> None:
        """See WindowObserver."""
        if outcome.how != "Cached" and self._kept.sink is not None:
            from gristmill.flows.orchestration.cards import stage_card

            self._kept.card(
                artifact_key(f"{outcome.stage}-card"),
                stage_card(outcome),
                outcome.stage,
                self._kept.task_of(outcome.stage),
            )
