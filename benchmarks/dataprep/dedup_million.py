"""The whole stage `dedup` on a million documents: seconds on two cores, and memory.

Documents of one to two kilobytes, words of documentation drawn as often as they occur
there, are written into shards; a tenth are near copies of others all over the corpus.
The stage runs on them in a process of its own, as in a flow. The bounds are 25 seconds
and 2 GiB of resident memory, mapped files included.

A planted copy is dropped if it is similar enough to a kept document. Two copies of one
text differ more from each other than from it, so if the longest is a copy, others are
kept beside it (`clusters: survivors`). Two similar documents must not both be kept: the
row counts the copies for which that holds, by Jaccard of their shingles.

English documents with lengths of web pages show how much text one core deduplicates in
a second; the bound is the rate that NeMo Curator reports of a node of eight H100s, 1.08
GB/s, divided by 36 cores.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.checkout import ROOT
from benchmarks.dataprep.stage_runs import shard_name
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, cost_row, row
from gristmill.core.processes import measure_cost
from gristmill.dataprep.documents import (
    DOCUMENT_SCHEMA,
    ID_BYTES,
    read_table,
    write_table,
)
from gristmill.mixtures.steps.dedup import MinHash

DOCUMENTS = 1_000_000
SHARD_DOCUMENTS = 12_500
WORKERS = 2
SECONDS, GIBIBYTES = 25.0, 2.0
"""The bounds."""
SHORTEST, LONGEST = 150, 300
"""Words of a document."""
COPIED = 0.1
"""Share of documents that are copies of some in the first shard."""
MOST_EDITS = 4
"""Most words that are replaced in a copy: its similarity to the original is at least
0.75.
"""
NGRAM, THRESHOLD = MinHash().ngram, MinHash().threshold
RESOLVED = 0.99
"""The bound: MinHash of 14 bands of 8 rows misses some pairs close to the threshold."""
ENGLISH_DOCUMENTS, ENGLISH_PIECES, WORD_PIECES = 150_000, 5000, 500
MB_PER_CORE_SECOND = 30
SENTENCE_BYTES, MEDIAN_BYTES, SPREAD = 80, 2000, 0.94
"""Shortest sentence that is used; lengths of documents are log-normal with a mean of
3.1 kB, that of FineWeb's documents (sample-10BT: 10.4 billion tokens in 14.9 million
documents, of 4.5 bytes each).
"""


def rows() -> Iterator[Row]:
    """Measure seconds, memory and the fate of planted copies, against their bounds;
    then English.
    """
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
        text_bytes, originals = generate(Path(folder) / "ingest", DOCUMENTS)
        measured = measure(Path(folder))
        copies = int((originals >= 0).sum())
        alike = count_alike(Path(folder), originals)
    note = (
        f"{DOCUMENTS} documents, {text_bytes / 1e6:.0f} MB of text, {WORKERS} workers, "
        f"{measured['cpu_seconds']:.1f} s of CPU; peer: the bound"
    )
    yield cost_row("dedup_million", measured["seconds"], SECONDS, "s", note)
    yield cost_row(
        "dedup_million, peak memory", measured["gibibytes"], GIBIBYTES, "GiB", note
    )
    yield row(
        "dedup_million, planted copies",
        1 - alike / copies,
        RESOLVED,
        "of copies",
        f"that go, or are like nothing that stays: of {copies}, {alike} stay beside "
        f"one of Jaccard {THRESHOLD} and "
        f"more; {measured['dropped']:.0f} documents are dropped; peer: the bound",
    )
    yield english_row()


def count_alike(folder: Path, originals: np.ndarray) -> int:
    """Count kept copies that are similar enough to another kept document, by shingles
    and not by sketches.

    Args:
        folder: has `ingest` with the documents in their order, and `out` of the stage.
        originals: as `generate` returned them.
    """
    families = np.where(originals < 0, np.arange(len(originals)), originals)
    is_planted = np.isin(families, originals[originals >= 0])
    kept: dict[int, list[set[tuple[str, ...]]]] = {}
    alike = first = 0
    for shard in sorted(
        path.name for path in (folder / "ingest").glob("part-*.parquet")
    ):
        texts = read_table(folder / "ingest" / shard, ["text"])["text"]
        is_kept = read_table(folder / "out" / shard, ["keep"])["keep"].to_numpy()
        for place in np.flatnonzero(is_kept & is_planted[first : first + len(is_kept)]):
            words = texts[int(place)].as_py().split()
            shingles = set(
                zip(*(words[start:] for start in range(NGRAM)), strict=False)
            )
            relatives = kept.setdefault(int(families[first + place]), [])
            alike += any(
                len(shingles & relative) >= THRESHOLD * len(shingles | relative)
                for relative in relatives
            )
            relatives.append(shingles)
        first += len(is_kept)
    return alike


def english_row() -> Row:
    """Measure MB of English per second of CPU of all processes, over the whole
    stage.
    """
    name, unit = "dedup_stage MB/s per core", "MB/s"
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
        text_bytes, _ = generate(
            Path(folder) / "ingest", ENGLISH_DOCUMENTS, sentences()
        )
        measured = measure(Path(folder))
    note = (
        f"{ENGLISH_DOCUMENTS} documents, {text_bytes / 1e6:.0f} MB, "
        f"{measured['cpu_seconds']:.1f} s of CPU, "
        f"{measured['seconds']:.1f} s on {WORKERS} workers; peer: the bound"
    )
    return row(
        name, text_bytes / 1e6 / measured["cpu_seconds"], MB_PER_CORE_SECOND, unit, note
    )


def sentences() -> Corpus:
    """Return documents of sentences of documentation, in a random order."""
    text = " ".join(documentation(ENGLISH_PIECES))
    long_sentences = [
        part for part in re.split(r"(?<=[.!?])\s+", text) if len(part) >= SENTENCE_BYTES
    ]
    mean = sum(map(len, long_sentences)) / len(long_sentences)

    def lengths(generator: np.random.Generator, number: int) -> np.ndarray:
        drawn: np.ndarray = generator.lognormal(
            np.log(MEDIAN_BYTES / mean), SPREAD, number
        )
        return np.maximum(drawn.round().astype(np.int64), MOST_EDITS)

    return Corpus(
        pa.array(long_sentences),
        np.arange(len(long_sentences), dtype=np.int32),
        lengths,
    )


def measure(folder: Path) -> dict[str, float]:
    """Run the stage on `folder/ingest` in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.dataprep.dedup_million", str(folder)],
        check=True,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    measured: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return measured


