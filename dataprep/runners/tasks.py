"""Job engine: run tasks, usually one per shard, on workers through a Beam runner.

A job maps tasks (a name and a JSON payload, usually a shard's address) through one
function that does its own reading and writing. Each finished task leaves a record with
its counts and the sizes of its files; a rerun skips tasks with a record and complete
files. Results do not depend on the distribution of tasks over workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar, cast

from gristmill.core.files import (
    as_path,
    at_once,
    file_names,
    file_sizes,
    find_json,
    is_local,
    write_json,
)
from gristmill.core.heartbeats import Repetition
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import shard_names
from gristmill.dataprep.runners.cluster_retry import run_on_cluster
from gristmill.dataprep.runners.errors import (
    failure_path,
    note_failure,
    noted_failure,
    own_error,
    shorten,
)
from gristmill.dataprep.runners.multi_host import (
    LOOK_SECONDS,
    offered,
    read_offers,
    take_share,
    taking_part,
)
from gristmill.dataprep.runners.pool import (
    Element,
    Mode,
    Payload,
    Pool,
    Work,
    in_processes,
    in_threads,
    in_turn,
    start_fork_server,
)
from gristmill.dataprep.runners.runner import run_here

POLL_SECONDS, STORE_POLL_SECONDS = 0.5, 10.0
"""Intervals between progress checks: in a local folder, in a store."""
MOST_ELEMENTS = 4096
"""Maximum number of elements for a cluster. An element of a larger job has several
tasks, each with its own record.
"""
PROCESS_BYTES = 32_000_000
"""Input size below which worker processes cost more than they gain, because each
repeats the imports.
"""
FEW_TASKS, FEW_BYTES = 32, 500_000_000
"""Maximum number of tasks, and of bytes of input, for which workers are started
directly: a pipeline, and the import of Beam, take a second of processor time.
"""
FEW_DOCUMENTS = 500_000
"""Planning fewer documents takes less than a second, the time that a pipeline takes to
start, and less than the way of the jobs to a cluster.
"""


Given = TypeVar("Given", bound=Mapping[str, object])
"""Payload of a job's tasks."""
Result = TypeVar("Result", bound=Mapping[str, object])
"""Result of a job's tasks."""


class IncompleteJobError(RuntimeError):
    """Error of a runner that reported success although planned tasks have no result."""


@dataclass(frozen=True)
class Task(Generic[Given]):
    """Task of a job.

    Attributes:
        name: unique and stable.
        payload: arguments of the function, as JSON.
        size_bytes: size of its input, if known. The largest tasks run first;
            `choose_mode` uses the total.
    """

    name: str
    payload: Given = field(default_factory=dict)  # type: ignore[assignment]
    size_bytes: int = 0


@dataclass(frozen=True)
class Done(Generic[Result]):
    """Return value of a task's function: the files that it committed, and a JSON
    result.
    """

    files: Sequence[Path] = ()
    result: Result = field(default_factory=dict)  # type: ignore[assignment]


Process = Callable[[Task[Given]], Done[Result]]
"""Function of a task, importable by name or picklable, because other machines may run
it.
"""


class OfShard(TypedDict):
    """Payload of a task for a document shard."""

    shard: int
    """Number of the shard in the order of the names."""


class OfPartition(TypedDict):
    """Payload of a task for a partition of a shuffle."""

    partition: int


ShardTask = Task[OfShard]
PartitionTask = Task[OfPartition]


class Record(TypedDict):
    """Record of a finished task."""

    files: Mapping[str, int]
    """Path -> size in bytes of each file that it committed."""
    result: Any


def partition_tasks(num_partitions: int) -> list[PartitionTask]:
    """Tasks for the partitions of a shuffle."""
    return [
        Task(f"{number:05d}", {"partition": number}) for number in range(num_partitions)
    ]


def planning_context(documents: int, context: Context) -> Context:
    """Context of jobs that read numbers, ids and sizes, no texts: few documents are
    planned by one worker in the stage's process.
    """
    return context.with_one_worker() if documents < FEW_DOCUMENTS else context


def run_name(task: Task, run: int) -> str:
    """File name of one of a task's runs."""
    return f"{task.name}-{run}"


def run_names(tasks: Sequence[Task], runs: Iterable[int]) -> list[str]:
    """File names of all runs of some tasks, from the number of runs of each."""
    return [
        run_name(task, run)
        for task, number in zip(tasks, runs, strict=True)
        for run in range(number)
    ]


def shard_tasks(ingest: Path) -> list[ShardTask]:
    """Tasks for the document shards of a committed ingest, in order."""
    sizes = file_sizes(ingest)
    return [
        Task(shard, {"shard": number}, sizes[shard])
        for number, shard in enumerate(shard_names(ingest))
    ]


