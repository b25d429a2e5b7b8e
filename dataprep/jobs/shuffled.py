"""Every shuffle: rows that the tasks of one job send to partitions under a name, and tasks of later jobs read.

A task's function is a generator: it yields `Sent` whenever it has rows, under one name or several, and returns what any
task does (`engine.Done`). `run_shuffle` runs the tasks and returns with their results a `Shuffled` for each name. From
that a task of any later job reads a partition, as often as it likes and as much of it at a time: always the same rows,
in the order of the tasks and, of one task, in the order in which it sent them. There are two ways for them to get
there (`engine.shuffle` in the manifest), which change no result.

- `files`, the default on one machine: each sending is an Arrow file with a record batch per partition, and a reader
  takes its batch out of all of them. No runner ever holds the rows; they lie in the stage's work folder.
- `engine`, the default on a cluster: the job is one linear chain (tasks, `GroupByKey`, reception), in which rows travel
  as Arrow batches of BATCH_BYTES under the number of name and partition. Whoever receives a partition leaves it as one
  file in the work folder, batch by batch as they come, each with its place; the reader puts them in order. So a task
  reads one file, and not a little of every file: of 10^4 files and 4,096 partitions these are 4 x 10^7 requests to a
  store.

What an interrupted job has committed is not done again. With `files` these are the tasks that have finished. With
`engine` they are the partitions that have arrived: an engine keeps nothing of what was sent, so all tasks run once
more, but send to the other partitions alone; where every row has arrived, nothing runs. Rows that were sent and have
arrived are counted against each other, so that a runner which loses some is found out.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import as_path, atomic_write, file_names, is_local
from gristmill.dataprep.jobs.engine import (
    Done,
    IncompleteJobError,
    Progress,
    Task,
    check_complete,
    finish_task,
    in_groups,
    raising_what_was_noted,
    read_records,
    run_name,
    run_names,
    run_tasks,
)
from gristmill.dataprep.jobs.errors import failure_path, note_failure
from gristmill.dataprep.jobs.on_cluster import run_on_cluster
from gristmill.dataprep.jobs.pool import Element
from gristmill.dataprep.shuffle import batch_of, by_partition, open_batches, write_batches

FILES, ENGINE = "files", "engine"
BATCH_BYTES = 4_000_000
"""Of the rows that travel together; more where a single row has more."""
MOST_MAPPED = 4096
"""Files that one task maps at a time: Linux lets a process have 65,530 maps (vm.max_map_count), for all its threads."""
SENT = "@sent"
"""Key of a task's record, which no task's own result has: how often it has sent under each name, or how many rows."""
PLACE = b"place"
"""Key of a batch's metadata: the numbers of its task, of the sending, and of the batch among those of one sending."""
KEY_BITS = 32
"""A partition's number has so many bits, below the number of its name."""


class Sent(NamedTuple):
    """Rows on their way.

    Attributes:
        name: of the shuffle.
        rows: without columns of dictionaries; all of a name have the same columns.
        partitions: int64 of shape (rows,); nobody looks at them where there is one partition.
    """

    name: str
    rows: pa.Table
    partitions: np.ndarray


Sender = Callable[[Task], Generator[Sent, None, Done]]
"""The function of a task that sends rows; as `engine.Process` it must be importable by name or picklable."""


