"""How every job here looks: tasks, usually shards, that a Beam runner hands to workers by name.

A job maps tasks (a name and a JSON payload, usually a shard's address) through one function that does its own
reading and writing. Each finished task leaves a record with what it counted and the sizes of what it wrote; a
rerun skips the tasks whose record and files are there. Nothing depends on how the tasks are spread over workers.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from gristmill.dataprep.context import Context
from gristmill.dataprep.documents import shard_names
from gristmill.dataprep.files import as_path, at_once, file_names, file_sizes, is_local, write_json
from gristmill.dataprep.jobs.errors import failure_path, note_failure, noted_failure, own_error, shorten
from gristmill.dataprep.jobs.on_cluster import run_on_cluster
from gristmill.dataprep.jobs.pool import Element, Pool, Work, in_processes, in_threads, in_turn, start_fork_server
from gristmill.dataprep.jobs.runner import run_here
from gristmill.dataprep.jobs.sharing import LOOK_SECONDS, offered, read_offers, take_share, taking_part

Mode = Literal["memory", "threads", "processes"]
POLL_SECONDS, STORE_POLL_SECONDS = 0.5, 10.0
"""How often progress is looked for: in a folder of this machine, in a store."""
MOST_ELEMENTS = 4096
"""What a cluster is handed at the most: of more tasks each element has several, and each still its own record."""
PROCESS_BYTES = 32_000_000
"""Input below which worker processes, which import what they need once more, cost more than they gain."""


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


def partition_tasks(num_partitions: int) -> list[Task]:
    """One task per partition of a shuffle; the payload has its number as `partition`."""
    return [Task(f"{number:05d}", {"partition": number}) for number in range(num_partitions)]


def run_name(task: Task, run: int) -> str:
    """The name of the file of one of several runs of a task."""
    return f"{task.name}-{run}"


def run_names(tasks: Sequence[Task], runs: Iterable[int]) -> list[str]:
    """The names of the files that tasks have left, by how many runs each had."""
    return [run_name(task, run) for task, number in zip(tasks, runs, strict=True) for run in range(number)]


def shard_tasks(ingest: Path) -> list[Task]:
    """One task per document shard of a committed ingest, in their order: its name, `shard` (its number), its size."""
    sizes = file_sizes(ingest)
    return [Task(shard, {"shard": number}, sizes[shard]) for number, shard in enumerate(shard_names(ingest))]


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
            stages that take no longer than a pipeline takes to begin. A single task never needs one.

    Raises:
        Exception: what a task raised, with its type; the message names the task ("job/task: ValueError: ...").
        WorkerError: a worker process was killed, or crashed.
        IncompleteJobError: the runner ended without an error but left tasks undone.
    """
    records = context.work / job
    records.mkdir(parents=True, exist_ok=True)
    names = [task.name for task in tasks]
    results = read_records(records, names)
    pending = [task for task, result in zip(tasks, results, strict=True) if result is None]
    total = len(tasks)
    context.progress(total - len(pending), total, "shards", job=job)
    if pending:
        mode = choose_mode(context.mode, context.workers, pending, holds_gil)
        left = {f"{task.name}.json" for task in pending}
        before = total - len(pending)
        with Progress(context, job, total, lambda: before + len(left & file_names(records))):
            _run_to_the_end(job, pending, process, context, records, mode, direct)
        results = read_records(records, names)
    return check_complete(
        f"{context.stage}/{job}", names, results, lambda: context.progress(total, total, "shards", job=job)
    )


def check_complete(
    job: str, names: Sequence[str], results: Sequence[dict[str, Any] | None], done: Callable[[], None]
) -> list[dict[str, Any]]:
    """The results of all tasks; `done` is called where none is missing.

    Raises:
        IncompleteJobError: a task gave no result.
    """
    missing = [name for name, result in zip(names, results, strict=True) if result is None]
    if missing:
        raise IncompleteJobError(
            f"{job}: {len(missing)} of {len(names)} planned tasks gave no result, first: {missing[0]}; "
            "nothing was committed, rerun to finish them"
        )
    done()
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


