"""Shuffles: rows that the tasks of one job send to named partitions, and tasks of later
jobs read.

A task's function is a generator that yields `Sent` for its rows, under one or several
names, and returns `tasks.Done`. `run_shuffle` runs the tasks and returns their results
and a `Shuffled` per name, from which tasks of later jobs read partitions, whole or in
pieces and any number of times. Rows are always in the order of the tasks and, within a
task, in the order of sending. There are two transports (`engine.shuffle` in the
manifest) with the same results.

- `files`, the default on one machine, and on a cluster for few parts in a folder that
  its workers share: each `Sent` becomes an Arrow file with a record batch per
  partition, and a reader takes its batch from all files. Runners do not hold the rows;
  the files are in the stage's work folder.
- `engine`, the default for all else on a cluster: the job is one linear chain (tasks, `GroupByKey`,
  reception), in which rows travel as Arrow batches of BATCH_BYTES under the number of
  name and partition. The receiver of a partition writes it as one file in the work
  folder, batch by batch in order of arrival, each with its place; the reader sorts
  them. A task thus reads one file instead of a part of every file: for 10^4 files and
  4,096 partitions that would be 4 x 10^7 requests to a store.

A rerun of an interrupted job reuses its committed results: with `files` the finished
tasks, with `engine` the arrived partitions. An engine does not keep sent rows, so all
tasks run again, but send only to the missing partitions; if all rows have arrived,
nothing runs. Numbers of sent and arrived rows are compared, so that lost rows are
detected.
"""

from __future__ import annotations

import io
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gristmill.core.files import (
    as_path,
    atomic_write,
    file_names,
    is_local,
    write_bytes,
)
from gristmill.core.stage_context import Context
from gristmill.dataprep.runners.cluster_retry import run_on_cluster
from gristmill.dataprep.runners.errors import failure_path, note_failure
from gristmill.dataprep.runners.pool import Element
from gristmill.dataprep.runners.tasks import (
    Done,
    Given,
    IncompleteJobError,
    Result,
    Task,
    check_complete,
    in_groups,
    raising_what_was_noted,
    read_records,
    record_task,
    reporting_progress,
    run_name,
    run_names,
    run_tasks,
)
from gristmill.dataprep.shuffle_format import (
    batch_of,
    by_partition,
    open_batches,
    write_batches,
)

FILES, ENGINE = "files", "engine"
BATCH_BYTES = 4_000_000
"""Size of a batch of rows; a single larger row makes a larger batch."""
FEW_PARTS = 4096
"""Parts of a shuffle, tasks times partitions, that readers on a cluster open in a shared
folder: seconds in all, if each takes a millisecond. Through the engine every row
would pass its processes twice.
"""
MOST_MAPPED = 4096
"""Files that one task maps at a time; Linux limits a process with all its threads to
65,530 maps (vm.max_map_count).
"""
SENT = "@sent"
"""Key that a shuffle adds to a task's result: per name the number of `Sent`, or of rows
with `engine`.
"""
PLACE = b"place"
"""Key of a batch's metadata: the indices of its task, of the `Sent` in the task, and of
the batch in the `Sent`.
"""
KEY_BITS = 32
"""Bits of a partition's number in a key, below the number of its name."""


class Sent(NamedTuple):
    """Rows to send.

    Attributes:
        name: name of the shuffle.
        rows: without dictionary columns; all tables of a name have the same columns.
        partitions: int64 of shape (rows,); ignored if there is only one partition.
    """

    name: str
    rows: pa.Table
    partitions: np.ndarray


Sending = Generator[Sent, None, Done[Result]]
"""Rows that a task sends, and its result."""
Sender = Callable[[Task[Given]], Sending[Result]]
"""Function of a task that sends rows; like `engine.Process` it must be importable by
name or picklable.
"""