class Corpus(NamedTuple):
    """Parts of drawn documents.

    Attributes:
        words: distinct words, or sentences.
        table: int32, numbers of words, from which those of a document are drawn with
            equal chances.
        lengths: (generator, number of documents) -> number of words of each.
    """

    words: pa.Array
    table: np.ndarray
    lengths: Callable[[np.random.Generator, int], np.ndarray]


def drawn_words() -> Corpus:
    """Return words of documentation, drawn as often as they occur there."""
    words, table = words_of_documentation()
    return Corpus(
        words,
        table,
        lambda generator, number: generator.integers(SHORTEST, LONGEST, number),
    )


def generate(
    ingest: Path, documents: int, corpus: Corpus | None = None
) -> tuple[int, np.ndarray]:
    """Write document shards; the same in every run.

    Args:
        corpus: that of `drawn_words` if None.

    Returns:
        bytes of text, and the number of each document's original, or -1; int64 of shape
        (documents,).
    """
    generator = np.random.default_rng(0)
    words, table, lengths_of = corpus or drawn_words()
    originals: list[np.ndarray] = []
    text_bytes, copied_from = 0, np.full(documents, -1, np.int64)
    for number, start in enumerate(range(0, documents, SHARD_DOCUMENTS)):
        size = min(SHARD_DOCUMENTS, documents - start)
        lengths = lengths_of(generator, size)
        texts = np.split(
            table[generator.integers(0, len(table), lengths.sum())],
            np.cumsum(lengths)[:-1],
        )
        if number == 0:
            originals = list(texts)
        copies = (
            np.flatnonzero(generator.random(size) < COPIED)
            if number
            else np.empty(0, np.int64)
        )
        for place in copies:
            copied_from[start + place] = generator.integers(len(originals))
            texts[place] = edit(
                originals[copied_from[start + place]], generator, len(words)
            )
        shard = shard_table(texts, words, start, generator)
        text_bytes += pc.sum(pc.binary_length(shard["text"])).as_py()
        write_table(ingest / shard_name(number), shard)
    return text_bytes, copied_from


def words_of_documentation() -> tuple[pa.Array, np.ndarray]:
    """Return the distinct words of ASCII letters in documentation, and all of its words
    as int32 numbers of these.
    """
    text = " ".join(documentation(WORD_PIECES)).split()
    coded = pa.array(
        [word for word in text if word.isascii() and word.isalpha()]
    ).dictionary_encode()
    return coded.dictionary, coded.indices.to_numpy()


def edit(
    words: np.ndarray, generator: np.random.Generator, vocabulary_size: int
) -> np.ndarray:
    """Return a near copy: some words are replaced."""
    changed = words.copy()
    places = generator.choice(
        len(words), generator.integers(1, MOST_EDITS + 1), replace=False
    )
    changed[places] = generator.integers(0, vocabulary_size, len(places))
    return changed


def shard_table(
    texts: list[np.ndarray], words: pa.Array, start: int, generator: np.random.Generator
) -> pa.Table:
    """Return a document shard of texts, which are numbers of words."""
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(
        np.int32
    )
    lists = pa.ListArray.from_arrays(
        pa.array(offsets), words.take(pa.array(np.concatenate(texts)))
    )
    ids = generator.bytes(ID_BYTES * len(texts))
    source = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(len(texts), np.int32)), pa.array(["web"])
    )
    columns = [
        pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(ID_BYTES), len(texts), [None, pa.py_buffer(ids)]
        ),
        source,
        pa.array([f"document/{start + number}" for number in range(len(texts))]),
        pc.binary_join(lists, " ").cast(pa.large_string()),
        pa.array(["{}"] * len(texts)),
    ]
    return pa.table(columns, schema=DOCUMENT_SCHEMA)


def run_stage(folder: Path) -> dict[str, float]:
    """Run the stage in this process; returns its seconds, those of all cores, its peak
    memory, and dropped documents.
    """
    from gristmill.core.stage_context import Context
    from gristmill.dataprep.dedup import dedup
    from gristmill.mixtures.schema.engine import BeamEngine

    (folder / "work").mkdir()
    context = Context(
        work=folder / "work",
        stage="dedup",
        beam=BeamEngine(workers=WORKERS),
        emit=lambda event: None,
    )
    start, cpu_before = time.perf_counter(), measure_cost(0)["cpu_seconds"]
    summary = dedup.run({"ingest": folder / "ingest"}, {}, folder / "out", context)
    seconds, cost = time.perf_counter() - start, measure_cost(1)
    return {
        "seconds": seconds,
        "cpu_seconds": cost["cpu_seconds"] - cpu_before,
        "gibibytes": cost["peak_memory_bytes"] / 2**30,
        "dropped": sum(summary.counts["dropped"].values()),
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(json.dumps(run_stage(Path(sys.argv[1]))))