def read_records(records: Path, names: Sequence[str]) -> list[dict[str, Any] | None]:
    """The results of tasks, None of each that is not finished or whose files are gone.

    A record that is not whole, as a crash of the machine may leave it, is of a task that did not finish. Each folder is
    listed once: a store that is asked file by file takes hours for 10^5 tasks.
    """
    there = file_names(records)
    found = [name if f"{name}.json" in there else None for name in names]
    read = at_once(partial(_read_record, records), [name for name in found if name is not None], is_local(records))
    sizes: dict[str, Mapping[str, int]] = {}

    def whole(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
        for file, size in {} if record is None else record["files"].items():
            folder, _, name = str(file).rpartition("/")
            if folder not in sizes:
                sizes[folder] = file_sizes(as_path(folder))
            if sizes[folder].get(name) != size:
                return None
        return None if record is None else record["result"]

    return [None if name is None else whole(next(read)) for name in found]


def _read_record(records: Path, name: str) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((records / f"{name}.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return record


def finish_task(task: Task, process: Process, records: Path) -> dict[str, Any]:
    """Run one task and leave its record, which is written last.

    Files of the output are on the disk by then. What only later jobs read (`shuffle.py`), and the record, are not
    forced there: should the machine crash before they get there by themselves, a file is missing or smaller than the
    record says, since file systems let it grow when its data are written, and the task is done once more.
    """
    done = process(task)
    files = {str(path): path.stat().st_size for path in done.files}
    write_json(records / f"{task.name}.json", {"files": files, "result": dict(done.result)}, durable=False)
    return dict(done.result)


def do_task(process: Process, records: str, name: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker does with a task: it gets names only, and returns what is to be counted.

    What the task raises is noted, and no further task is begun: to a runner it is a task that had no output.
    """
    folder = as_path(records)
    if failure_path(folder).exists():
        return {}
    try:
        result = finish_task(Task(name, payload), process, folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, the job ends with it
        note_failure(folder, name, error)
        return {}
    return dict(result.get("counts", {}))


def do_group(process: Process, records: str, group: Sequence[Element]) -> Iterator[dict[str, Any]]:
    """What a worker of a cluster does with an element: its tasks, but for those that an earlier try of it has done."""
    folder = as_path(records)
    for name, payload in group:
        # Most are not there, which is one request: the folder is listed only where one is.
        found = len(group) > 1 and _read_record(folder, name) is not None
        (known,) = read_records(folder, [name]) if found else [None]
        yield do_task(process, records, name, payload) if known is None else dict(known.get("counts", {}))


def in_groups(tasks: Sequence[Task]) -> list[list[Element]]:
    """The elements of a cluster: MOST_ELEMENTS at the most, of tasks of all sizes alike."""
    elements: list[Element] = [(task.name, dict(task.payload)) for task in largest_first(tasks)]
    number = min(len(elements), MOST_ELEMENTS)
    return [elements[place::number] for place in range(number)]


def _run_to_the_end(
    job: str, tasks: Sequence[Task], process: Process, context: Context, records: Path, mode: Mode, direct: bool
) -> None:
    work = partial(do_task, process, str(records))

    def left() -> list[list[Element]]:
        results = read_records(records, [task.name for task in tasks])
        return in_groups([task for task, result in zip(tasks, results, strict=True) if result is None])

    def run() -> None:
        if context.runner != "local":
            run_on_cluster(job, context, records, partial(do_group, process, str(records)), left)
            return
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        elements = [(task.name, dict(task.payload)) for task in largest_first(tasks)]
        if context.nodes > 1 and len(elements) > 1:
            share_out(job, context, records, mode, work, elements)
        elif (direct or len(elements) == 1) and mode == "memory":
            for _ in in_turn(work, elements):
                pass
        else:
            run_here(job, context.stage, _make_pool(mode, context.workers, work, len(tasks)), work, elements)

    with raising_what_was_noted(job, records):
        run()


@contextmanager
def raising_what_was_noted(job: str, records: Path) -> Iterator[None]:
    """Within it a job runs; where one of its tasks raises, that is the error, whatever the runner makes of it."""
    failure_path(records).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        own = own_error(error)
        if own is not None:
            raise own from None
        raise noted_failure(job, records) or shorten(job, error) from error
    failure = noted_failure(job, records)
    if failure is not None:
        raise failure


def share_out(job: str, context: Context, records: Path, mode: Mode, work: Work, elements: Sequence[Element]) -> None:
    """Do tasks together with the other hosts that take part in the stage (`sharing.py`)."""

    def run(claimed: Work, free: Sequence[Element]) -> None:
        run_here(job, context.stage, _make_pool(mode, context.workers, claimed, len(free)), claimed, free)

    with taking_part(context.work) as host, offered(job, context.work, records, mode, work, elements) as offer:
        take_share(offer, host, run)


def take_part(work: Path, workers: int) -> None:
    """Do tasks of every job that a stage offers which another host leads, until this process is ended.

    Args:
        work: the stage's `work/`.
        workers: of this host.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    known: set[str] = set()
    with taking_part(work) as host:
        while True:
            for offer in read_offers(work):
                if offer.claims in known:
                    continue
                known.add(offer.claims)

                def run(claimed: Work, free: Sequence[Element], mode: str = offer.mode) -> None:
                    for _ in _make_pool(cast(Mode, mode), workers, claimed, len(free))(claimed, free):
                        pass

                take_share(offer, host, run)
            time.sleep(LOOK_SECONDS)


def largest_first(tasks: Sequence[Task]) -> list[Task]:
    """The order in which workers are handed tasks: what takes longest is not begun last."""
    return sorted(tasks, key=lambda task: (-task.size_bytes, task.name))


def _make_pool(mode: Mode, workers: int, work: Work, num_tasks: int) -> Pool:
    if mode == "memory":
        return in_turn
    if mode == "threads":
        return partial(in_threads, min(workers, num_tasks))
    start_fork_server(work)  # which imports what workers need while this process imports Beam
    return partial(in_processes, min(workers, num_tasks))


class Progress:
    """Reports how far a job is while a runner blocks.

    Args:
        total: how many tasks there are, and
        count: how many of them are done.
    """

    def __init__(self, context: Context, job: str, total: int, count: Callable[[], int]) -> None:
        self._context, self._job, self._total, self._count = context, job, total, count
        self._seconds = POLL_SECONDS if is_local(context.work) else STORE_POLL_SECONDS
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        reported = -1
        while not self._stop.wait(self._seconds):
            done = self._count()
            if done != reported:
                self._context.progress(done, self._total, "shards", job=self._job)
                reported = done