def run_tasks(
    job: str,
    tasks: Sequence[Task[Given]],
    process: Process[Given, Result],
    context: Context,
    holds_gil: bool = False,
) -> list[Result]:
    """Run all unfinished tasks, and return all results in the order of `tasks`.

    Args:
        job: name of the job within its stage; its records are kept in
            `context.work/job`.
        tasks: unique names; the records of an interrupted attempt are reused by name.
        process: called once per pending task; commits its files atomically before it
            returns.
        context: where to run.
        holds_gil: `process` spends its time in Python, or in native code that holds the
            GIL (see `choose_mode`).

    Raises:
        Exception: the exception of a task, with its type; the message names the task
            ("job/task: ValueError: ...").
        WorkerError: a worker process was killed, or crashed.
        IncompleteJobError: the runner ended without an error but tasks have no result.
    """
    records = context.work / job
    records.mkdir(parents=True, exist_ok=True)
    names = [task.name for task in tasks]
    results = read_records(records, names)
    pending = [task for task in tasks if task.name not in results]
    total = len(tasks)
    context.progress(total - len(pending), total, "shards", job=job)
    if pending:
        mode = choose_mode(context.beam.mode, context.beam.workers, pending, holds_gil)
        pending_records = {f"{task.name}.json" for task in pending}
        num_finished = total - len(pending)
        with reporting_progress(
            context,
            job,
            total,
            lambda: num_finished + len(pending_records & file_names(records)),
        ):
            _run_to_completion(job, pending, process, context, records, mode)
        results = read_records(records, names)
    return check_complete(context, job, names, results, total)


def check_complete(
    context: Context,
    job: str,
    names: Sequence[str],
    results: Mapping[str, Result],
    total: int,
) -> list[Result]:
    """Check that all tasks have results, report the end, and return the results.

    Raises:
        IncompleteJobError: a task does not have a result.
    """
    missing = [name for name in names if name not in results]
    if missing:
        raise IncompleteJobError(
            f"{context.stage}/{job}: {len(missing)} of {len(names)} planned tasks gave no result, "
            f"first: {missing[0]}; nothing was committed, rerun to finish them"
        )
    context.progress(total, total, "shards", job=job)
    return [results[name] for name in names]


def choose_mode(
    mode: str, workers: int, tasks: Sequence[Task], holds_gil: bool
) -> Mode:
    """Choose the kind of workers of the local runner for `auto`.

    `memory` (no workers) for one worker or one task; `processes` for functions that
    hold the GIL if the tasks read at least PROCESS_BYTES in total; otherwise `threads`,
    which start immediately and share loaded data.
    """
    if mode != "auto":
        return cast(Mode, mode)
    if min(workers, len(tasks)) == 1:
        return "memory"
    worth_it = sum(task.size_bytes for task in tasks) >= PROCESS_BYTES
    return "processes" if holds_gil and worth_it else "threads"