@dataclass(frozen=True)
class Shuffled:
    """What the tasks of a job have sent under one name.

    Attributes:
        folder: where it lies.
        num_partitions: numbers from 0 up to it.
        files: names of the files, in the order of the tasks; in the form `engine` none.
        arrived: in that form, how many rows each partition has in which any has arrived.
    """

    folder: Path
    num_partitions: int
    files: Sequence[str] = ()
    arrived: Mapping[int, int] | None = None

    @property
    def is_nothing(self) -> bool:
        """Whether no task has sent anything, not even a table without rows: then nobody knows the columns."""
        return not (self.files if self.arrived is None else self.arrived)

    def read(self, partition: int, choose: Callable[[pa.Table], pa.Table] | None = None) -> pa.Table:
        """The rows of a partition in their order; not where there `is_nothing`.

        Up to MOST_MAPPED files stay mapped. Of more, what is read is copied, so that never more are mapped at a time.

        Args:
            choose: takes some of the rows of each piece (`pieces`).
        """
        if self.arrived is not None:
            found = [piece if choose is None else choose(piece) for piece in self.pieces(partition)]
            return pa.concat_tables(found) if found else self._columns().empty_table()
        return self._concat(self.files, partition, choose)

    def pieces(self, partition: int) -> Iterator[pa.Table]:
        """The same one after the other: what a task has sent at a time or, of much, a part of that."""
        if self.arrived is None:
            for name in self.files:
                yield _batch_of(self.folder / name, partition)
        elif partition in self.arrived:
            yield from _in_order(self.folder / partition_name(partition))

    def count(self, partition: int) -> int:
        """How many rows a partition has."""
        if self.arrived is not None:
            return self.arrived.get(partition, 0)
        return sum(open_batches(self.folder / name).get_batch(partition).num_rows for name in self.files)

    def _concat(self, files: Sequence[str], partition: int, choose: Callable[[pa.Table], pa.Table] | None) -> pa.Table:
        if len(files) <= MOST_MAPPED:
            found = (_batch_of(self.folder / name, partition) for name in files)
            return pa.concat_tables([piece if choose is None else choose(piece) for piece in found])
        groups = (files[begin : begin + MOST_MAPPED] for begin in range(0, len(files), MOST_MAPPED))
        return pa.concat_tables([self._concat(group, partition, choose).combine_chunks() for group in groups])

    def _columns(self) -> pa.Schema:
        return open_batches(self.folder / partition_name(min(self.arrived or ()))).schema


def _batch_of(path: Path, partition: int) -> pa.Table:
    return pa.Table.from_batches([open_batches(path).get_batch(partition)])


def form_of(context: Context) -> str:
    """Which way rows take: `files` or `engine`."""
    return context.shuffle or (FILES if context.runner == "local" else ENGINE)


def must_send(context: Context) -> bool:
    """Whether a task must be sent what it needs of files that others have left.

    On a cluster and in a store it must: there every look into a file is a request. On the disk of one machine it maps
    those files, and nothing is copied.
    """
    return form_of(context) == ENGINE or not is_local(context.work)


def run_shuffle(
    job: str,
    tasks: Sequence[Task],
    sender: Sender,
    context: Context,
    partitions: Mapping[str, int],
    holds_gil: bool = False,
    direct: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, Shuffled]]:
    """Run every task that has not finished yet; return their results, and what they have sent by its name.

    Args:
        job: name of the job within its stage.
        tasks: as of `engine.run_tasks`; their order is that of the rows.
        sender: called once per task, or again after an interruption; it sends the same rows each time.
        context: where to run.
        partitions: how many there are of each name that `sender` may use. A name is the stage's, as a job's is.
        holds_gil, direct: see `engine.run_tasks`.

    Raises:
        IncompleteJobError: the runner ended without an error but left tasks undone, or lost rows.
        Exception: as of `engine.run_tasks`.
    """
    if form_of(context) == FILES:
        process = partial(send_to_files, sender, str(context.work), dict(partitions))
        results = run_tasks(job, tasks, process, context, holds_gil, direct)
        sent = [result.pop(SENT) for result in results]
        return results, {
            name: Shuffled(
                context.work / name,
                number,
                [f"{file}.arrow" for file in run_names(tasks, (runs.get(name, 0) for runs in sent))],
            )
            for name, number in partitions.items()
        }
    return _run_by_engine(job, tasks, sender, context, partitions)


def send_to_files(sender: Sender, work: str, partitions: Mapping[str, int], task: Task) -> Done:
    """Do a task whose rows go through files."""
    runs: dict[str, int] = {}
    paths: list[Path] = []
    sending = sender(task)
    while True:
        try:
            name, rows, places = next(sending)
        except StopIteration as end:
            done: Done = end.value
            return Done([*done.files, *paths], {**done.result, SENT: runs})
        paths.append(as_path(work) / name / f"{run_name(task, runs.get(name, 0))}.arrow")
        rows, ends = by_partition(rows, places, partitions[name])  # and what was sent is let go of
        write_batches(paths[-1], rows, ends)
        runs[name] = runs.get(name, 0) + 1


