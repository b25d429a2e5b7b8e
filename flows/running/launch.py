"""Running stages from a terminal: with or without the Prefect flow, with the same
display and record.
"""

from __future__ import annotations

import errno
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TextIO, cast

from rich.console import Console
from rich.text import Text

from gristmill.core import object_stores
from gristmill.core.files import as_path, is_local
from gristmill.core.lease import LeaseLostError
from gristmill.core.object_stores import until_interrupted
from gristmill.core.secrets import mask_secrets, mask_text
from gristmill.flows.orchestration.choose_prefect import (
    apply_default_settings,
    choose_tracking,
)
from gristmill.flows.report.prerender import prerenderer
from gristmill.flows.running.check_endpoints import unreachable_models
from gristmill.flows.running.fork_server import ForkServer
from gristmill.flows.running.missing_libraries import is_installed
from gristmill.flows.running.notify import notify
from gristmill.flows.running.observers import (
    JsonHandler,
    JsonLines,
    JsonObserver,
    Observers,
)
from gristmill.flows.running.run import Observer, StageFailedError
from gristmill.flows.running.run_records import RunRecord
from gristmill.flows.running.schedule import jobs_of, run_in_threads
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import (
    LastingStream,
    TerminalObserver,
    plain_console,
)

STORE_ADVICE = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR),
        "Make it writable, or name another place with --store or GRISTMILL_STORE",
    ),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Free some space there"),
}
"""Advice for system errors, by number."""
SHOWN_NAMES = 3
"""Unwritten files named in a message."""
LINE_CHARS = 10_000
"""Width of the console for JSON lines: sentences are not wrapped."""
EXIT_DONE, EXIT_STAGE_FAILED, EXIT_INTERRUPTED = 0, 1, 130


class Display(Observer, Protocol):
    """An observer with progress bars, on a terminal or in a notebook."""

    def stop_bar(self) -> None:
        """Remove the bars."""


def launch(
    session: Session,
    stages: list[str],
    force: frozenset[str],
    tracked: bool,
    summarise: bool,
    json_lines: bool = False,
) -> int:
    """Run stages, print their progress, and return the exit code.

    Args:
        session: the opened manifest.
        stages: stages to run, in order.
        force: stages to rebuild.
        tracked: True to record the run in Prefect.
        summarise: True to print the run's summary at the end.
        json_lines: write JSON lines, and no summary.
    """
    if json_lines:
        return launch_with_json_lines(session, stages, force, tracked)
    console = plain_console(cast(TextIO, LastingStream(sys.stdout)))
    message = ""
    exit_code = EXIT_DONE
    try:
        run = run_stages(
            session, stages, force, tracked, TerminalObserver(console, stages), console
        )
    except (StageFailedError, LeaseLostError) as error:
        message = str(error)
        exit_code = EXIT_STAGE_FAILED
    except KeyboardInterrupt as interrupted:
        message = (
            str(interrupted) or f"interrupted; resume with: {session.command('run')}"
        )
        exit_code = EXIT_INTERRUPTED
    if exit_code != EXIT_DONE:
        plain_console(stderr=True).print(Text(message, style="red"), soft_wrap=True)
        return exit_code
    if summarise:
        from gristmill.flows.report.terminal_summary import print_summary

        print_summary(session, run, console)
    return EXIT_DONE


def launch_with_json_lines(
    session: Session, stages: list[str], force: frozenset[str], tracked: bool
) -> int:
    """Run stages, write all events as JSON lines, and return the exit code; see
    `launch`.
    """
    lines = JsonLines(cast(TextIO, LastingStream(sys.stdout)))
    console = plain_console(cast(TextIO, lines))
    console.width = LINE_CHARS
    handler = JsonHandler(lines)
    logger = logging.getLogger("gristmill")
    logger.addHandler(handler)
    lines.log(
        "run_started",
        manifest=session.manifest_file,
        name=session.manifest.name,
        stages=stages,
    )
    try:
        folder = run_stages(
            session, stages, force, tracked, JsonObserver(lines), console
        )
    except (StageFailedError, LeaseLostError) as error:
        lines.log("run_finished", "error", state="failed", message=str(error))
        return EXIT_STAGE_FAILED
    except KeyboardInterrupt as interrupted:
        message = (
            str(interrupted) or f"interrupted; resume with: {session.command('run')}"
        )
        lines.log("run_finished", "warning", state="interrupted", message=message)
        return EXIT_INTERRUPTED
    finally:
        logger.removeHandler(handler)
    lines.log("run_finished", state="completed", run=folder.name, folder=str(folder))
    return EXIT_DONE


