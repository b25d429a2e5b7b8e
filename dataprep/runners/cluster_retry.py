"""Jobs on a cluster: a probe of its workers and their access to the store, and retries
if the runner gives up.

The probe is one small task before any work. A worker without access to the store would
write its results elsewhere or fail, and the job would end without results.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from gristmill.core.files import as_path, find_json, read_json, write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners import worker_bootstrap
from gristmill.dataprep.runners.connection import GroupWork, Receive
from gristmill.dataprep.runners.connections import PROBED_VARIABLE
from gristmill.dataprep.runners.errors import (
    WorkerError,
    failure_path,
    own_error,
    shorten,
)
from gristmill.dataprep.runners.pool import Element, Mode
from gristmill.dataprep.runners.runner import run_there

ATTEMPTS = 2
"""Maximum number of consecutive failures of a runner without another finished task."""
STARTS_MACHINES = ("dataflow", "DataflowRunner")
"""Engines that start machines for each job, which takes minutes."""
REFUSAL = re.compile(
    rf"(?:^|RuntimeError: )({worker_bootstrap.REFUSES}.*?)(?: \[while running.*)?$",
    re.MULTILINE,
)
"""Pattern of the error of a worker that cannot start, within an engine's error."""

_met: set[str] = set()


def meet_workers(context: Context) -> None:
    """Check once per run that a worker can read and write the work folder; once per
    process of a stage that runs alone.

    Raises:
        WorkerError: no worker takes a task in time or answers, or a worker reports an
            error.
    """
    engine = context.beam
    cluster = engine.runner
    if engine.address is not None:
        cluster += f" at {engine.address}"
    key = f"{cluster} {sorted(engine.options.items())} {context.work}"
    probed = os.environ.get(PROBED_VARIABLE)
    if key in _met or (probed is not None and Path(probed).exists()):
        return
    question = context.work / "probe.json"
    answer = context.work / "probe.answer.json"
    token = {"token": secrets.token_hex(8)}
    context.work.mkdir(parents=True, exist_ok=True)
    try:
        write_json(question, token, durable=False)
        seconds = None if engine.runner in STARTS_MACHINES else engine.worker_seconds
        run_there(
            "probe",
            context,
            partial(answer_probe, str(question), str(answer)),
            [[("probe", token)]],
            seconds=seconds,
        )
        answered = find_json(answer) == token
    except TimeoutError as error:
        raise WorkerError(
            f"{cluster}: no worker has done a task after {engine.worker_seconds:g} "
            "s (engine.worker_seconds); start "
            "some, or see their log for why they do not come"
        ) from error
    except Exception as error:
        refusals = REFUSAL.findall(str(error))
        if not refusals:
            raise
        raise WorkerError(f"{cluster}: {refusals[-1]}") from error
    finally:
        question.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    if not answered:
        raise WorkerError(
            f"{cluster}: a worker does not see what this machine writes to "
            f"{context.work}, or cannot write there; put the store where all have it "
            "under one name: a shared folder, or s3://, gs:// or az://"
        )
    _met.add(key)
    if probed is not None:
        with suppress(FileNotFoundError):  # its driver has ended
            Path(probed).touch()


def answer_probe(question: str, answer: str, group: Sequence[Element]) -> tuple[()]:
    """Answer a probe on a worker if it can read the question."""
    ((_, token),) = group
    with suppress(OSError, ValueError):
        if read_json(as_path(question)) == token:
            write_json(as_path(answer), dict(token), durable=False)
    return ()


def run_on_cluster(
    job: str,
    context: Context,
    records: Path,
    work: GroupWork,
    remaining_groups: Callable[[], Sequence[Sequence[Element]]],
    receive: Receive | None = None,
    mode: Mode = "threads",
) -> None:
    """Run a job (`runner.run_there`), and retry it if the runner gives up because a
    worker was lost.

    Most engines repeat the tasks of a lost worker; Flink ends the job unless it has a
    restart strategy.

    Args:
        job, context, work, receive, mode: see `runner.run_there`.
        records: folder of the tasks' records.
        remaining_groups: function that returns the unfinished elements, called before
            each attempt.
    """
    if context.beam.runner != "local":
        meet_workers(context)
    groups = remaining_groups()
    num_failures = 0
    while groups:
        try:
            run_there(job, context, work, groups, receive, mode=mode)
            return
        except Exception as error:
            num_before = sum(map(len, groups))
            groups = remaining_groups()
            num_failures = 0 if sum(map(len, groups)) < num_before else num_failures + 1
            if (
                own_error(error) is not None
                or failure_path(records).exists()
                or num_failures == ATTEMPTS
            ):
                raise
            context.warn(
                f"{shorten(job, error)}; {context.beam.runner} gave up; trying "
                "the missing tasks again"
            )