def _run_by_engine(
    job: str, tasks: Sequence[Task], sender: Sender, context: Context, partitions: Mapping[str, int]
) -> tuple[list[dict[str, Any]], dict[str, Shuffled]]:
    """Run the job as one chain, unless all that it sends has arrived before."""
    records = context.work / f"{job}-engine"
    folders = {name: context.work / f"{name}-arrived" for name in partitions}
    for folder in (records, *folders.values()):
        folder.mkdir(parents=True, exist_ok=True)
    names = [task.name for task in tasks]
    results, arrived = read_records(records, names), {name: find_arrived(folder) for name, folder in folders.items()}
    total = len(tasks) + sum(partitions.values())
    if not all(result is not None for result in results) or _find_lost(results, arrived):
        numbered = [
            Task(task.name, {"place": place, "payload": task.payload}, task.size_bytes)
            for place, task in enumerate(tasks)
        ]
        missing = {
            name: [place for place in range(number) if place not in arrived[name]]
            for name, number in partitions.items()
        }
        send = partial(send_group, sender, str(records), dict(partitions), missing)
        receive = partial(
            receive_partition, [str(folder) for folder in folders.values()], list(partitions), str(records)
        )
        with (
            Progress(context, job, total, partial(_count_done, [records, *folders.values()])),
            raising_what_was_noted(job, records),
        ):
            run_on_cluster(job, context, records, send, partial(in_groups, numbered), receive)
        results = read_records(records, names)
        arrived = {name: find_arrived(folder) for name, folder in folders.items()}
    found = check_complete(
        f"{context.stage}/{job}", names, results, lambda: context.progress(total, total, "shards", job=job)
    )
    lost = _find_lost(found, arrived)
    for name, (sent, came) in lost.items():
        for mark in [mark for mark in file_names(folders[name]) if mark.endswith(MARK)]:
            (folders[name] / mark).unlink()
        context.warn(f"{context.stage}/{job}: {sent:,} rows were sent to {name}, {came:,} arrived")
    if lost:
        raise IncompleteJobError(
            f"{context.stage}/{job}: the rows that were sent to {', '.join(lost)} are not those "
            "that arrived: the runner lost some; nothing was committed, rerun to send them again"
        )
    for result in found:
        del result[SENT]
    return found, {name: Shuffled(folders[name], number, arrived=arrived[name]) for name, number in partitions.items()}


MARK = ".rows"
"""Ends the name of the empty file that says how many rows of a partition have arrived; it is written last."""


def partition_name(partition: int) -> str:
    """The name of the file of a partition in the form `engine`."""
    return f"{partition:05d}.arrow"


def find_arrived(folder: Path) -> dict[int, int]:
    """The partitions that have arrived whole, and how many rows each has; the folder is listed once."""
    marks = sorted(name.removesuffix(MARK).split("-") for name in file_names(folder) if name.endswith(MARK))
    return {int(partition): int(rows) for partition, rows in marks}


def _find_lost(
    results: Sequence[Mapping[str, Any] | None], arrived: Mapping[str, Mapping[int, int]]
) -> dict[str, tuple[int, int]]:
    """Name -> rows that were sent and that have arrived, where these differ or not even the columns are known."""
    lost = {}
    for name, partitions in arrived.items():
        sent = [result[SENT][name] for result in results if result is not None and name in result[SENT]]
        if sum(sent) != sum(partitions.values()) or bool(sent) != bool(partitions):
            lost[name] = sum(sent), sum(partitions.values())
    return lost


def _count_done(folders: Sequence[Path]) -> int:
    return sum(name.endswith((".json", MARK)) for folder in folders for name in file_names(folder))


def send_group(
    sender: Sender,
    records: str,
    partitions: Mapping[str, int],
    missing: Mapping[str, Sequence[int]],
    group: Sequence[Element],
) -> Iterator[tuple[int, bytes] | Mapping[str, Any]]:
    """What a worker of a cluster does with an element: its tasks, one after the other.

    What a task raises is noted, and raised: a runner must not bring together what is not all of it.

    Args:
        records: folder of the tasks' records.
        partitions: how many there are of each name.
        missing: those of each name that have not arrived.

    Yields:
        the number of a name and its partition with a batch; and what a task has counted.
    """
    folder, numbers = as_path(records), {name: number for number, name in enumerate(partitions)}
    wanted = {name: np.isin(np.arange(number), missing[name]) for name, number in partitions.items()}
    for name, payload in group:
        if failure_path(folder).exists():
            raise RuntimeError("another task has failed")
        try:
            sent = dict[str, int]()
            done = yield from _send(sender(Task(name, payload["payload"])), payload["place"], numbers, wanted, sent)
            result = finish_task(
                Task(name),
                lambda task, done=done, sent=sent: Done(  # type: ignore[misc]
                    done.files, {**done.result, SENT: sent}
                ),
                folder,
            )
        except Exception as error:
            note_failure(folder, name, error)
            raise
        yield dict(result.get("counts", {}))


