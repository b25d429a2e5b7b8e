"""What the engine costs: each job by Beam on two workers, against a plain pool of two over the same function.

Both sides do equal work: they call the very function of the stage, which reads the same files, runs the same kernels,
writes the same tables with the same encoding and forces each to the disk. The pool is of threads where the job's
kernels release the GIL, else of processes that are started afresh; starting it is part of its time, as starting Beam
is part of the engine's. The pool does less: it keeps no record of what is finished, reports no progress, and would
wait for ever for a worker that was killed.

Every job is measured at a size that takes the pool some ten seconds and, in rows of their own, at one that takes it a
second or two, of which what starting costs is the larger part. The first job of a process imports Beam, while the fork
server imports what workers need; it is measured in processes that have run none. One task is done before anything is
measured, so that no side compiles kernels. Jobs with more shards than the corpus has get the same ones again, under
other names.
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
from typing import Any

from benchmarks.checkout import data_folder
from benchmarks.dataprep.texts import library_texts
from benchmarks.installed_texts import documentation
from gristmill.core.stage_context import Context
from gristmill.dataprep.duplicates.dedup import make_plan, sketch, sketch_tasks
from gristmill.dataprep.duplicates.dedup_keys import KEYS
from gristmill.dataprep.fasttext.fasttext_models import MODEL_SHA256, ModelError, find_model
from gristmill.dataprep.filtering.filter import filter_shard
from gristmill.dataprep.jobs.shuffle import send_to_files
from gristmill.dataprep.jobs.tasks import Done, Process, Task, run_tasks, shard_tasks
from gristmill.dataprep.langid import langid
from gristmill.dataprep.reading import ingest
from gristmill.dataprep.reading.sources import find_files
from gristmill.mixtures.sources import Ingest, Source
from gristmill.mixtures.steps.dedup import Dedup
from gristmill.mixtures.steps.filter import Filter
from gristmill.mixtures.steps.langid import LanguageId

WORKERS = 2
FILES = 96
DOCUMENTS_PER_FILE = 1600
"""Of 4 kB: 6.5 MB of text."""
SECONDS = {"beam_vs_multiprocessing": 10.0, "beam_small_job_vs_multiprocessing": 1.5}
"""Name of the rows -> how long such a job takes the pool, about."""
SHARD_BYTES = 1 << 30
REPEATS = 2

Make = Callable[[Path], Process]
"""Makes a job's function that writes below a folder."""
Work = Callable[[str, Sequence[Task], Process, Path, bool], None]
"""Runs a job: its name, tasks and function, a folder for what else it writes, whether the function holds the GIL."""


@dataclass(frozen=True)
class Job:
    """A job to measure.

    Attributes:
        name: within the rows' names.
        inputs: folder of its input files, one per task.
        tasks: makes the tasks of the files that are there.
        make: makes its function.
        holds_gil: as `run_tasks` takes it.
        is_first: whether it is measured in processes that have run no job.
    """

    name: str
    inputs: Path
    tasks: Callable[[Path], Sequence[Task]]
    make: Make
    holds_gil: bool = False
    is_first: bool = False


def rows(
    files: int = FILES, documents_per_file: int = DOCUMENTS_PER_FILE, seconds: Mapping[str, float] = SECONDS
) -> Iterator[dict[str, Any]]:
    """Measure, one row per job and size: MB of text per second."""
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place:
        folder = Path(place)
        texts, documents = folder / "texts", folder / "documents"
        file_bytes = write_corpus(texts, files, documents_per_file) / files
        run_with_pool("documents", text_tasks(texts), reads_jsonl(documents), documents, holds_gil=True)
        for job in jobs(texts, documents):
            task_seconds = time_a_task(job, folder)
            for name, least in seconds.items():
                number = max(WORKERS, math.ceil(least * WORKERS / task_seconds))
                repeat_files(job.inputs, number)
                yield row(f"{name}, {job.name}", job, job.tasks(job.inputs)[:number], file_bytes * number, folder)


def jobs(texts: Path, documents: Path) -> Iterator[Job]:
    """The jobs, those of the language model where there is one."""
    yield Job("read JSONL, first job of a process", texts, text_tasks, reads_jsonl, holds_gil=True, is_first=True)
    yield Job("read JSONL", texts, text_tasks, reads_jsonl, holds_gil=True)
    inputs = {"ingest": documents}
    yield Job("filter", documents, shard_tasks, partial(filters, inputs))
    yield Job("sketch", documents, tasks_to_sketch, partial(sketches, inputs))
    model = language_model()
    if model is not None:
        yield Job("langid", documents, shard_tasks, partial(identifies, inputs, model))


def time_a_task(job: Job, folder: Path) -> float:
    """Seconds that a job's first task takes, once its kernels are compiled."""
    process, task = job.make(folder / "warm"), job.tasks(job.inputs)[0]
    process(task)
    begin = time.perf_counter()
    process(task)
    return time.perf_counter() - begin


