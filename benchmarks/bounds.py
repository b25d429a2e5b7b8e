"""Memory does not grow with the documents: ingest, dedup, tokenize and mix of many short ones, each in its own process.

Documents of 200 bytes, words of documentation of installed packages, are drawn by seeds, one in twenty a copy of an earlier one and one nearly so. What is measured is
the peak of anonymous memory (mapped files can be given back at any time) of the largest process and of all together, the time, and
what a step leaves on the disk while it works and when it is done. `gristmill plan MANIFEST --documents N` draws these
figures on (`flows/planning/at_scale.py`).

The last rows ask for documents as `gristmill explain` does: one that lies in a row, and one that was dropped.
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
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.checkout import ROOT
from benchmarks.dataprep.dedup_million import words_of_documentation
from benchmarks.measuring import Row, process_tree, row
from gristmill.core.stage_context import Context

DOCUMENTS = 30_000_000
LIMIT_BYTES = 3 << 30
WORKERS = 2
WORDS_PER_DOCUMENT = 31
"""About 200 bytes."""
FILE_DOCUMENTS = 100_000
COPIED = 0.05
VOCAB_SIZE, SEQUENCE_LENGTH = 4096, 2048
SAMPLE_SECONDS = 0.2
STEPS = ("ingest", "dedup", "tokenize", "mix")
LOOK_UPS = 20


def rows(documents: int = DOCUMENTS, folder: Path | None = None) -> Iterator[Row]:
    """Measure every step, against the limit.

    Args:
        documents: how many; 30 million take about 35 GB of disk.
        folder: where to work, instead of a temporary one; the outputs stay there.

    Raises:
        MemoryError: a step needed more than the limit, or failed.
    """
    with tempfile.TemporaryDirectory(prefix="gristmill-bounds-") as temporary:
        root = temporary if folder is None else str(folder)
        made = write_texts(Path(root) / "texts", documents)
        note = f"{documents:,} documents, {made / 1e6:,.0f} MB of text, {WORKERS} workers"
        for step in STEPS:
            found = measure(Path(root), step)
            if step == "ingest":  # the first file teaches the tokenizer; the others have served their turn
                for path in sorted((Path(root) / "texts").glob("*.jsonl"))[1:]:
                    path.unlink()
            for name, key in (("all processes", "all_bytes"), ("largest process", "largest_bytes")):
                yield {
                    **row(
                        f"bounds: {step}, {name}",
                        found[key] / 2**30,
                        LIMIT_BYTES / 2**30,
                        "GiB",
                        f"{note}; peer: the limit",
                    ),
                    "ratio": LIMIT_BYTES / max(1, found[key]),
                }
            yield row(
                f"bounds: {step}, time",
                found["seconds"],
                None,
                "s",
                f"{found['cpu_seconds']:.1f} s of processor time; {found['work_bytes'] / 1e6:,.0f} MB in "
                f"{found['work_files']} files while it works, {found['out_bytes'] / 1e6:,.0f} MB in "
                f"{found['out_files']} files when it is done; {found['mapped_bytes'] / 1e6:,.0f} MB mapped",
            )
        yield from look_up_rows(Path(root), note)


def write_texts(folder: Path, documents: int, file_documents: int = FILE_DOCUMENTS) -> int:
    """Write JSONL files of short documents, the same in every run; bytes of text."""
    generator = np.random.default_rng(11)
    words, table = words_of_documentation()
    originals = table[generator.integers(0, len(table), (file_documents, WORDS_PER_DOCUMENT))]
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for number, first in enumerate(range(0, documents, file_documents)):
        size = min(file_documents, documents - first)
        drawn = np.random.default_rng((11, number))
        texts = (
            originals[:size].copy() if not number else table[drawn.integers(0, len(table), (size, WORDS_PER_DOCUMENT))]
        )
        if number:
            kind = drawn.random(size)
            copied = np.flatnonzero(kind < 2 * COPIED)
            texts[copied] = originals[drawn.integers(0, len(originals), len(copied))]
            texts[np.flatnonzero(kind < COPIED), -1] = drawn.integers(0, len(words), int((kind < COPIED).sum()))
        written += _write_lines(folder / f"{number:05d}.jsonl", texts, words)
    return written


def _write_lines(path: Path, texts: np.ndarray, words: pa.Array) -> int:
    offsets = np.arange(0, texts.size + 1, texts.shape[1], dtype=np.int32)
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), words.take(pa.array(texts.ravel()))), " ")
    lines = pc.binary_join_element_wise('{"text": "', joined, '"}\n', "")
    path.write_bytes("".join(lines.to_pylist()).encode())
    return int(pc.sum(pc.binary_length(joined)).as_py())


def measure(folder: Path, step: str) -> dict[str, Any]:
    """Run a step in a process of its own: what it says, and the peaks of its memory.

    Raises:
        MemoryError: it needed more than LIMIT_BYTES, or failed.
    """
    command = [sys.executable, "-m", "benchmarks.bounds", step, str(folder)]
    peaks = dict.fromkeys(("all_bytes", "largest_bytes", "mapped_bytes"), 0)
    used = dict[int, float]()
    with open(folder / f"{step}.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    try:
        while process.poll() is None and peaks["all_bytes"] <= LIMIT_BYTES:
            tree = process_tree(process.pid)
            found, used = (
                [memory_of(pid) for pid in tree],
                {**used, **{pid: max(processor_seconds(pid), used.get(pid, 0.0)) for pid in tree}},
            )
            now = {
                "all_bytes": sum(one[0] for one in found),
                "largest_bytes": max(one[0] for one in found),
                "mapped_bytes": sum(one[1] for one in found),
            }
            peaks = {key: max(value, now[key]) for key, value in peaks.items()}
            time.sleep(SAMPLE_SECONDS)
    finally:
        process.kill()  # its workers end with it
        process.wait()
    said = (folder / f"{step}.log").read_text(errors="replace")
    if process.returncode != 0 or peaks["all_bytes"] > LIMIT_BYTES:
        raise MemoryError(
            f"{step} under a limit of {LIMIT_BYTES} bytes took {peaks['all_bytes']} and ended with exit "
            f"code {process.returncode}; its last lines:\n{said[-2000:]}"
        )
    result: dict[str, Any] = {**json.loads(said.splitlines()[-1]), **peaks, "cpu_seconds": sum(used.values())}
    return result


def processor_seconds(pid: int) -> float:
    """What a process has used so far; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of a process that no file backs, and of mapped files; its share of what it has in common with others."""
    try:
        usage = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0, 0
    sizes = dict(line.split(":", 1) for line in usage.splitlines()[1:])
    return int(sizes["Pss_Anon"].split()[0]) * 1024, int(sizes["Pss_File"].split()[0]) * 1024


def run_step(step: str, folder: Path) -> dict[str, Any]:
    """Run one step in this process; its seconds, and the files that it left in its work folder and its output."""
    work, out = folder / f"{step}-work", folder / step
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    out.mkdir(exist_ok=True)
    begin = time.perf_counter()
    summary = run_step_in(step, folder, folder / "texts", work=work)
    found = {"seconds": time.perf_counter() - begin, "kept": summary["counts"]["kept"]}
    for kind, where in (("work", work), ("out", out)):
        sizes = [path.stat().st_size for path in where.rglob("*") if path.is_file()]
        found |= {f"{kind}_bytes": sum(sizes), f"{kind}_files": len(sizes)}
    shutil.rmtree(work)
    return found


def run_step_in(
    step: str, folder: Path, texts: Path, work: Path | None = None, shuffle: str | None = None
) -> dict[str, Any]:
    """Run one step in a folder, which may lie in a store; its summary.

    Args:
        texts: where the documents are.
        work: its work folder; beside its output if absent.
        shuffle: see `Context.shuffle`.
    """
    context = Context(
        work=work or folder / f"{step}-work", stage=step, workers=WORKERS, shuffle=shuffle, emit=lambda event: None
    )
    before = ("ingest", "dedup", "tokenizer", "tokenize")
    inputs = {name: folder / name for name in before[: before.index(step) if step in before else len(before)]}
    if step == "tokenize":
        _write_tokenizer(texts, folder / "tokenizer")
    return RUNS[step](texts, inputs, folder / step, context)


def _ingest(texts: Path, inputs: Mapping[str, Path], out: Path, context: Context) -> dict[str, Any]:
    from gristmill.dataprep.reading import ingest

    # A small file makes a shard of its own.
    section = {"shard_bytes": min(16_000_000, (texts / "00000.jsonl").stat().st_size)}
    return ingest.run({}, {"sources": {"web": {"path": str(texts / "*.jsonl")}}, "ingest": section}, out, context)


def _dedup(texts: Path, inputs: Mapping[str, Path], out: Path, context: Context) -> dict[str, Any]:
    from gristmill.dataprep.duplicates import dedup

    return dedup.run({"ingest": inputs["ingest"]}, {}, out, context)


def _write_tokenizer(texts: Path, folder: Path) -> None:
    from gristmill.tokenize.encoding.tokenizer import write_tokenizer
    from gristmill.tokenize.encoding.vocabulary import train
    from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample

    with open(texts / "00000.jsonl", encoding="utf-8") as lines:
        sample = [json.loads(line)["text"] for line, _ in zip(lines, range(2000), strict=False)]
    write_tokenizer(train(TokenizerSample({"web": sample}, {}), VOCAB_SIZE), folder)


def _tokenize(texts: Path, inputs: Mapping[str, Path], out: Path, context: Context) -> dict[str, Any]:
    from gristmill.tokenize.encoding import encode

    return encode.run(inputs, {}, out, context)


def _mix(texts: Path, inputs: Mapping[str, Path], out: Path, context: Context) -> dict[str, Any]:
    from gristmill.tokenize.mixing import mix

    tokens = sum(path.stat().st_size for path in inputs["tokenize"].glob("*.tokens.bin")) // 2
    source = {"weight": 1.0, "max_epochs": 1.0, **dict.fromkeys(("where", "min_tokens", "max_tokens", "epochs"))}
    section = {"tokens": int(tokens * 0.98), "sequence_length": SEQUENCE_LENGTH}
    return mix.run(inputs, {"mix": section, "sources": {"web": source}, "seed": 1}, out, context)


RUNS = {"ingest": _ingest, "dedup": _dedup, "tokenize": _tokenize, "mix": _mix}


def look_up_rows(folder: Path, note: str) -> Iterator[Row]:
    """Documents by their id, as `gristmill explain` finds them, against DuckDB on the ids of the same files."""
    found = measure(folder, "look_up")
    for kind in ("kept", "dropped"):
        ours, peer = found[kind]
        yield {
            **row(
                f"explain: a {kind} document's id looked up",
                ours,
                peer,
                "s",
                f"{note}; median of {LOOK_UPS}; peer: DuckDB over all document shards",
            ),
            "ratio": peer / ours,
        }
    yield {
        **row(
            "explain: memory of the look-ups",
            found["all_bytes"] / 2**30,
            LIMIT_BYTES / 2**30,
            "GiB",
            f"{note}; peer: the limit; DuckDB's is in it",
        ),
        "ratio": LIMIT_BYTES / found["all_bytes"],
    }


def look_up(folder: Path) -> dict[str, Any]:
    """Seconds of a look-up, ours and DuckDB's, of documents that lie in a row and of documents that were dropped."""
    import duckdb

    from gristmill.dataprep.documents import read_table, shard_names
    from gristmill.flows.questions.find_documents import find_document

    inputs = {name: folder / name for name in ("ingest", "dedup", "tokenizer", "tokenize", "mix")}
    generator, taken = np.random.default_rng(5), dict[str, list[tuple[float, float]]]()
    shards = shard_names(inputs["ingest"])
    for kind in ("kept", "dropped"):
        for _ in range(LOOK_UPS):
            shard = shards[generator.integers(len(shards))]
            table = read_table(inputs["dedup"] / shard, ["id", "keep"])
            rows_ = np.flatnonzero(table["keep"].to_numpy() == (kind == "kept"))
            one = int(generator.choice(rows_)) if len(rows_) else 0
            wanted = table["id"][one].as_py()
            begun = time.perf_counter()
            place = find_document(inputs, wanted.hex())
            middle = time.perf_counter()
            assert place[1:] == (shard, one)
            duckdb.execute(
                f"SELECT filename FROM read_parquet('{inputs['ingest']}/part-*.parquet', filename=true) WHERE id = ?",
                [wanted],
            ).fetchall()
            taken.setdefault(kind, []).append((middle - begun, time.perf_counter() - middle))
    return {kind: np.median(times, axis=0).tolist() for kind, times in taken.items()}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1] == "look_up":
        print(json.dumps(look_up(Path(sys.argv[2]))))
    else:
        print(json.dumps(run_step(sys.argv[1], Path(sys.argv[2]))))