def run_stages(
    session: Session,
    stages: list[str],
    force: frozenset[str],
    tracked: bool,
    observer: Display,
    console: Console,
) -> Path:
    """Run stages and return the run's folder; an interrupt first ends them so that they
    can resume.

    Args:
        session, stages, force, tracked: see `launch`.
        observer: display of their progress.
        console: output for the address of Prefect's UI.

    Raises:
        StageFailedError: a stage failed, a model cannot be called, or the store cannot
            be used.
        LeaseLostError: another run took over a stage while this one was paused.
    """
    session.forget_kept(force)
    unreachable = unreachable_models(session, stages, force)
    if unreachable:
        raise StageFailedError("\n".join([*unreachable, "nothing was run"]))
    previous_handlers = {}
    # Only the main thread receives signals; elsewhere the caller handles them.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # A shell makes background processes ignore Ctrl-C.
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous_handlers[number] = signal.signal(number, interrupt)
    unwritten: list[str] = []
    try:
        with (
            until_interrupted() as unwritten,
            session.stage_server(stages, force) as server,
        ):
            # The server imports the stages' modules while Prefect is imported here.
            if tracked:
                return _run_tracked(session, stages, force, observer, console, server)
            return run_untracked(session, stages, force, observer, server).folder
    except (Exception, KeyboardInterrupt) as error:
        if unwritten:
            raise KeyboardInterrupt(what_is_not_written(unwritten, session)) from error
        if isinstance(error, StageFailedError | LeaseLostError | KeyboardInterrupt):
            raise
        # Object store libraries raise errors of their own if the store is unreachable.
        if is_local(session.store.root) and not isinstance(error, OSError):
            raise
        raise StageFailedError(why_the_store_failed(error, session)) from error
    finally:
        observer.stop_bar()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def what_is_not_written(urls: Sequence[str], session: Session) -> str:
    """Message about a run that was interrupted while its store was unreachable.

    Args:
        urls: URLs of the files that were not written.
        session: session of the run.
    """
    root = str(session.store.root).partition("://")[2]
    names = list(dict.fromkeys(url.partition(f"{root}/")[2] or url for url in urls))
    more = len(names) - SHOWN_NAMES
    names_text = ", ".join(names[:SHOWN_NAMES]) + (
        f" and {more} more" if more > 0 else ""
    )
    return mask_text(
        f"interrupted while the store {session.store.root} could not be reached; not "
        f"written: {names_text}. Committed outputs stay; other hosts can take over "
        "unfinished stages after 90 s, this one at once. Once the store answers, "
        f"resume with: {session.command('run')}"
    )


def why_the_store_failed(error: Exception, session: Session) -> str:
    """Message about a store that cannot be read or written: the stage's own error if
    there is one.

    A full disk fails the stage first; then the end of its lease and the run's record
    fail too.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, StageFailedError):
        cause = cause.__context__
    if cause is not None:
        return str(cause)
    number = 0
    reason = str(error)
    if isinstance(error, OSError):
        number = error.errno or 0
        if error.strerror:
            reason = error.strerror.lower()
            if error.filename:
                reason += f": {error.filename}"
    advice = STORE_ADVICE.get(number, "Make sure that it can be reached")
    if number in (errno.ENOSPC, errno.EDQUOT):
        advice += f" ({session.gc_command} lists deletable outputs)"
    return mask_text(
        f"the store {session.store.root} cannot be used: {reason}; committed outputs "
        f"stay. {advice}, then resume with: {session.command('run')}"
    )


def run_untracked(
    session: Session,
    stages: list[str],
    force: frozenset[str],
    observer: Display,
    server: ForkServer | None = None,
) -> RunRecord:
    """Run stages without Prefect, and return the run's record."""
    record = session.start_record()
    prerender = prerenderer(session)
    runner = session.runner(Observers(record, observer), server)
    try:
        with record.until_end():
            run_in_threads(
                jobs_of(session.plan, stages, runner.engine),
                runner.engine.workers,
                lambda stage, workers: runner.run_stage(stage, stage in force, workers),
                lambda stage, outcome: prerender(stage),
                runner.processes.stop,
            )
    finally:
        from gristmill.flows.report.run_report import write_report

        notify(session, record, write_report(session, record))
    return record


def _run_tracked(
    session: Session,
    stages: list[str],
    force: frozenset[str],
    observer: Display,
    console: Console,
    server: ForkServer | None,
) -> Path:
    """Run stages in Prefect's flow if a Prefect server is running, and return the run's
    folder.
    """
    if not is_installed("prefect"):  # the extra `ui`
        return run_untracked(session, stages, force, observer, server).folder
    apply_default_settings(quiet_console=True)
    is_shown, sentence = choose_tracking()
    console.print(Text(sentence, style="dim"))
    if not is_shown:
        return run_untracked(session, stages, force, observer, server).folder
    from gristmill.flows.orchestration.flow_liveness import (
        mark_crashed_quietly,
        show_cancelled,
    )
    from gristmill.flows.pipeline import (
        gristmill,
        gristmill_stage,
        observer_of_caller,
        server_of_caller,
        session_of_caller,
    )

    mark_crashed_quietly()
    observer_token = observer_of_caller.set(observer)
    session_token = session_of_caller.set(session)
    server_token = server_of_caller.set(server)
    # Prefect shows these parameters to every user of the server; the flow itself uses
    # the session.
    parameters: dict[str, Any] = mask_secrets(
        {"overrides": session.overrides, "store": session.store_option or ""}
    )
    parameters["overrides"] = tuple(parameters["overrides"])
    try:
        if len(stages) == 1 and list(session.plan) != stages:
            folder = gristmill_stage(
                manifest=session.manifest_file,
                stage=stages[0],
                force=bool(force),
                **parameters,
            )
        else:
            folder = gristmill(
                manifest=session.manifest_file,
                until=list(session.plan)[-1],
                force=tuple(sorted(force)),
                **parameters,
            )
        return as_path(cast(str, folder))
    finally:
        observer_of_caller.reset(observer_token)
        session_of_caller.reset(session_token)
        server_of_caller.reset(server_token)
        show_cancelled()


def interrupt(number: int, frame: FrameType | None) -> None:
    """Signal handler that ends the run on SIGTERM as on Ctrl-C: the stages' process
    groups are stopped, and the run is recorded as interrupted.

    From then on, an unreachable store is retried only for a few seconds.
    """
    object_stores.interrupt()
    sys.stderr.flush()
    raise KeyboardInterrupt