def repeat_files(folder: Path, number: int) -> None:
    """Let a folder have so many files at least: further names of those that it has, in turns."""
    present = sorted(path for path in folder.iterdir() if path.is_file())
    for count in range(len(present), number):
        source = present[count % len(present)]
        os.link(source, folder / f"{source.stem}-again-{count:06d}{source.suffix}")


def row(name: str, job: Job, tasks: Sequence[Task], size: float, folder: Path) -> dict[str, Any]:
    """Measure one job both ways, by turns, and take the best time of each."""
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for repeat in range(REPEATS):
        for side, work in (("ours", run_with_beam), ("peer", run_with_pool)):
            out = folder / f"{name}-{side}-{repeat}"
            process = job.make(out)
            seconds[side].append(time_job(job, work, tasks, process, out))
            shutil.rmtree(out)
    ours, peer = (size / 1e6 / min(seconds[side]) for side in ("ours", "peer"))
    pool = "multiprocessing.Pool" if job.holds_gil else "ThreadPool"
    return {
        "name": name,
        "ours": ours,
        "peer": peer,
        "unit": "MB/s",
        "ratio": ours / peer,
        "note": f"{size / 1e6:.0f} MB of text in {len(tasks)} shards, {WORKERS} workers; peer: {pool}, "
        f"{min(seconds['peer']):.1f} s",
    }


def time_job(job: Job, work: Work, tasks: Sequence[Task], process: Process, out: Path) -> float:
    """Seconds that a job takes, in this process or in a fresh one."""
    arguments = (work, job.name, tasks, process, out, job.holds_gil)
    if not job.is_first:
        return seconds_of(*arguments)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(seconds_of, *arguments).result()


def seconds_of(work: Work, name: str, tasks: Sequence[Task], process: Process, out: Path, holds_gil: bool) -> float:
    """Run a job and take its time."""
    begin = time.perf_counter()
    work(name, tasks, process, out, holds_gil)
    return time.perf_counter() - begin


def run_with_beam(job: str, tasks: Sequence[Task], process: Process, out: Path, holds_gil: bool) -> None:
    """Run the tasks as a stage does."""
    context = Context(work=out / "work", workers=WORKERS, emit=lambda event: None)
    run_tasks(job, tasks, process, context, holds_gil=holds_gil)


def run_with_pool(job: str, tasks: Sequence[Task], process: Process, out: Path, holds_gil: bool) -> None:
    """Run the tasks as a short script would."""
    with get_context("spawn").Pool(WORKERS) if holds_gil else ThreadPool(WORKERS) as pool:
        pool.map(partial(call, process), tasks, chunksize=1)


def call(process: Process, task: Task) -> Mapping[str, Any]:
    """What a pool's worker does with a task."""
    done: Done = process(task)
    return done.result


def text_tasks(texts: Path) -> list[Task]:
    """The tasks of `ingest`; a file is a shard."""
    source = Source.model_validate({"path": str(texts / "*.jsonl")})
    return ingest.plan({"web": source}, {"web": find_files("web", source.model_dump())}, shard_bytes=1)


def reads_jsonl(out: Path) -> Process:
    """The function of `ingest`; a file is a shard."""
    return partial(ingest.ingest_task, str(out), Ingest(shard_bytes=SHARD_BYTES))


def filters(inputs: Mapping[str, Path], out: Path) -> Process:
    """The function of `filter` with its default rules."""
    return partial(filter_shard, inputs=inputs, config=Filter().model_dump(mode="json"), out=out)


def sketches(inputs: Mapping[str, Path], out: Path) -> Process:
    """The function of the first job of `dedup`."""
    plan = make_plan(inputs, Dedup(), out, Context(work=out))
    return partial(send_to_files, partial(sketch, plan=plan), str(out), {KEYS: plan.num_partitions})


def tasks_to_sketch(documents: Path) -> list[Task]:
    """The tasks of the first job of `dedup`."""
    return sketch_tasks(make_plan({"ingest": documents}, Dedup(), documents, Context(work=documents)))


def identifies(inputs: Mapping[str, Path], model: str, out: Path) -> Process:
    """The function of `langid` with one language to keep."""
    config = LanguageId(model=model).model_dump(mode="json")  # type: ignore[arg-type]
    return partial(langid.identify_shard, inputs=inputs, config=config, out=out, sha256=MODEL_SHA256)


def language_model() -> str | None:
    """Where the language model lies on this machine, or None."""
    local = data_folder() / "langid" / "lid176" / "lid.176.ftz"
    try:
        return str(find_model(str(local) if local.exists() else None))
    except ModelError:
        return None


def write_corpus(folder: Path, files: int, documents: int) -> int:
    """Write JSONL files of texts that differ from file to file; returns the bytes of text in them (UTF-8)."""
    texts = library_texts(documents // 2) + documentation(documents - documents // 2)
    folder.mkdir(parents=True)
    size = 0
    for number in range(files):
        with open(folder / f"{number:05d}.jsonl", "w", encoding="utf-8") as sink:
            for row, text in enumerate(texts):
                text = f"{number} {row} {text} {number}"
                size += len(text.encode())
                sink.write(json.dumps({"text": text}) + "\n")
    return size
