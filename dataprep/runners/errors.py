"""Errors of jobs: failed workers, and exceptions of tasks.

A task's exception reaches the process that started the job through a file in the work
folder. Runners do not preserve exceptions: they lose the type, wrap them in kilobytes
of their own traceback, or drop them.
"""

from __future__ import annotations

import importlib
import traceback
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from gristmill.core.files import find_json, write_json
from gristmill.core.secrets import mask_text

BEAM_SUFFIX = " [while running "


class WorkerError(RuntimeError):
    """Error of a job's workers: one died, or none could be reached."""


class MissingEngineError(WorkerError):
    """Error of an engine that is not on this machine."""


class KilledWorkerError(WorkerError):
    """Error of a worker that SIGKILL ended, most likely for lack of memory."""


class TaskError(RuntimeError):
    """Error of a task whose own type cannot carry a message with the task's name."""


def failure_path(records: Path) -> Path:
    """Path of the file with the error that ends a job."""
    return records.parent / f"{records.name}.failure.json"


def note_failure(records: Path, task: str, error: Exception) -> None:
    """Write a task's exception for `noted_failure`, which also stops pending tasks from
    starting.

    Raises:
        Exception: `error` itself, if it cannot be written.
    """
    kind = type(error)
    record = {
        "task": task,
        "module": kind.__module__,
        "type": kind.__qualname__,
        "message": mask_text(str(error)),
        "traceback": mask_text("".join(traceback.format_exception(error))),
    }
    try:
        write_json(failure_path(records), record)
    except OSError:
        raise error from None


def noted_failure(job: str, records: Path) -> Exception | None:
    """Rebuild the exception of a task with the same type and the task's name, or return
    None.

    Its message is "job/task: type: message"; the worker's traceback is attached as a
    note. A type that cannot be built from a message alone becomes a TaskError.
    """
    record = find_json(failure_path(records))
    if record is None:
        return None
    name = record["type"].rpartition(".")[2]
    message = f"{job}/{record['task']}: {name}: {record['message']}"
    error: Exception = TaskError(message)
    # the type may not be there, or take other arguments
    with suppress(Exception):
        module = importlib.import_module(record["module"])
        rebuilt = attrgetter(record["type"])(module)(message)
        if isinstance(rebuilt, Exception) and str(rebuilt) == message:
            error = rebuilt
    error.add_note(f"In the worker:\n{record['traceback']}")
    return error


def own_error(error: BaseException | None) -> BaseException | None:
    """Find the cause of a job's end outside of its tasks: a worker's death, Ctrl-C, or
    the exit of this process.

    Beam raises another exception from it, so the chain of causes is searched.
    """
    while error is not None and not isinstance(
        error, WorkerError | KeyboardInterrupt | SystemExit
    ):
        error = error.__cause__ or error.__context__
    return error


def shorten(job: str, error: Exception) -> TaskError:
    """Shorten a runner's error to its last line, where Beam puts the cause.

    The text of a gRPC error ends with a bracket; its `details` have the sentence.
    """
    details = getattr(error, "details", None)
    text = str(details() if callable(details) else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # a traceback's last line begins with the type
    kind = "" if len(lines) > 1 else f"{type(error).__name__}: "
    return TaskError(f"{job}: {kind}{''.join(lines[-1:]).partition(BEAM_SUFFIX)[0]}")
