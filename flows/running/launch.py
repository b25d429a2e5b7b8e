"""Running stages until they end, fail or are interrupted."""

from __future__ import annotations

import errno
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from gristmill.core import object_stores
from gristmill.core.files import is_local
from gristmill.core.lease import LeaseLostError
from gristmill.core.object_stores import until_interrupted
from gristmill.core.secrets import mask_text
from gristmill.flows.running.check_endpoints import unreachable_models
from gristmill.flows.running.events import RunEnded, RunStarted, to_all
from gristmill.flows.running.recorded_run import RunRequest, run_recorded
from gristmill.flows.running.run import StageFailedError
from gristmill.flows.running.session import Session
from gristmill.mixtures.yaml_text import join_first

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
EXIT_DONE, EXIT_STAGE_FAILED, EXIT_INTERRUPTED = 0, 1, 130
Run = Callable[[RunRequest], Path]
"""Function that runs stages, like `run_recorded`."""


def launch(request: RunRequest, run: Run = run_recorded) -> int:
    """Run stages, publish the end, and return the exit code; see `run_stages`."""
    session, emit = request.session, to_all(*request.subscribers)
    name, stages = session.manifest.name, tuple(request.stages)
    emit(RunStarted(session.manifest_file, name, stages))
    try:
        folder = run_stages(request, run)
    except (StageFailedError, LeaseLostError) as error:
        emit(RunEnded("failed", str(error)))
        return EXIT_STAGE_FAILED
    except KeyboardInterrupt as interrupted:
        message = f"interrupted; resume with: {session.resume_command}"
        emit(RunEnded("interrupted", str(interrupted) or message))
        return EXIT_INTERRUPTED
    emit(RunEnded("completed", folder=folder))
    return EXIT_DONE


def run_stages(request: RunRequest, run: Run = run_recorded) -> Path:
    """Run stages and return the run's folder; an interrupt first ends them so that they
    can resume.

    Args:
        run: runs the stages, once their server has started.

    Raises:
        StageFailedError: a stage failed, a model cannot be called, or the store cannot
            be used.
        LeaseLostError: another run took over a stage while this one was paused.
    """
    session, stages, force = request.session, request.stages, request.force
    session.forget_kept(force)
    unreachable = unreachable_models(session, stages, force)
    if unreachable:
        raise StageFailedError("\n".join([*unreachable, "nothing was run"]))
    unwritten: list[str] = []
    try:
        with (
            interruptible(),
            until_interrupted() as unwritten,
            session.stage_server(stages, force) as server,
        ):
            return run(replace(request, server=server))
    except (Exception, KeyboardInterrupt) as error:
        if unwritten:
            raise KeyboardInterrupt(what_is_not_written(unwritten, session)) from error
        if isinstance(error, StageFailedError | LeaseLostError | KeyboardInterrupt):
            raise
        # Object store libraries raise errors of their own if the store is unreachable.
        if is_local(session.store.root) and not isinstance(error, OSError):
            raise
        raise StageFailedError(why_the_store_failed(error, session)) from error


def what_is_not_written(urls: Sequence[str], session: Session) -> str:
    """Message about a run that was interrupted while its store was unreachable.

    Args:
        urls: URLs of the files that were not written.
        session: session of the run.
    """
    root = str(session.store.root).partition("://")[2]
    names = list(dict.fromkeys(url.partition(f"{root}/")[2] or url for url in urls))
    return mask_text(
        f"interrupted while the store {session.store.root} could not be reached; not "
        f"written: {join_first(names, SHOWN_NAMES)}. Committed outputs stay; other "
        "hosts can take over unfinished stages after 90 s, this one at once. Once the "
        f"store answers, resume with: {session.resume_command}"
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
        f"stay. {advice}, then resume with: {session.resume_command}"
    )


@contextmanager
def interruptible() -> Iterator[None]:
    """End the run in the block on SIGINT or SIGTERM: the stages' process groups are
    stopped, and the run is recorded as interrupted.

    Only the main thread receives signals; elsewhere the caller handles them.
    """
    previous_handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            # A shell makes background processes ignore Ctrl-C.
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous_handlers[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Signal handler that raises KeyboardInterrupt. From then on, an unreachable store
    is retried only for a few seconds.
    """
    object_stores.interrupt()
    sys.stderr.flush()
    raise KeyboardInterrupt
