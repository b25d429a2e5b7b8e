"""Memory does not grow with the documents: ingest, dedup, tokenize and mix of many
short ones, each in its own process.

Documents of 200 bytes, words of documentation of installed packages, are drawn by
seeds; one in twenty is a copy of an earlier one, and one in twenty a near copy.
Measured are the peak of anonymous memory (the system can drop mapped files at any time)
of the largest process and of all together, the time, and the files of a step during its
work and at its end.

The last rows look up documents as `gristmill explain` does: a kept one, and a dropped
one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.checkout import ROOT
from benchmarks.dataprep.dedup_million import words_of_documentation
from benchmarks.measuring import Row, cost_row, process_tree, row
from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.engine import BeamEngine, ShuffleForm

DOCUMENTS = 30_000_000
LIMIT_BYTES = 3 << 30
WORKERS = 2
WORDS_PER_DOCUMENT = 31
"""Words for about 200 bytes."""
FILE_DOCUMENTS = 100_000
COPIED = 0.05
VOCAB_SIZE, SEQUENCE_LENGTH = 4096, 2048
SAMPLE_SECONDS = 0.2
STEPS = ("ingest", "dedup", "tokenize", "mix")
LOOK_UPS = 20


def rows(documents: int = DOCUMENTS, folder: Path | None = None) -> Iterator[Row]:
    """Measure every step, against the limit.

    Args:
        documents: number of documents; 30 million need about 35 GB of disk.
        folder: work folder, instead of a temporary one; the outputs stay there.

    Raises:
        MemoryError: a step exceeded the limit, or failed.
    """
    with tempfile.TemporaryDirectory(prefix="gristmill-bounds-") as temporary:
        root = Path(temporary if folder is None else folder)
        text_bytes = write_texts(root / "texts", documents)
        note = (
            f"{documents:,} documents, {text_bytes / 1e6:,.0f} MB of text, "
            f"{WORKERS} workers"
        )
        for step in STEPS:
            usage = measure(root, step)
            run = StepRun(**json.loads(usage.printed))
            # the tokenizer learns from the first file; the others are not needed any
            # more
            if step == "ingest":
                for path in sorted((root / "texts").glob("*.jsonl"))[1:]:
                    path.unlink()
            yield memory_row(f"bounds: {step}, all processes", usage.all_bytes, note)
            yield memory_row(
                f"bounds: {step}, largest process", usage.largest_bytes, note
            )
            yield row(
                f"bounds: {step}, time",
                run.seconds,
                None,
                "s",
                f"{usage.cpu_seconds:.1f} s of processor time; "
                f"{run.work_bytes / 1e6:,.0f} MB in {run.work_files} files while it "
                f"works, {run.out_bytes / 1e6:,.0f} MB in {run.out_files} files when "
                f"it is done; {usage.mapped_bytes / 1e6:,.0f} MB mapped",
            )
        yield from look_up_rows(root, note)


def memory_row(name: str, size: int, note: str) -> Row:
    """Return a row of bytes of memory against the limit."""
    return cost_row(
        name,
        max(size, 1) / 2**30,
        LIMIT_BYTES / 2**30,
        "GiB",
        f"{note}; peer: the limit",
    )


def write_texts(
    folder: Path, documents: int, file_documents: int = FILE_DOCUMENTS
) -> int:
    """Write JSONL files of short documents, the same in every run; returns the bytes of
    text.
    """
    words, table = words_of_documentation()
    shape = (file_documents, WORDS_PER_DOCUMENT)
    originals = table[np.random.default_rng(11).integers(0, len(table), shape)]
    folder.mkdir(parents=True, exist_ok=True)
    text_bytes = 0
    for number, first in enumerate(range(0, documents, file_documents)):
        size = min(file_documents, documents - first)
        if number == 0:
            texts = originals[:size]
        else:
            generator = np.random.default_rng((11, number))
            texts = table[generator.integers(0, len(table), (size, WORDS_PER_DOCUMENT))]
            kind = generator.random(size)
            copies, near_copies = (
                np.flatnonzero(kind < 2 * COPIED),
                np.flatnonzero(kind < COPIED),
            )
            texts[copies] = originals[
                generator.integers(0, len(originals), len(copies))
            ]
            texts[near_copies, -1] = generator.integers(0, len(words), len(near_copies))
        text_bytes += _write_lines(folder / f"{number:05d}.jsonl", texts, words)
    return text_bytes


def _write_lines(path: Path, texts: np.ndarray, words: pa.Array) -> int:
    offsets = np.arange(0, texts.size + 1, texts.shape[1], dtype=np.int32)
    joined = pc.binary_join(
        pa.ListArray.from_arrays(
            pa.array(offsets), words.take(pa.array(texts.ravel()))
        ),
        " ",
    )
    lines = pc.binary_join_element_wise('{"text": "', joined, '"}\n', "")
    path.write_bytes("".join(lines.to_pylist()).encode())
    return int(pc.sum(pc.binary_length(joined)).as_py())


@dataclass(frozen=True)
class Usage:
    """Time and memory of a process and its children.

    Attributes:
        all_bytes: most memory of all processes that no file backs.
        largest_bytes: the same, of the largest process.
        mapped_bytes: most mapped bytes of files.
        cpu_seconds: of all processes.
        printed: last line of the output.
    """

    all_bytes: int
    largest_bytes: int
    mapped_bytes: int
    cpu_seconds: float
    printed: str


def measure(folder: Path, step: str) -> Usage:
    """Run a step in a process of its own.

    Raises:
        MemoryError: it exceeded LIMIT_BYTES, or failed.
    """
    command = [sys.executable, "-m", "benchmarks.bounds", step, str(folder)]
    all_bytes = largest_bytes = mapped_bytes = 0
    cpu_seconds = dict[int, float]()
    with open(folder / f"{step}.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    try:
        while process.poll() is None and all_bytes <= LIMIT_BYTES:
            tree = process_tree(process.pid)
            for pid in tree:
                cpu_seconds[pid] = max(
                    processor_seconds(pid), cpu_seconds.get(pid, 0.0)
                )
            sizes = [memory_of(pid) for pid in tree]
            all_bytes = max(all_bytes, sum(size.anonymous for size in sizes))
            largest_bytes = max(largest_bytes, *(size.anonymous for size in sizes))
            mapped_bytes = max(mapped_bytes, sum(size.mapped for size in sizes))
            time.sleep(SAMPLE_SECONDS)
    finally:
        process.kill()  # its workers end with it
        process.wait()
    printed = (folder / f"{step}.log").read_text(errors="replace")
    if process.returncode != 0 or all_bytes > LIMIT_BYTES:
        raise MemoryError(
            f"{step} under a limit of {LIMIT_BYTES} bytes took {all_bytes} and ended "
            f"with exit code {process.returncode}; its last lines:\n{printed[-2000:]}"
        )
    return Usage(
        all_bytes,
        largest_bytes,
        mapped_bytes,
        sum(cpu_seconds.values()),
        printed.splitlines()[-1],
    )


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process; 0 after its end."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


class Memory(NamedTuple):
    """Bytes of a process that no file backs, and of mapped files, with its share of
    common pages.
    """

    anonymous: int
    mapped: int


def memory_of(pid: int) -> Memory:
    """Return the memory of a process; 0 after its end."""
    try:
        usage = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return Memory(0, 0)
    sizes = dict(line.split(":", 1) for line in usage.splitlines()[1:])
    return Memory(
        int(sizes["Pss_Anon"].split()[0]) * 1024,
        int(sizes["Pss_File"].split()[0]) * 1024,
    )


@dataclass(frozen=True)
class StepRun:
    """Seconds of a step, and bytes and number of the files in its work folder and its
    output.
    """

    seconds: float
    work_bytes: int
    work_files: int
    out_bytes: int
    out_files: int


def run_step(step: str, folder: Path) -> StepRun:
    """Run a step in this process."""
    work, out = folder / f"{step}-work", folder / step
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    out.mkdir(exist_ok=True)
    start = time.perf_counter()
    run_step_in(step, folder, folder / "texts", work=work)
    seconds = time.perf_counter() - start
    work_sizes, out_sizes = (
        [path.stat().st_size for path in place.rglob("*") if path.is_file()]
        for place in (work, out)
    )
    shutil.rmtree(work)
    return StepRun(
        seconds, sum(work_sizes), len(work_sizes), sum(out_sizes), len(out_sizes)
    )


def run_step_in(
    step: str,
    folder: Path,
    texts: Path,
    work: Path | None = None,
    shuffle: ShuffleForm | None = None,
) -> None:
    """Run a step in a folder, which may lie in a store.

    Args:
        step: its name.
        folder: of all steps' outputs.
        texts: folder of the documents.
        work: its work folder; beside its output if None.
        shuffle: see `BeamEngine.shuffle`.
    """
    context = Context(
        work=work or folder / f"{step}-work",
        stage=step,
        beam=BeamEngine(workers=WORKERS, shuffle=shuffle),
        emit=lambda event: None,
    )
    stages = ("ingest", "dedup", "tokenizer", "tokenize", "mix")
    inputs = {name: folder / name for name in stages[: stages.index(step)]}
    if step == "tokenize":
        _write_tokenizer(texts, folder / "tokenizer")
    RUNS[step](texts, inputs, folder / step, context)


def _ingest(
    texts: Path, inputs: Mapping[str, Path], out: Path, context: Context
) -> object:
    from gristmill.dataprep.readers import ingest

    # A small file makes a shard of its own.
    section = {"shard_bytes": min(16_000_000, (texts / "00000.jsonl").stat().st_size)}
    return ingest.run(
        {},
        {"sources": {"web": {"path": str(texts / "*.jsonl")}}, "ingest": section},
        out,
        context,
    )


def _dedup(
    texts: Path, inputs: Mapping[str, Path], out: Path, context: Context
) -> object:
    from gristmill.dataprep.dedup import dedup

    return dedup.run({"ingest": inputs["ingest"]}, {}, out, context)


def _write_tokenizer(texts: Path, folder: Path) -> None:
    from gristmill.tokenize.encoding.bpe import train
    from gristmill.tokenize.encoding.tokenizer import write_tokenizer
    from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

    with open(texts / "00000.jsonl", encoding="utf-8") as lines:
        sample = [
            json.loads(line)["text"]
            for line, _ in zip(lines, range(2000), strict=False)
        ]
    write_tokenizer(train(TokenizerSample({"web": sample}, {}), VOCAB_SIZE), folder)


def _tokenize(
    texts: Path, inputs: Mapping[str, Path], out: Path, context: Context
) -> object:
    from gristmill.tokenize.encoding import encode

    return encode.run(inputs, {}, out, context)


def _mix(
    texts: Path, inputs: Mapping[str, Path], out: Path, context: Context
) -> object:
    from gristmill.tokenize.mixing import mix

    tokens = (
        sum(path.stat().st_size for path in inputs["tokenize"].glob("*.tokens.bin"))
        // 2
    )
    config: mix.MixRecipe = {
        "mix": {"tokens": int(tokens * 0.98), "sequence_length": SEQUENCE_LENGTH},
        "sources": {"web": {}},
        "seed": 1,
    }
    return mix.run(inputs, config, out, context)


RUNS = {"ingest": _ingest, "dedup": _dedup, "tokenize": _tokenize, "mix": _mix}


def look_up_rows(folder: Path, note: str) -> Iterator[Row]:
    """Measure look-ups by id, as of `gristmill explain`, against DuckDB on the ids of
    the same files.
    """
    usage = measure(folder, "look_up")
    for kind, (ours, peer) in json.loads(usage.printed).items():
        yield cost_row(
            f"explain: a {kind} document's id looked up",
            ours,
            peer,
            "s",
            f"{note}; median of {LOOK_UPS}; peer: DuckDB over all document shards",
        )
    limit_row = memory_row("explain: memory of the look-ups", usage.all_bytes, note)
    yield replace(limit_row, note=f"{limit_row.note}; DuckDB's is in it")


def look_up(folder: Path) -> dict[str, list[float]]:
    """Return the median seconds of a look-up, ours and DuckDB's, of kept documents and
    of dropped ones.
    """
    import duckdb

    from gristmill.dataprep.documents import read_table, shard_names
    from gristmill.flows.questions.find_documents import find_document

    inputs = {
        name: folder / name
        for name in ("ingest", "dedup", "tokenizer", "tokenize", "mix")
    }
    generator = np.random.default_rng(5)
    shards = shard_names(inputs["ingest"])
    query = (
        f"SELECT filename FROM read_parquet('{inputs['ingest']}/part-*.parquet', "
        "filename=true) WHERE id = ?"
    )
    medians = {}
    for kind in ("kept", "dropped"):
        seconds = []
        for _ in range(LOOK_UPS):
            shard = shards[generator.integers(len(shards))]
            table = read_table(inputs["dedup"] / shard, ["id", "keep"])
            candidates = np.flatnonzero(table["keep"].to_numpy() == (kind == "kept"))
            row_number = int(generator.choice(candidates)) if len(candidates) else 0
            document_id = table["id"][row_number].as_py()
            start = time.perf_counter()
            place = find_document(inputs, document_id.hex())
            middle = time.perf_counter()
            assert place is not None
            assert place[1:] == (shard, row_number)
            duckdb.execute(query, [document_id]).fetchall()
            seconds.append((middle - start, time.perf_counter() - middle))
        medians[kind] = np.median(seconds, axis=0).tolist()
    return medians


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1] == "look_up":
        print(json.dumps(look_up(Path(sys.argv[2]))))
    else:
        print(json.dumps(asdict(run_step(sys.argv[1], Path(sys.argv[2])))))