@dataclass(frozen=True)
class Shuffled:
    """Rows that the tasks of a job have sent under one name.

    Attributes:
        folder: folder of the files.
        num_partitions: number of partitions.
        files: names of the files in the order of the tasks; empty with `engine`.
        arrived: with `engine`, number of rows by arrived partition.
    """

    folder: Path
    num_partitions: int
    files: Sequence[str] = ()
    arrived: Mapping[int, int] | None = None

    @property
    def is_nothing(self) -> bool:
        """True if no table was sent, not even an empty one, so that the columns are
        unknown.
        """
        return not (self.files if self.arrived is None else self.arrived)

    def read(
        self, partition: int, choose: Callable[[pa.Table], pa.Table] | None = None
    ) -> pa.Table:
        """Read the rows of a partition in order; not allowed if `is_nothing`.

        Up to MOST_MAPPED files stay mapped. Rows of more files are copied, so that this
        limit holds.

        Args:
            choose: filter of the rows of each piece (`pieces`).
        """
        pieces = self.pieces(partition)
        if choose is not None:
            pieces = map(choose, pieces)

        def next_table() -> pa.Table | None:
            group = list(islice(pieces, MOST_MAPPED))
            if not group:
                return None
            table = pa.concat_tables(group)
            return table.combine_chunks() if len(self.files) > MOST_MAPPED else table

        tables = []
        while (table := next_table()) is not None:
            tables.append(table)
        if tables:
            return pa.concat_tables(tables)
        any_partition = partition_name(min(self.arrived or ()))
        return open_batches(self.folder / any_partition).schema.empty_table()

    def pieces(self, partition: int) -> Iterator[pa.Table]:
        """Read the rows of a partition in pieces: a `Sent` each or, of a large one, a
        batch.
        """
        if self.arrived is None:
            for name in self.files:
                batch = open_batches(self.folder / name).get_batch(partition)
                yield pa.Table.from_batches([batch])
            return
        if partition not in self.arrived:
            return
        path = self.folder / partition_name(partition)
        if is_local(path):
            mapped = pa.memory_map(str(path))
        else:
            with tempfile.NamedTemporaryFile() as copy:
                path.fs.get_file(path.path, copy.name)  # type: ignore[attr-defined]
                mapped = pa.memory_map(copy.name)
        file = pa.ipc.open_file(mapped)
        batches = (
            file.get_batch_with_custom_metadata(number)
            for number in range(file.num_record_batches)
        )
        in_order = sorted(batches, key=lambda pair: [*map(int, pair[1][PLACE].split())])
        for batch, _ in in_order:
            yield pa.Table.from_batches([batch])

    def count(self, partition: int) -> int:
        """Number of rows in a partition."""
        if self.arrived is not None:
            return self.arrived.get(partition, 0)
        return sum(
            open_batches(self.folder / name).get_batch(partition).num_rows
            for name in self.files
        )


def form_of(context: Context, num_parts: int) -> str:
    """Transport of the rows, `files` or `engine`, of a shuffle with so many tasks times
    partitions.
    """
    is_near = context.beam.runner == "local" or (
        num_parts <= FEW_PARTS and is_local(context.work)
    )
    return context.beam.shuffle or (FILES if is_near else ENGINE)


def must_send(context: Context, num_parts: int) -> bool:
    """Test if a task must receive data of other tasks' files through a shuffle.

    It must for many parts on a cluster, and in a store, where every read of a file is a
    request. On a disk it maps the files without a copy.
    """
    return form_of(context, num_parts) == ENGINE or not is_local(context.work)


def run_shuffle(
    job: str,
    tasks: Sequence[Task[Given]],
    sender: Sender[Given, Result],
    context: Context,
    partitions: Mapping[str, int],
) -> tuple[list[Result], dict[str, Shuffled]]:
    """Run all unfinished tasks; return their results, and the sent rows by name.

    Args:
        job: name of the job within its stage.
        tasks: as in `tasks.run_tasks`; rows are in the order of the tasks.
        sender: called once per task, or again after an interruption; sends the same
            rows each time.
        context: where to run.
        partitions: number of partitions per name that `sender` may use. Names are
            unique in a stage, like jobs.

    Raises:
        IncompleteJobError: the runner ended without an error but tasks have no result,
            or rows are lost.
        Exception: as in `tasks.run_tasks`.
    """
    num_parts = len(tasks) * sum(partitions.values())
    if form_of(context, num_parts) == FILES:
        process = partial(send_to_files, sender, str(context.work), dict(partitions))
        results: list[Any] = run_tasks(job, tasks, process, context)
        runs_of_tasks = [result.pop(SENT) for result in results]
        return results, {
            name: Shuffled(
                context.work / name,
                number,
                [
                    f"{file}.arrow"
                    for file in run_names(
                        tasks, (runs.get(name, 0) for runs in runs_of_tasks)
                    )
                ],
            )
            for name, number in partitions.items()
        }
    return _run_by_engine(job, tasks, sender, context, partitions)


