"""Running stages from the command line, shown on the terminal or as JSON lines."""

from __future__ import annotations

import logging
import sys
from typing import TextIO, cast

from gristmill.core.arrays import avoid_pandas
from gristmill.flows.prefect.tracked_run import run_tracked
from gristmill.flows.running import launch as running
from gristmill.flows.running.events import RunEnded, RunEvent, Subscriber
from gristmill.flows.running.json_lines import JsonHandler, JsonLines, JsonObserver
from gristmill.flows.running.recorded_run import RunRequest, run_recorded
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import (
    LastingStream,
    TerminalObserver,
    plain_console,
)


def launch(
    session: Session,
    stages: list[str],
    force: frozenset[str],
    tracked: bool,
    summarise: bool,
    json_lines: bool = False,
) -> int:
    """Run stages, show their progress, and return the exit code.

    Args:
        session: the opened manifest.
        stages: stages to run, in order.
        force: stages to rebuild.
        tracked: True to record the run in Prefect.
        summarise: True to print the run's summary at the end.
        json_lines: write JSON lines, and no summary.
    """
    avoid_pandas()
    run = run_tracked if tracked else run_recorded
    stdout = cast(TextIO, LastingStream(sys.stdout))
    if not json_lines:
        console = plain_console(stdout)
        subscribers: list[Subscriber] = [TerminalObserver(console, stages)]

        def print_at_end(event: RunEvent) -> None:
            if isinstance(event, RunEnded) and event.folder is not None:
                from gristmill.flows.report.terminal_summary import print_summary

                print_summary(session, event.folder, console)

        if summarise:
            subscribers.append(print_at_end)
        request = RunRequest(session, stages, force, subscribers)
        return running.launch(request, run)
    lines = JsonLines(stdout)
    handler = JsonHandler(lines)
    logger = logging.getLogger("gristmill")
    logger.addHandler(handler)
    try:
        request = RunRequest(session, stages, force, [JsonObserver(lines)])
        return running.launch(request, run)
    finally:
        logger.removeHandler(handler)
