"""The whole stage `dedup` on a million documents: how long it takes on two cores, and how much memory.

A tenth of the documents are near copies of others all over the corpus. Documents of one to two kilobytes are generated
into shards, and the stage runs on them in a process of its own, as in a flow. The bounds are what a laptop has time and
room for: 300 seconds and 4 GiB of resident memory, mapped files included.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.checkout import ROOT
from benchmarks.measuring import Row, row
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, ID_BYTES, write_table
from gristmill.dataprep.processes import KILOBYTE, peak_resident_bytes

DOCUMENTS = 1_000_000
SHARD_DOCUMENTS = 12_500
WORKERS = 2
SECONDS, GIBIBYTES = 300, 4
"""The bounds, for a million documents; for fewer, the share of the time."""
SHORTEST, LONGEST = 150, 300
"""Words of a document."""
COPIED = 0.1
ORIGINALS = 12_500
"""Documents, of the first shard, that copies are made of."""
MOST_EDITS = 4
"""Words that are replaced in a copy: its similarity to the original is at least 0.75."""
VOCABULARY = 50_000


def rows() -> Iterator[Row]:
    """Measure seconds, memory and the share of planted copies that went, against their bounds."""
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
        text_bytes, copies = generate(Path(folder) / "ingest", DOCUMENTS)
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.dataprep.dedup_million", folder],
            check=True, stdout=subprocess.PIPE, cwd=ROOT,
        )
    measured = json.loads(ran.stdout.splitlines()[-1])
    bounds = {"dedup_million": ("seconds", "s", SECONDS * DOCUMENTS / 1_000_000),
              "dedup_million, peak memory": ("gibibytes", "GiB", float(GIBIBYTES))}  # fmt: skip
    note = f"{DOCUMENTS} documents, {text_bytes / 1e6:.0f} MB of text, {WORKERS} workers; peer: the bound"
    for name, (measure, unit, bound) in bounds.items():
        yield {**row(name, measured[measure], bound, unit, note), "ratio": bound / measured[measure]}
    dropped = measured["dropped"] / copies
    yield row("dedup_million, planted copies", dropped, 1.0, "dropped", f"{copies} copies; peer: all of them")


def generate(ingest: Path, documents: int) -> tuple[int, int]:
    """Write document shards; the same in every run.

    Returns:
        bytes of text, and how many documents are copies.
    """
    generator = np.random.default_rng(0)
    words = vocabulary(generator)
    by_rank = 1 / np.arange(2, VOCABULARY + 2)  # frequencies fall with the rank
    table = generator.choice(VOCABULARY, 1 << 20, p=by_rank / by_rank.sum()).astype(np.int32)
    originals: list[np.ndarray] = []
    text_bytes = copies = 0
    for number, start in enumerate(range(0, documents, SHARD_DOCUMENTS)):
        size = min(SHARD_DOCUMENTS, documents - start)
        lengths = generator.integers(SHORTEST, LONGEST, size)
        texts = np.split(table[generator.integers(0, len(table), lengths.sum())], np.cumsum(lengths)[:-1])
        if number == 0:
            originals = texts[:ORIGINALS]
        copied = np.flatnonzero(generator.random(size) < COPIED) if number else np.empty(0, np.int64)
        for place in copied:
            texts[place] = edit(originals[generator.integers(len(originals))], generator)
        shard = shard_table(texts, words, start, generator)
        text_bytes += pc.sum(pc.binary_length(shard["text"])).as_py()
        copies += len(copied)
        write_table(ingest / f"part-{number:05d}.parquet", shard)
    return text_bytes, copies


def vocabulary(generator: np.random.Generator) -> pa.Array:
    """Words of two to nine letters."""
    letters = np.array(list("etaoinshrdlu"))
    return pa.array(["".join(generator.choice(letters, size)) for size in generator.integers(2, 10, VOCABULARY)])


def edit(words: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A near copy: some words are others."""
    changed = words.copy()
    places = generator.choice(len(words), generator.integers(1, MOST_EDITS + 1), replace=False)
    changed[places] = generator.integers(0, VOCABULARY, len(places))
    return changed


def shard_table(texts: list[np.ndarray], words: pa.Array, start: int, generator: np.random.Generator) -> pa.Table:
    """A document shard of texts that are given as numbers of words."""
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), words.take(pa.array(np.concatenate(texts))))
    ids = generator.bytes(ID_BYTES * len(texts))
    source = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(texts), np.int32)), pa.array(["web"]))
    columns = [
        pa.FixedSizeBinaryArray.from_buffers(pa.binary(ID_BYTES), len(texts), [None, pa.py_buffer(ids)]),
        source,
        pa.array([f"document/{start + number}" for number in range(len(texts))]),
        pc.binary_join(lists, " ").cast(pa.large_string()),
        pa.array(["{}"] * len(texts)),
    ]
    return pa.table(columns, schema=DOCUMENT_SCHEMA)


def run_stage(folder: Path) -> dict[str, float]:
    """Run the stage in this process: its seconds, the peak of its resident memory, and what it dropped."""
    from gristmill.dataprep.context import Context
    from gristmill.dataprep.duplicates import dedup

    (folder / "work").mkdir()
    context = Context(work=folder / "work", stage="dedup", workers=WORKERS, emit=lambda event: None)
    begin = time.perf_counter()
    summary = dedup.run({"ingest": folder / "ingest"}, {}, folder / "out", context)
    seconds = time.perf_counter() - begin
    peak = peak_resident_bytes() + KILOBYTE * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "seconds": seconds,
        "gibibytes": peak / 2**30,
        "dropped": sum(summary["counts"]["dropped"].values()),
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(run_stage(Path(sys.argv[1]))))
