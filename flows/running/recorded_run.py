"""A run of stages, in parallel as far as workers allow, with its record, report and
notification.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from gristmill.flows.running.events import RunRecorded, Subscriber, to_all
from gristmill.flows.running.notify import notify
from gristmill.flows.running.run import Runner
from gristmill.flows.running.scheduler import Pending, jobs_of, run_jobs
from gristmill.flows.running.session import Session
from gristmill.flows.running.stage_server import StageServer

Start = Callable[[Runner, str, int], Pending]
"""(runner, stage, workers) -> the future of the started stage."""
DELAY_SECONDS = 0.2
"""Stages that are ready start before the report is imported."""
log = logging.getLogger("gristmill.report")


@dataclass(frozen=True)
class RunRequest:
    """Stages to run.

    Attributes:
        session: the opened manifest.
        stages: in order.
        force: stages to rebuild.
        subscribers: receive the run's events, after the record.
        server: fork server of the stages.
    """

    session: Session
    stages: list[str]
    force: frozenset[str]
    subscribers: Sequence[Subscriber]
    server: StageServer | None = None


def run_recorded(request: RunRequest, start: Start | None = None) -> Path:
    """Run stages, and return the folder of the run's record.

    Args:
        start: starts a stage; in a thread by default.
    """
    session, force = request.session, request.force
    record = session.start_record()
    lineage: list[Subscriber] = []
    if session.manifest.engine.lineage:
        from gristmill.flows.running.lineage import LineageSender

        lineage = [LineageSender(session, record.content)]
    emit = to_all(record.note, *request.subscribers, *lineage)
    import_ahead = threading.Timer(DELAY_SECONDS, import_report)
    if session.unfinished(request.stages, force):
        import_ahead.start()
    runner = Runner(session, emit, request.server)
    num_workers = runner.engine.workers
    try:
        with (
            record.until_end(),
            ThreadPoolExecutor(num_workers + 1, thread_name_prefix="stage") as pool,
        ):

            def start_in_thread(stage: str, workers: int) -> Pending:
                if start is not None:
                    return start(runner, stage, workers)
                return pool.submit(runner.run_stage, stage, stage in force, workers)

            run_jobs(
                jobs_of(session.plan, request.stages, runner.engine),
                num_workers,
                start_in_thread,
                runner.processes.stop,
            )
    finally:
        import_ahead.cancel()
        report = None
        try:
            from gristmill.flows.report.report import write_report

            report = write_report(session, record)
        except Exception as error:  # noqa: BLE001 - a failed report must not fail its run
            kind = type(error).__name__
            log.warning("the report could not be finished: %s: %s", kind, error)
        emit(RunRecorded(record.folder, report))
        notify(session, record)
    return record.folder


def import_report() -> None:
    """Import what the report needs, while stages work."""
    import_module("gristmill.flows.report.report")
