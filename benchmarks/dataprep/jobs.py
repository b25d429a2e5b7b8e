"""Cost of the engine: each job by Beam on two workers, against a plain pool of two over
the same function.

Both sides do equal work: they call the function of the stage, which reads the same
files, runs the same kernels, writes the same tables with the same encoding and forces
each to disk. The pool has threads if the job's kernels release the GIL, else new
processes; starting it is part of its time, as starting Beam is part of the engine's.
The pool does less: it keeps no record of finished tasks, reports no progress, and would
wait forever for a killed worker.

Every job is measured at a size that takes the pool some ten seconds and, in rows of
their own, at one that takes it a second or two, of which starting is the larger part.
The first job of a process imports Beam, while the fork server imports modules for
workers; it is measured in processes that have run no job. A task is done before any
measurement, so that no side compiles kernels. Jobs with more shards than the corpus has
get the same ones again, under other names.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool
from pathlib import Path

from benchmarks.dataprep.texts import library_texts
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, row
from benchmarks.public_data import language_model
from gristmill.core.stage_context import Context
from gristmill.dataprep.dedup.candidate_pairs import KEYS
from gristmill.dataprep.dedup.dedup import make_plan, sketch, sketch_tasks
from gristmill.dataprep.fasttext.fasttext_models import MODEL_SHA256
from gristmill.dataprep.filters.filter import filter_shard
from gristmill.dataprep.langid import langid
from gristmill.dataprep.readers import ingest
from gristmill.dataprep.readers.sources import find_files
from gristmill.dataprep.runners.shuffle import send_to_files
from gristmill.dataprep.runners.tasks import Process, Task, run_tasks, shard_tasks
from gristmill.mixtures.schema.engine import BeamEngine
from gristmill.mixtures.schema.sources import Ingest, Source
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.langid import LanguageId

WORKERS = 2
FILES = 96
DOCUMENTS_PER_FILE = 1600
"""Documents of 4 kB: 6.5 MB of text."""
SECONDS = {"beam_vs_multiprocessing": 10.0, "beam_small_job_vs_multiprocessing": 1.5}
"""Name of the rows -> approximate seconds of such a job in the pool."""
SHARD_BYTES = 1 << 30
REPEATS = 2

Make = Callable[[Path], Process]
"""Makes a job's function, which writes below a folder."""
Work = Callable[[str, Sequence[Task], Process, Path, bool], None]
"""Runs a job: its name, tasks and function, a folder for its other files, and whether
the function holds the GIL.
"""


@dataclass(frozen=True)
class Job:
    """A job to measure.

    Attributes:
        name: within the rows' names.
        inputs: folder of its input files, one per task.
        tasks: makes a task for each file.
        make: makes its function.
        holds_gil: see `run_tasks`.
        is_first: if true, it is measured in processes that have run no job.
    """

    name: str
    inputs: Path
    tasks: Callable[[Path], Sequence[Task]]
    make: Make
    holds_gil: bool = False
    is_first: bool = False


def rows() -> Iterator[Row]:
    """Measure each job at each size, in MB of text per second."""
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place:
        folder = Path(place)
        texts, documents = folder / "texts", folder / "documents"
        file_bytes = write_corpus(texts) / FILES
        run_with_pool(
            "documents",
            text_tasks(texts),
            reads_jsonl(documents),
            documents,
            holds_gil=True,
        )
        for job in jobs(texts, documents):
            task_seconds = time_a_task(job, folder)
            for name, least_seconds in SECONDS.items():
                number = max(WORKERS, math.ceil(least_seconds * WORKERS / task_seconds))
                repeat_files(job.inputs, number)
                tasks = job.tasks(job.inputs)[:number]
                yield measure(
                    f"{name}, {job.name}", job, tasks, file_bytes * number, folder
                )


def jobs(texts: Path, documents: Path) -> Iterator[Job]:
    """Return the jobs; those of the language model only if it is on this machine."""
    yield Job(
        "read JSONL, first job of a process",
        texts,
        text_tasks,
        reads_jsonl,
        holds_gil=True,
        is_first=True,
    )
    yield Job("read JSONL", texts, text_tasks, reads_jsonl, holds_gil=True)
    inputs = {"ingest": documents}
    yield Job("filter", documents, shard_tasks, partial(filters, inputs))
    yield Job("sketch", documents, tasks_to_sketch, partial(sketches, inputs))
    model = language_model()
    if model is not None:
        yield Job("langid", documents, shard_tasks, partial(identifies, inputs, model))


def time_a_task(job: Job, folder: Path) -> float:
    """Return the seconds of a job's first task, after its kernels are compiled."""
    process, task = job.make(folder / "warm"), job.tasks(job.inputs)[0]
    process(task)
    start = time.perf_counter()
    process(task)
    return time.perf_counter() - start


