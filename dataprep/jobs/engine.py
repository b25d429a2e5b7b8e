"""How every Beam job here looks: one linear chain whose elements are batches of the names of shards.

A job maps tasks (a name and a JSON payload, usually a shard's address) through one function that does its own
reading and writing. Each finished task leaves a record with what it counted and the sizes of what it wrote; a
rerun skips the tasks whose record and files are there. Nothing depends on how the tasks are spread over workers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from gristmill.dataprep.context import Context
from gristmill.dataprep.documents import shard_names
from gristmill.dataprep.files import as_path, write_json
from gristmill.dataprep.jobs.batches import deal
from gristmill.dataprep.jobs.chain import check_linear
from gristmill.dataprep.jobs.dask_cluster import wait_for
from gristmill.dataprep.jobs.fork_server import fork_server, module_of
from gristmill.dataprep.jobs.job_errors import WorkerError, failure_path, note_failure, noted_failure, shorten
from gristmill.dataprep.jobs.runner import Mode, import_beam, make_pipeline

POLL_SECONDS = 0.5
PROCESS_BYTES = 32_000_000
"""Input below which worker processes, for which Beam is imported once more, cost more than they gain."""


class IncompleteJobError(RuntimeError):
    """A Beam runner reported success, but not every planned task came out."""


@dataclass(frozen=True)
class Task:
    """One element of a job.

    Attributes:
        name: unique and stable.
        payload: what the function needs to know, as JSON.
        size_bytes: of its input, where known; the largest go first, and many are worth worker processes.
    """

    name: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    size_bytes: int = 0


@dataclass(frozen=True)
class Done:
    """What a task's function returns: the files that it committed, and JSON about them."""

    files: Sequence[Path] = ()
    result: Mapping[str, Any] = field(default_factory=dict)


Process = Callable[[Task], Done]
"""A task's function. It must be importable by name or picklable: other machines may run it."""


def shard_tasks(ingest: Path) -> list[Task]:
    """One task per document shard of a committed ingest, in their order: its name, `shard` (its number), its size."""
    return [
        Task(shard, {"shard": number}, (ingest / shard).stat().st_size)
        for number, shard in enumerate(shard_names(ingest))
    ]


def run_tasks(
    job: str, tasks: Sequence[Task], process: Process, context: Context, holds_gil: bool = False, direct: bool = False
) -> list[dict[str, Any]]:
    """Run every task that has not finished yet, and return all results in the order of `tasks`.

    Args:
        job: name of the job within its stage; its records are kept in `context.work/job`.
        tasks: unique names; the records of an interrupted attempt are reused by name.
        process: called once per pending task; commits its files atomically before it returns.
        context: where to run.
        holds_gil: whether `process` spends its time in Python, or in native code that lets no other thread run (see
            `choose_mode`).
        direct: call the tasks here, without a pipeline, where the local runner would do so one after another too: for
            stages that take no longer than a pipeline takes to begin.

    Raises:
        Exception: what a task raised, with its type; the message names the task ("job/task: ValueError: ...").
        WorkerError: a worker process was killed, or crashed.
        IncompleteJobError: the runner ended without an error but left tasks undone.
    """
    records = context.work / job
    records.mkdir(parents=True, exist_ok=True)
    pending = [task for task in tasks if read_record(records, task.name) is None]
    total = len(tasks)
    context.progress(total - len(pending), total, "shards", job=job)
    if pending:
        mode = choose_mode(context.mode, context.workers, pending, holds_gil)
        with _Progress(context, job, records, pending, total):
            _run_to_the_end(job, pending, process, context, records, mode, direct)
    results = [read_record(records, task.name) for task in tasks]
    missing = [task.name for task, result in zip(tasks, results, strict=True) if result is None]
    if missing:
        raise IncompleteJobError(
            f"{context.stage}/{job}: {len(missing)} of {total} planned tasks did not come out, first: {missing[0]}; "
            "nothing was committed, rerun to finish them"
        )
    context.progress(total, total, "shards", job=job)
    return [result for result in results if result is not None]