def read_records(records: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read the results of the tasks that have finished, by name, except those whose
    files are missing.

    An incomplete record, which a crash of the machine may leave, counts as unfinished.
    Each folder is listed once: single requests to a store take hours for 10^5 tasks.
    """
    record_files = file_names(records)
    recorded = [name for name in names if f"{name}.json" in record_files]
    read = at_once(partial(_read_record, records), recorded, is_local(records))

    @cache
    def sizes_in(folder: str) -> Mapping[str, int]:
        return file_sizes(as_path(folder))

    def is_complete(record: Record) -> bool:
        for file, size in record["files"].items():
            folder, _, name = file.rpartition("/")
            if sizes_in(folder).get(name) != size:
                return False
        return True

    return {
        name: record["result"]
        for name, record in zip(recorded, read, strict=True)
        if record is not None and is_complete(record)
    }


def _read_record(records: Path, name: str) -> Record | None:
    try:
        return find_json(records / f"{name}.json")
    except ValueError:
        return None


def finish_task(
    task: Task[Given], process: Process[Given, Result], records: Path
) -> Result:
    """Run one task and write its record last."""
    done = process(task)
    record_task(task.name, done, records)
    return done.result


def record_task(name: str, done: Done, records: Path) -> None:
    """Write the record of a finished task.

    Output files are synced to disk before. Files for later jobs (`shuffle_format.py`)
    and the record are not synced: after a crash of the machine such a file is missing
    or smaller than recorded, since file systems extend a file when its data are
    written, and the task runs again.
    """
    files = {str(path): path.stat().st_size for path in done.files}
    record = {"files": files, "result": done.result}
    write_json(records / f"{name}.json", record, durable=False)


def do_task(process: Process, records: str, name: str, payload: Payload) -> None:
    """Run a task on a worker, from its name and payload.

    An exception is noted and stops further tasks from starting; to the runner the task
    has empty output.
    """
    folder = as_path(records)
    if failure_path(folder).exists():
        return
    try:
        finish_task(Task(name, payload), process, folder)
    except Exception as error:  # noqa: BLE001 - any exception ends the job
        note_failure(folder, name, error)


def do_group(process: Process, records: str, group: Sequence[Element]) -> tuple[()]:
    """Run the tasks of an element on a cluster worker, except those that an earlier
    attempt has finished; there is nothing to shuffle.
    """
    folder = as_path(records)
    for name, payload in group:
        # Most records are missing, which takes one request to see; the folder is listed
        # only for an existing one.
        if _read_record(folder, name) is None or not read_records(folder, [name]):
            do_task(process, records, name, payload)
    return ()


def in_groups(tasks: Sequence[Task]) -> list[list[Element]]:
    """Group tasks into at most MOST_ELEMENTS elements for a cluster, each with a
    similar mix of sizes.
    """
    elements = elements_of(tasks)
    number = min(len(elements), MOST_ELEMENTS)
    return [elements[offset::number] for offset in range(number)]


def _run_to_completion(
    job: str,
    tasks: Sequence[Task],
    process: Process,
    context: Context,
    records: Path,
    mode: Mode,
) -> None:
    work = partial(do_task, process, str(records))

    def remaining_groups() -> list[list[Element]]:
        results = read_records(records, [task.name for task in tasks])
        return in_groups([task for task in tasks if task.name not in results])

    with raising_what_was_noted(job, records):
        if context.beam.runner != "local":
            do = partial(do_group, process, str(records))
            run_on_cluster(job, context, records, do, remaining_groups, mode=mode)
            return
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        elements = elements_of(tasks)
        workers = context.beam.workers
        is_small = sum(task.size_bytes for task in tasks) < FEW_BYTES
        if context.beam.nodes > 1 and len(elements) > 1:
            with (
                taking_part(context.work) as host,
                offered(job, context.work, records, mode, work, elements) as offer,
            ):
                take_share(offer, host, partial(run_in_pool, mode, workers))
        elif is_small and (mode == "memory" or len(tasks) <= FEW_TASKS):
            run_in_pool(mode, workers, work, elements)
        else:
            pool = _make_pool(mode, workers, work, len(elements))
            run_here(job, pool, work, elements)


def run_in_pool(
    mode: Mode, workers: int, work: Work, elements: Sequence[Element]
) -> None:
    """Run tasks on workers of this machine."""
    for _ in _make_pool(mode, workers, work, len(elements))(work, elements):
        pass


@contextmanager
def raising_what_was_noted(job: str, records: Path) -> Iterator[None]:
    """Context of a running job that raises the exception of a failed task instead of
    the runner's error.
    """
    failure_path(records).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        local_error = own_error(error)
        if local_error is not None:
            raise local_error from None
        raise noted_failure(job, records) or shorten(job, error) from error
    failure = noted_failure(job, records)
    if failure is not None:
        raise failure


def take_part(work: Path, workers: int) -> None:
    """Run tasks of every job that a stage offers, led by another host, until this
    process is terminated.

    Args:
        work: the stage's `work/`.
        workers: number of workers on this host.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    joined_claims: set[str] = set()
    with taking_part(work) as host:
        while True:
            for offer in read_offers(work):
                if offer.claims in joined_claims:
                    continue
                joined_claims.add(offer.claims)
                take_share(offer, host, partial(run_in_pool, offer.mode, workers))
            time.sleep(LOOK_SECONDS)


def elements_of(tasks: Sequence[Task]) -> list[Element]:
    """Names and payloads of tasks by descending size, so that the longest do not start
    last.
    """
    ordered = sorted(tasks, key=lambda task: (-task.size_bytes, task.name))
    return [(task.name, dict(task.payload)) for task in ordered]


def _make_pool(mode: Mode, workers: int, work: Work, num_tasks: int) -> Pool:
    if mode == "memory":
        return in_turn
    if mode == "threads":
        return partial(in_threads, min(workers, num_tasks))
    # it imports the workers' modules while this process imports Beam
    start_fork_server(work)
    return partial(in_processes, min(workers, num_tasks))


@contextmanager
def reporting_progress(
    context: Context, job: str, total: int, count: Callable[[], int]
) -> Iterator[None]:
    """Context in which a thread reports the progress of a job while a runner blocks.

    Args:
        total: number of tasks.
        count: function that returns the number of finished tasks.
    """
    reported = -1

    def report() -> None:
        nonlocal reported
        done = count()
        if done != reported:
            context.progress(done, total, "shards", job=job)
            reported = done

    seconds = POLL_SECONDS if is_local(context.work) else STORE_POLL_SECONDS
    with Repetition(report, seconds):
        yield