def repeat_files(folder: Path, number: int) -> None:
    """Link the files of a folder under further names, in rotation, until it has
    `number` of them.
    """
    present = sorted(path for path in folder.iterdir() if path.is_file())
    for count in range(len(present), number):
        source = present[count % len(present)]
        os.link(source, folder / f"{source.stem}-again-{count:06d}{source.suffix}")


def measure(
    name: str, job: Job, tasks: Sequence[Task], size: float, folder: Path
) -> Row:
    """Run a job both ways, by turns; the best time of each counts."""
    seconds: dict[Work, list[float]] = {run_with_beam: [], run_with_pool: []}
    for repeat in range(REPEATS):
        for work, times in seconds.items():
            out = folder / f"{name}-{work.__name__}-{repeat}"
            times.append(time_job(job, work, tasks, job.make(out), out))
            shutil.rmtree(out)
    ours, peer = min(seconds[run_with_beam]), min(seconds[run_with_pool])
    pool = "multiprocessing.Pool" if job.holds_gil else "ThreadPool"
    note = (
        f"{size / 1e6:.0f} MB of text in {len(tasks)} shards, {WORKERS} workers; "
        f"peer: {pool}, {peer:.1f} s"
    )
    return row(name, size / 1e6 / ours, size / 1e6 / peer, "MB/s", note)


def time_job(
    job: Job, work: Work, tasks: Sequence[Task], process: Process, out: Path
) -> float:
    """Return the seconds of a job, in this process or in a new one."""
    arguments = (work, job.name, tasks, process, out, job.holds_gil)
    if not job.is_first:
        return seconds_of(*arguments)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(seconds_of, *arguments).result()


def seconds_of(
    work: Work,
    name: str,
    tasks: Sequence[Task],
    process: Process,
    out: Path,
    holds_gil: bool,
) -> float:
    """Run a job; returns its seconds."""
    start = time.perf_counter()
    work(name, tasks, process, out, holds_gil)
    return time.perf_counter() - start


def run_with_beam(
    job: str, tasks: Sequence[Task], process: Process, out: Path, holds_gil: bool
) -> None:
    """Run the tasks as a stage does."""
    context = Context(
        work=out / "work", beam=BeamEngine(workers=WORKERS), emit=lambda event: None
    )
    run_tasks(job, tasks, process, context, holds_gil=holds_gil)


def run_with_pool(
    job: str, tasks: Sequence[Task], process: Process, out: Path, holds_gil: bool
) -> None:
    """Run the tasks as a short script does."""
    with (
        get_context("spawn").Pool(WORKERS) if holds_gil else ThreadPool(WORKERS) as pool
    ):
        pool.map(partial(call, process), tasks, chunksize=1)


def call(process: Process, task: Task) -> object:
    """Do a task in a pool's worker."""
    return process(task).result


def text_tasks(texts: Path) -> list[Task]:
    """Return the tasks of `ingest`; a file is a shard."""
    source = Source.model_validate({"path": str(texts / "*.jsonl")})
    return ingest.plan(
        {"web": source}, {"web": find_files("web", source)}, shard_bytes=1
    )


def reads_jsonl(out: Path) -> Process:
    """Return the function of `ingest`; a file is a shard."""
    return partial(ingest.ingest_task, str(out), Ingest(shard_bytes=SHARD_BYTES))


def filters(inputs: Mapping[str, Path], out: Path) -> Process:
    """Return the function of `filter` with its default rules."""
    return partial(filter_shard, inputs=inputs, section=Filter(), out=out)


def sketches(inputs: Mapping[str, Path], out: Path) -> Process:
    """Return the function of the first job of `dedup`."""
    plan = make_plan(inputs, Dedup(), out, Context(work=out))
    return partial(
        send_to_files, partial(sketch, plan=plan), str(out), {KEYS: plan.num_partitions}
    )


def tasks_to_sketch(documents: Path) -> list[Task]:
    """Return the tasks of the first job of `dedup`."""
    return sketch_tasks(
        make_plan({"ingest": documents}, Dedup(), documents, Context(work=documents))
    )


def identifies(inputs: Mapping[str, Path], model: str, out: Path) -> Process:
    """Return the function of `langid`, which keeps one language."""
    section = LanguageId(model=model)  # type: ignore[arg-type]
    return partial(
        langid.identify_shard,
        inputs=inputs,
        section=section,
        out=out,
        sha256=MODEL_SHA256,
    )


def write_corpus(folder: Path) -> int:
    """Write JSONL files of texts that differ from file to file; returns the bytes of
    their texts (UTF-8).
    """
    half = DOCUMENTS_PER_FILE // 2
    texts = library_texts(half) + documentation(DOCUMENTS_PER_FILE - half)
    folder.mkdir(parents=True)
    size = 0
    for number in range(FILES):
        with open(folder / f"{number:05d}.jsonl", "w", encoding="utf-8") as sink:
            for line, text in enumerate(texts):
                text = f"{number} {line} {text} {number}"
                size += len(text.encode())
                sink.write(json.dumps({"text": text}) + "\n")
    return size