def choose_mode(mode: str, workers: int, tasks: Sequence[Task], holds_gil: bool) -> Mode:
    """What the workers of the local runner are, where `auto` leaves the choice.

    `memory` (no workers at all) for one worker or one task; `processes` for functions that hold the GIL, where the
    tasks are known to read PROCESS_BYTES together; else `threads`, which start at once and share what is loaded.
    """
    if mode != "auto":
        return cast(Mode, mode)
    if min(workers, len(tasks)) == 1:
        return "memory"
    worth_it = sum(task.size_bytes for task in tasks) >= PROCESS_BYTES
    return "processes" if holds_gil and worth_it else "threads"


def read_record(records: Path, name: str) -> dict[str, Any] | None:
    """The result of a finished task, or None where it is not finished or its files are gone.

    A record that is not whole, as a crash of the machine may leave it, is of a task that did not finish.
    """
    try:
        record = json.loads((records / f"{name}.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    for file, size in record["files"].items():
        target = as_path(file)
        if not target.exists() or target.stat().st_size != size:
            return None
    result: dict[str, Any] = record["result"]
    return result


def finish_task(task: Task, process: Process, records: Path) -> dict[str, Any]:
    """Run one task and leave its record, which is written last.

    The task's files are on the disk by then. The record is not forced there: should the machine crash before it gets
    there by itself, the task is done once more.
    """
    done = process(task)
    files = {str(path): path.stat().st_size for path in done.files}
    write_json(records / f"{task.name}.json", {"files": files, "result": dict(done.result)}, durable=False)
    return dict(done.result)


def _finish_named(process: Process, records: str, name: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """The same in a worker, which is told names."""
    return finish_task(Task(name, payload), process, as_path(records))


def _run_to_the_end(
    job: str, tasks: Sequence[Task], process: Process, context: Context, records: Path, mode: Mode, direct: bool
) -> None:
    """Run the tasks; where one raises, that is the error, whatever the runner makes of it."""
    failure_path(records).unlink(missing_ok=True)
    try:
        if direct and (context.runner, mode) == ("local", "memory"):
            _run_here(tasks, process, records)
        else:
            _run_pipeline(job, tasks, process, context, records, mode)
    except WorkerError:
        raise
    except Exception as error:
        raise noted_failure(job, records) or shorten(job, error) from error
    failure = noted_failure(job, records)
    if failure is not None:
        raise failure


def _run_here(tasks: Sequence[Task], process: Process, records: Path) -> None:
    """What the workers of a pipeline do (`task_dofn.DoTasks`), its counters aside."""
    for task in tasks:
        try:
            finish_task(task, process, records)
        except Exception as error:  # noqa: BLE001 - whatever it is, the job ends with it
            note_failure(records, task.name, error)
            return


def _run_pipeline(
    job: str, tasks: Sequence[Task], process: Process, context: Context, records: Path, mode: Mode
) -> None:
    if (context.runner, mode) == ("local", "processes"):
        fork_server()  # which imports Beam at the same time as this process
    beam = import_beam(whole=context.runner != "local")
    from gristmill.dataprep.jobs.task_dofn import Deal, DoTasks

    workers = min(context.workers, len(tasks))
    pipeline = make_pipeline(
        context.runner, workers, context.options, mode, context.address, len(tasks), module_of(process)
    )
    do_tasks = f"{job}: process" >> beam.ParDo(
        DoTasks(context.stage, partial(_finish_named, process, str(records)), str(records)))
    if context.runner == "local":
        numbered = Deal(deal(tasks, workers))
        deals = f"{job}: shards" >> beam.ParDo(numbered).with_output_types(tuple[int, list[Any]])
        _ = pipeline | beam.Impulse() | deals | beam.GroupByKey() | do_tasks
    else:  # a cluster's engine has its own way with what was created, and may retry each element
        elements = [(number, [batch]) for number, batch in enumerate(deal(tasks, len(tasks)))]
        _ = pipeline | f"{job}: shards" >> beam.Create(elements) | do_tasks
    check_linear(pipeline)
    wait_for(pipeline.run())


class _Progress:
    """Reports finished tasks while a runner blocks, by looking for their records."""

    def __init__(self, context: Context, job: str, records: Path, pending: Sequence[Task], total: int) -> None:
        self._context, self._job, self._records = context, job, records
        self._names, self._total = [task.name for task in pending], total
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        before, reported = self._total - len(self._names), -1
        while not self._stop.wait(POLL_SECONDS):
            done = before + sum((self._records / f"{name}.json").exists() for name in self._names)
            if done != reported:
                self._context.progress(done, self._total, "shards", job=self._job)
                reported = done
