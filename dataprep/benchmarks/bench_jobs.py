"""What the engine costs: each job by Beam on two workers, against a plain pool of two over the same function.

Both sides call the very function of the stage, which writes its files and forces them to the disk. The pool is of
threads where the job's kernels release the GIL, else of processes that are started afresh. Starting it is part of its
time, as starting Beam is part of the engine's. The first job of a process imports Beam, here and in the fork server at
the same time, and has a row of its own; later jobs find both ready. One task is done before anything is measured, so
that no side compiles kernels. The pool does less: it keeps no record of what is finished, reports no progress, and
would wait for ever for a worker that was killed.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from gristmill.dataprep.benchmarks.bench import library_texts, synthetic_texts
from gristmill.dataprep.benchmarks.public_data import data_folder
from gristmill.dataprep.context import Context
from gristmill.dataprep.duplicates.dedup import make_plan, sketch, sketch_tasks
from gristmill.dataprep.duplicates.dedup_plan import Plan
from gristmill.dataprep.filtering.filter import filter_shard
from gristmill.dataprep.jobs.engine import Done, Process, Task, run_tasks, shard_tasks
from gristmill.dataprep.judges import langid
from gristmill.dataprep.judges.models import MODEL_SHA256, ModelError, find_model
from gristmill.dataprep.reading import ingest
from gristmill.dataprep.reading.extraction_guard import Limits
from gristmill.dataprep.reading.sources import find_files
from gristmill.mixtures.dedup import Dedup
from gristmill.mixtures.language import LanguageId
from gristmill.mixtures.rules import Filter
from gristmill.mixtures.sources import Source

WORKERS = 2
FILES = 96
DOCUMENTS_PER_FILE = 1600
"""Of 4 kB: 620 MB of text, so that a job takes some seconds; what starting it costs is what the ratio shows."""
FILTERED, IDENTIFIED = 64, 24
"""Shards that slower jobs take of them, for as many seconds."""
SHARD_BYTES = 1 << 30
REPEATS = 2

Make = Callable[[Path], Process]
"""Makes a job's function that writes below a folder."""


def rows(files: int = FILES, documents_per_file: int = DOCUMENTS_PER_FILE) -> Iterator[dict[str, Any]]:
    """Measure, one row per job: MB of text per second."""
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as place:
        folder = Path(place)
        size = write_corpus(folder / "texts", files, documents_per_file)
        source = Source.model_validate({"path": str(folder / "texts" / "*.jsonl")})
        listing = {"web": find_files("web", source.model_dump())}
        reading = ingest.plan({"web": source}, listing, shard_bytes=1)
        documents = folder / "documents"
        yield row("read JSONL, first job of a process", reading, reads_jsonl, size, folder, holds_gil=True, repeats=1)
        yield row("read JSONL", reading, reads_jsonl, size, folder, holds_gil=True)
        for task in reading[:FILTERED]:
            reads_jsonl(documents)(task)
        shards = shard_tasks(documents)
        size = size * len(shards) // files  # every file holds as much
        inputs = {"ingest": documents}
        yield row("filter", shards, partial(filters, inputs), size, folder)
        plan = make_plan(inputs, Dedup(), folder, Context(work=folder))
        yield row("sketch", sketch_tasks(plan), partial(sketches, plan), size, folder)
        model, some = language_model(), shards[:IDENTIFIED]
        if model is not None:
            size = size * len(some) // len(shards)
            yield row("langid", some, partial(identifies, inputs, model), size, folder, holds_gil=True)


def row(
    name: str, tasks: Sequence[Task], make: Make, size: int, folder: Path, holds_gil: bool = False,
    repeats: int = REPEATS,
) -> dict[str, Any]:  # fmt: skip
    """Measure one job both ways, by turns, and take the best time of each."""
    make(folder / f"{name}-warm")(tasks[0])  # compiles, or loads what an earlier run compiled
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    for repeat in range(repeats):
        for side, work in (("ours", run_with_beam), ("peer", run_with_pool)):
            out = folder / f"{name}-{side}-{repeat}"
            begin = time.perf_counter()
            work(name, tasks, make(out), out, holds_gil)
            seconds[side].append(time.perf_counter() - begin)
            shutil.rmtree(out)
    ours, peer = (size / 1e6 / min(seconds[side]) for side in ("ours", "peer"))
    pool = "multiprocessing.Pool" if holds_gil else "ThreadPool"
    return {"name": f"beam_vs_multiprocessing, {name}", "ours": ours, "peer": peer, "unit": "MB/s",
            "ratio": ours / peer, "note": f"{WORKERS} workers; peer: {pool}"}  # fmt: skip


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


def reads_jsonl(out: Path) -> Process:
    """The function of `ingest`; a file is a shard."""
    return partial(ingest.ingest_task, str(out), SHARD_BYTES, Limits())


def filters(inputs: Mapping[str, Path], out: Path) -> Process:
    """The function of `filter` with its default rules."""
    return partial(filter_shard, inputs=inputs, config=Filter().model_dump(mode="json"), out=out)


def sketches(plan: Plan, out: Path) -> Process:
    """The function of the first job of `dedup`."""
    return partial(sketch, plan=replace(plan, work=out, out=out))


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
    texts = library_texts(documents // 2) + synthetic_texts(documents - documents // 2)
    folder.mkdir(parents=True)
    size = 0
    for number in range(files):
        with open(folder / f"{number:05d}.jsonl", "w", encoding="utf-8") as sink:
            for row, text in enumerate(texts):
                text = f"{number} {row} {text} {number}"
                size += len(text.encode())
                sink.write(json.dumps({"text": text}) + "\n")
    return size
