"""How a job fails: its workers did, or a task raised.

What a task raises is carried from wherever it ran to whoever started the job through a file in the work folder.
Runners themselves pass errors on as they please: with the type lost, in kilobytes of their own traceback, or not.
"""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import read_json, write_json
from gristmill.dataprep.secrets import mask_text

BEAM_SUFFIX = " [while running "


class WorkerError(RuntimeError):
    """The workers of a job failed it: one died, or none could be reached."""


class KilledWorkerError(WorkerError):
    """SIGKILL ended a worker, most likely for want of memory."""


class TaskError(RuntimeError):
    """A task raised an error whose own type cannot carry a message that names the task."""


def failure_path(records: Path) -> Path:
    """Where the error that ends a job is noted."""
    return records.parent / f"{records.name}.failure.json"


def note_failure(records: Path, task: str, error: Exception) -> None:
    """Write down what a task raised, for `noted_failure`; tasks that have not begun are not begun any more.

    Raises:
        Exception: `error` itself, where it cannot be written down.
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
    """What a task raised, as an error of the same type that says which task it was, or None.

    Its message is "job/task: type: message"; the traceback in the worker is attached as a note. A type that cannot
    be made from a message alone becomes a TaskError.
    """
    path = failure_path(records)
    if not path.exists():
        return None
    record = read_json(path)
    name = record["type"].rpartition(".")[2]
    message = f"{job}/{record['task']}: {name}: {record['message']}"
    error = make_error(record["module"], record["type"], message)
    error.add_note(f"In the worker:\n{record['traceback']}")
    return error


def make_error(module: str, qualified_name: str, message: str) -> Exception:
    """An exception of this type whose text is the message; a TaskError where the type cannot do that."""
    try:
        kind: Any = importlib.import_module(module)
        for part in qualified_name.split("."):
            kind = getattr(kind, part)
    except (ImportError, AttributeError):
        return TaskError(message)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return TaskError(message)
    try:
        error = kind(message)
    except Exception:  # noqa: BLE001 - its constructor wants something else
        return TaskError(message)
    return error if str(error) == message else TaskError(message)


def own_error(error: BaseException | None) -> BaseException | None:
    """What ended a job on this machine, where that is no task: a worker's death, Ctrl-C, or that the process is to end.

    Beam raises it again as something else, behind which it stands.
    """
    while error is not None and not isinstance(error, WorkerError | KeyboardInterrupt | SystemExit):
        error = error.__cause__ or error.__context__
    return error


def shorten(job: str, error: Exception) -> TaskError:
    """A runner's error as one sentence: the last line of what it says, which is where Beam puts the cause.

    What gRPC says of a call that failed it ends with a bracket; its `details` are the sentence.
    """
    details = getattr(error, "details", None)
    said = str(details() if callable(details) else error)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    kind = "" if len(lines) > 1 else f"{type(error).__name__}: "  # a traceback's last line begins with the type
    return TaskError(f"{job}: {kind}{''.join(lines[-1:]).partition(BEAM_SUFFIX)[0]}")