def run_stream(
    job: str,
    tasks: Sequence[Task[Given]],
    sender: Sender[Given, Result],
    context: Context,
    partitions: int,
    stream: str | None = None,
) -> tuple[list[Result], Shuffled]:
    """Run a shuffle that sends rows of one name, by default the job's (see
    `run_shuffle`).
    """
    name = stream or job
    results, sent = run_shuffle(job, tasks, sender, context, {name: partitions})
    return results, sent[name]


def send_to_files(
    sender: Sender, work: str, partitions: Mapping[str, int], task: Task
) -> Done:
    """Run a task and write its rows to files."""
    runs = Counter[str]()
    paths: list[Path] = []
    sending = sender(task)
    while True:
        try:
            name, rows, row_partitions = next(sending)
        except StopIteration as end:
            done: Done = end.value
            return Done([*done.files, *paths], {**done.result, SENT: dict(runs)})
        paths.append(as_path(work) / name / f"{run_name(task, runs[name])}.arrow")
        # rebinds `rows` to release the sent table
        rows, ends = by_partition(rows, row_partitions, partitions[name])
        write_batches(paths[-1], rows, ends)
        runs[name] += 1


def _run_by_engine(
    job: str,
    tasks: Sequence[Task[Given]],
    sender: Sender[Given, Result],
    context: Context,
    partitions: Mapping[str, int],
) -> tuple[list[Result], dict[str, Shuffled]]:
    """Run the job as one chain, unless all its rows have arrived before."""
    records = context.work / f"{job}-engine"
    folders = {name: context.work / f"{name}-arrived" for name in partitions}
    for folder in (records, *folders.values()):
        folder.mkdir(parents=True, exist_ok=True)
    names = [task.name for task in tasks]

    def find_results() -> tuple[dict[str, Any], dict[str, dict[int, int]]]:
        arrived = {name: find_arrived(folder) for name, folder in folders.items()}
        return read_records(records, names), arrived

    results, arrived = find_results()
    total = len(tasks) + sum(partitions.values())
    sent = [result[SENT] for result in results.values()]
    if len(sent) < len(names) or _find_lost(sent, arrived):
        numbered = [
            Task(
                task.name,
                {"place": place, "payload": task.payload},
                task.size_bytes,
            )
            for place, task in enumerate(tasks)
        ]
        missing = {
            name: [place for place in range(number) if place not in arrived[name]]
            for name, number in partitions.items()
        }
        send = partial(send_group, sender, str(records), dict(partitions), missing)
        receive = partial(
            receive_partition,
            {name: str(folder) for name, folder in folders.items()},
            str(records),
        )

        def count_done() -> int:
            return sum(
                name.endswith((".json", MARK))
                for folder in (records, *folders.values())
                for name in file_names(folder)
            )

        with (
            reporting_progress(context, job, total, count_done),
            raising_what_was_noted(job, records),
        ):
            run_on_cluster(
                job, context, records, send, partial(in_groups, numbered), receive
            )
        results, arrived = find_results()
    complete_results = check_complete(context, job, names, results, total)
    lost = _find_lost([result.pop(SENT) for result in complete_results], arrived)
    for name, (num_sent, num_arrived) in lost.items():
        for mark in folders[name].glob(f"*{MARK}"):
            mark.unlink()
        context.warn(
            f"{context.stage}/{job}: {num_sent:,} rows were sent to {name}, "
            f"{num_arrived:,} arrived"
        )
    if lost:
        raise IncompleteJobError(
            f"{context.stage}/{job}: the rows that were sent to {', '.join(lost)} are "
            "not those that arrived: the runner lost some; nothing was committed, "
            "rerun to send them again"
        )
    return complete_results, {
        name: Shuffled(folders[name], number, arrived=arrived[name])
        for name, number in partitions.items()
    }


MARK = ".rows"
"""Suffix of an empty file, written last, whose name has the number of arrived rows of a
partition.
"""


def partition_name(partition: int) -> str:
    """File name of a partition with `engine`."""
    return f"{partition:05d}.arrow"


def find_arrived(folder: Path) -> dict[int, int]:
    """Number of rows by completely arrived partition, from one listing of the
    folder.
    """
    marks = sorted(
        name.removesuffix(MARK).split("-")
        for name in file_names(folder)
        if name.endswith(MARK)
    )
    return {int(partition): int(rows) for partition, rows in marks}