def _send(
    sending: Generator[Sent, None, Done],
    place: int,
    numbers: Mapping[str, int],
    wanted: Mapping[str, np.ndarray],
    rows_of: dict[str, int],
) -> Generator[tuple[int, bytes], None, Done]:
    """Put out what a task sends, in batches; count its rows by name."""
    run = 0
    while True:
        try:
            name, rows, partitions = next(sending)
        except StopIteration as end:
            done: Done = end.value
            return done
        for partition, batch in cut_batches(rows, partitions, wanted[name], (place, run)):
            yield numbers[name] << KEY_BITS | partition, batch
        rows_of[name] = rows_of.get(name, 0) + len(rows)
        run += 1


def cut_batches(
    rows: pa.Table, partitions: np.ndarray, wanted: np.ndarray, place: tuple[int, int]
) -> Iterator[tuple[int, bytes]]:
    """Cut rows into batches of about BATCH_BYTES that go to one partition, each a copy with its place.

    Rows of partitions that are not wanted are left out. A table without rows goes to partition 0, for its columns.
    """
    rows, ends = by_partition(rows, partitions, len(wanted))
    each = max(1, BATCH_BYTES * len(rows) // max(rows.nbytes, 1))
    for partition in np.flatnonzero(wanted & (np.diff(ends) > 0)).tolist() if len(rows) else [0] * bool(wanted[0]):
        begin, end = ends[partition : partition + 2].tolist()
        for number, first in enumerate(range(begin, max(end, begin + 1), each)):
            sink = io.BytesIO()
            with pa.ipc.new_stream(sink, rows.schema) as writer:
                writer.write_batch(
                    batch_of(rows, first, min(first + each, end)),
                    custom_metadata={PLACE: " ".join(map(str, (*place, number)))},
                )
            yield partition, sink.getvalue()


def receive_partition(
    folders: Sequence[str], names: Sequence[str], records: str, number: int, batches: Iterable[bytes]
) -> None:
    """Leave what was sent to a partition as a file, batch by batch as they come; what came twice is left once.

    Args:
        folders, names: of everything that the job sends.
        records: folder of the tasks' records.
        number: of the name and of the partition.
        batches: as from `cut_batches`.
    """
    which, partition = number >> KEY_BITS, number & (1 << KEY_BITS) - 1
    try:
        rows = _write_arrived(as_path(folders[which]) / partition_name(partition), batches)
        mark = as_path(folders[which]) / f"{partition:05d}-{rows}{MARK}"
        with atomic_write(mark) as sink:
            sink.write(b"")
    except Exception as error:
        note_failure(as_path(records), f"{names[which]} {partition}", error)
        raise


def _write_arrived(path: Path, batches: Iterable[bytes]) -> int:
    """Write the batches to a file; returns how many rows they have."""
    seen, rows = set[bytes](), 0
    with atomic_write(path) as sink:
        writer = None
        for one in batches:
            with pa.ipc.open_stream(one) as stream:
                batch, metadata = stream.read_next_batch_with_custom_metadata()
            place = metadata[PLACE]
            if place not in seen:
                writer = writer or pa.ipc.new_file(sink, batch.schema)
                writer.write_batch(batch, custom_metadata=metadata)
                rows += batch.num_rows
                seen.add(place)
        if writer is not None:
            writer.close()
    return rows


def _in_order(path: Path) -> Iterator[pa.Table]:
    """The batches of a file in the order of their places; of a store, out of a copy on this machine's disk."""
    if is_local(path):
        yield from _sorted(pa.memory_map(str(path)))
        return
    with tempfile.NamedTemporaryFile() as copy:
        with path.open("rb") as stream:
            shutil.copyfileobj(stream, copy)
        copy.flush()
        mapped = pa.memory_map(copy.name)
    yield from _sorted(mapped)


def _sorted(mapped: pa.MemoryMappedFile) -> Iterator[pa.Table]:
    file = pa.ipc.open_file(mapped)
    found = (file.get_batch_with_custom_metadata(number) for number in range(file.num_record_batches))
    for _, batch in sorted(
        ((tuple(map(int, told[PLACE].split())), batch) for batch, told in found), key=lambda pair: pair[0]
    ):
        yield pa.Table.from_batches([batch])
