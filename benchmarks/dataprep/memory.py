"""Memory does not grow with the corpus: ingest, filter and dedup of corpora of one size and of three times that size.

The corpora are prepared by a process of its own, with two workers. What is measured is its peak of anonymous memory,
that of all its children included (Pss_Anon of /proc/PID/smaps_rollup, every tenth of a second): files that are mapped
can be given back at any time and do not count, and what forked processes share counts once. Past the limit it is
ended. (RLIMIT_AS and RLIMIT_DATA would count what is reserved and never touched, stacks of threads above all, and each
process by itself.)

What does grow, by some hundred bytes each, is what dedup holds of documents that have a duplicate while it chooses
the survivors, and the records of finished shards.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT
from benchmarks.installed_texts import CORPUS, paragraphs
from gristmill.dataprep.context import Context

LIMIT_BYTES = 1 << 30
CORPUS_BYTES = LIMIT_BYTES
"""Text of the smaller corpus; the larger one is three times the limit."""
FILE_BYTES = 32_000_000
SENTENCES, WORDS_OF_A_SENTENCE = 4096, 10
SENTENCES_PER_DOCUMENT = 80
REPEATED = 20
"""One document in so many is a copy of an earlier one, and one nearly so."""
SAMPLE_SECONDS = 0.1


def rows(corpus_bytes: int = CORPUS_BYTES, limit_bytes: int = LIMIT_BYTES) -> Iterator[dict[str, Any]]:
    """Measure: the peak at three times the corpus, against the peak at one; and the corpus, against the limit.

    Args:
        corpus_bytes: text of the smaller corpus.
        limit_bytes: of memory that may be used.

    Raises:
        MemoryError: the limit was not kept.
    """
    peaks, sizes = {}, {}
    for times in (1, 3):
        with tempfile.TemporaryDirectory(prefix="gristmill-memory-") as name:
            sizes[times] = write_corpus(Path(name) / "texts", times * corpus_bytes)
            peaks[times] = measure(Path(name), limit_bytes)
    small, large, limit = (f"{number / 1e6:.0f} MB" for number in (sizes[1], sizes[3], limit_bytes))
    yield {
        "name": f"peak memory of preparing {large} of text, against that of preparing {small}",
        "ours": peaks[3] / 1e6,
        "peer": peaks[1] / 1e6,
        "unit": "MB",
        "ratio": peaks[3] / peaks[1],
        "note": f"sentences of {CORPUS}; ingest, filter and dedup on 2 workers under a limit of {limit}",
    }
    yield {
        "name": f"text prepared under a limit of {limit} of memory, against that limit",
        "ours": sizes[3] / 1e6,
        "peer": limit_bytes / 1e6,
        "unit": "MB",
        "ratio": sizes[3] / limit_bytes,
        "note": f"the peak was {peaks[3] / 1e6:.0f} MB; past the limit the process is ended",
    }


def measure(folder: Path, limit_bytes: int) -> int:
    """Prepare `folder/texts` in a process under the limit, and return the peak of its tree in bytes.

    Raises:
        MemoryError: it needed more, or failed.
    """
    command = [sys.executable, "-m", "benchmarks.dataprep.memory", str(folder)]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    peak = 0
    try:
        while process.poll() is None and peak <= limit_bytes:
            peak = max(peak, sum(map(anonymous_bytes, process_tree(process.pid))))
            time.sleep(SAMPLE_SECONDS)
    finally:
        process.kill()  # its workers end with it
        process.wait()
    if process.returncode != 0 or peak > limit_bytes:
        tail = (folder / "log").read_text(errors="replace")[-2000:]
        raise MemoryError(
            f"preparing {folder} under a limit of {limit_bytes} bytes took {peak} and ended with exit code "
            f"{process.returncode}; its last lines:\n{tail}"
        )
    return peak


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                found.extend(map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return found


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs, its share of what it has in common with others; 0 where it has ended."""
    try:
        usage = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = [line.split()[1] for line in usage.splitlines() if line.startswith("Pss_Anon:")]
    return sum(map(int, sizes)) * 1024


def prepare(folder: Path) -> None:
    """Ingest, filter and deduplicate `folder/texts` with two workers."""
    from gristmill.dataprep.duplicates import dedup
    from gristmill.dataprep.filtering import filter
    from gristmill.dataprep.reading import ingest

    sources = {"web": {"path": str(folder / "texts" / "*.jsonl")}}
    inputs: dict[str, Path] = {}
    for module, config in ((ingest, {"sources": sources}), (filter, {}), (dedup, {})):
        name = module.__name__.rpartition(".")[2]
        context = Context(work=folder / f"{name}-work", stage=name, workers=2, emit=lambda event: None)
        begin = time.perf_counter()
        summary = module.run(dict(inputs), config, folder / name, context)
        print(
            f"{name}: {summary['counts']['read']} documents read, {summary['counts']['kept']} kept, "
            f"{time.perf_counter() - begin:.1f} s",
            flush=True,
        )
        shutil.rmtree(context.work)
        inputs[name] = folder / name


def write_corpus(folder: Path, size: int) -> int:
    """Write JSONL files of at least `size` characters of text; documents share sentences, and some are repeated."""
    source = random.Random(3)
    sentences = paragraphs(SENTENCES, WORDS_OF_A_SENTENCE)
    folder.mkdir(parents=True)
    written, earlier = 0, ""
    while written < size:
        with open(folder / f"{written:015d}.jsonl", "w", encoding="ascii") as sink:
            held = 0
            while held < FILE_BYTES and written < size:
                drawn = source.randrange(REPEATED)
                text = earlier if drawn < 2 and earlier else " ".join(source.sample(sentences, SENTENCES_PER_DOCUMENT))
                if drawn == 1:
                    text += " the end."
                sink.write(json.dumps({"text": text}) + "\n")
                held, written, earlier = held + len(text), written + len(text), text
    return written


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