def _find_lost(
    sent: Sequence[Mapping[str, int]], arrived: Mapping[str, Mapping[int, int]]
) -> dict[str, tuple[int, int]]:
    """Numbers of sent and arrived rows by name, for names where they differ or the
    columns did not arrive.

    Args:
        sent: per finished task, the number of rows by name.
        arrived: by name, the number of rows by partition.
    """
    lost = {}
    for name, partitions in arrived.items():
        numbers = [rows[name] for rows in sent if name in rows]
        num_sent, num_arrived = sum(numbers), sum(partitions.values())
        if num_sent != num_arrived or bool(numbers) != bool(partitions):
            lost[name] = num_sent, num_arrived
    return lost


def send_group(
    sender: Sender,
    records: str,
    partitions: Mapping[str, int],
    missing: Mapping[str, Sequence[int]],
    group: Sequence[Element],
) -> Iterator[tuple[int, bytes]]:
    """Run the tasks of an element on a cluster worker.

    A task's exception is noted and raised, so that the runner does not group incomplete
    data.

    Args:
        records: folder of the tasks' records.
        partitions: number of partitions by name.
        missing: partitions by name that have not arrived.

    Yields:
        a batch with the number of its name and partition.
    """
    folder = as_path(records)
    numbers = {name: number for number, name in enumerate(partitions)}
    is_missing = {
        name: np.isin(np.arange(number), missing[name])
        for name, number in partitions.items()
    }
    for name, payload in group:
        if failure_path(folder).exists():
            raise RuntimeError("another task has failed")
        try:
            done = yield from _send(
                sender(Task(name, payload["payload"])),
                payload["place"],
                numbers,
                is_missing,
            )
            record_task(name, done, folder)
        except Exception as error:
            note_failure(folder, name, error)
            raise


def _send(
    sending: Sending,
    place: int,
    numbers: Mapping[str, int],
    is_missing: Mapping[str, np.ndarray],
) -> Generator[tuple[int, bytes], None, Done]:
    """Yield a task's rows in batches; returns its result with their number by name."""
    rows_of = Counter[str]()
    run = 0
    while True:
        try:
            name, rows, partitions = next(sending)
        except StopIteration as end:
            done: Done = end.value
            return Done(done.files, {**done.result, SENT: dict(rows_of)})
        for partition, batch in cut_batches(
            rows, partitions, is_missing[name], (place, run)
        ):
            yield numbers[name] << KEY_BITS | partition, batch
        rows_of[name] += len(rows)
        run += 1


def cut_batches(
    rows: pa.Table,
    partitions: np.ndarray,
    is_missing: np.ndarray,
    place: tuple[int, int],
) -> Iterator[tuple[int, bytes]]:
    """Cut rows into batches of about BATCH_BYTES for one partition, each a copy with
    its place.

    Only rows of missing partitions are yielded. An empty table goes to partition 0,
    for its columns.
    """
    rows, ends = by_partition(rows, partitions, len(is_missing))
    each = max(1, BATCH_BYTES * len(rows) // max(rows.nbytes, 1))
    for partition in (
        np.flatnonzero(is_missing & (np.diff(ends) > 0)).tolist()
        if len(rows)
        else [0] * bool(is_missing[0])
    ):
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
    folders: Mapping[str, str],
    records: str,
    number: int,
    batches: Iterable[bytes],
) -> None:
    """Write the batches of a partition to a file in order of arrival, without
    duplicates.

    Args:
        folders: folder by name of all shuffles of the job.
        records: folder of the tasks' records.
        number: key of name and partition.
        batches: as from `cut_batches`.
    """
    name, folder = list(folders.items())[number >> KEY_BITS]
    partition = number & (1 << KEY_BITS) - 1
    received_places = set[bytes]()
    rows = 0
    try:
        path = as_path(folder) / partition_name(partition)
        with atomic_write(path) as sink:
            writer = None
            for content in batches:
                with pa.ipc.open_stream(content) as stream:
                    batch, metadata = stream.read_next_batch_with_custom_metadata()
                place = metadata[PLACE]
                if place not in received_places:
                    writer = writer or pa.ipc.new_file(sink, batch.schema)
                    writer.write_batch(batch, custom_metadata=metadata)
                    rows += batch.num_rows
                    received_places.add(place)
            if writer is not None:
                writer.close()
        mark = as_path(folder) / f"{partition:05d}-{rows}{MARK}"
        write_bytes(mark, b"")
    except Exception as error:
        note_failure(as_path(records), f"{name} {partition}", error)
        raise
