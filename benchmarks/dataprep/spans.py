"""Speed of finding repeated lines, repeated passages and evaluation items, against
plain Python and NumPy.

All work runs on one thread on the text of `texts.py`; for passages whole jobs of the
stage with their files are measured, one after the other.
"""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.dataprep.stage_runs import write_shard
from benchmarks.dataprep.texts import compare, library_texts, word_ngrams
from benchmarks.installed_texts import documentation
from benchmarks.measuring import Row, fastest, row, text_megabytes
from gristmill.core.stage_context import Context
from gristmill.dataprep.decontamination.ngram import build_index, find_ngrams
from gristmill.dataprep.dedup.exact_substring import run_jobs
from gristmill.dataprep.dedup.lines import find_units
from gristmill.dataprep.dedup.repeated_spans import RepeatsPlan
from gristmill.dataprep.document_numbers import number_documents
from gristmill.mixtures.steps.dedup import DedupSubstrings

DOCUMENTS = 2000
PASSAGE_DOCUMENTS = 6000
SHARDS, PARTITIONS = 2, 8
PEER_BYTES = 400_000
REPEATED_BYTES = 300
"""Length of a repeated passage for the peer: about 50 words."""
NGRAM, MIN_WORDS = 13, 8
ITEMS, ITEM_WORDS = 5000, 60


def rows() -> Iterator[Row]:
    """Measure MB of UTF-8 per second."""
    texts = library_texts(DOCUMENTS // 2) + documentation(DOCUMENTS // 2)
    random.Random(0).shuffle(texts)
    yield compare(
        "lines to keys, against MD5 in plain Python",
        texts,
        lambda array: find_units(array, "line", lower=True),
        lines_in_python,
    )
    items = [" ".join(text.split()[:ITEM_WORDS]) for text in library_texts(ITEMS)[::2]]
    index = build_index(pa.array(items, pa.large_string()), NGRAM, MIN_WORDS)
    leaked = {ngram for item in items for ngram in word_ngrams(item, NGRAM)}
    yield compare(
        "13-grams of evaluation items, against Python sets",
        texts,
        lambda array: find_ngrams(array, index),
        partial(ngrams_in_python, leaked=leaked),
    )
    yield substrings(
        library_texts(PASSAGE_DOCUMENTS // 2) + documentation(PASSAGE_DOCUMENTS // 2)
    )


def lines_in_python(texts: Sequence[str]) -> list[list[bytes]]:
    """Compute C4's key of every line (c4_utils.py)."""
    return [
        [
            hashlib.md5(line.strip().lower().encode()).digest()
            for line in text.split("\n")
        ]
        for text in texts
    ]


def ngrams_in_python(texts: Sequence[str], leaked: set[tuple[str, ...]]) -> list[int]:
    """Count the leaked n-grams of each text."""
    return [
        sum(ngram in leaked for ngram in word_ngrams(text, NGRAM)) for text in texts
    ]


def substrings(texts: Sequence[str]) -> Row:
    """Measure all jobs of `dedup_substrings`, against a suffix array by prefix doubling
    in NumPy on the beginning.
    """
    with tempfile.TemporaryDirectory() as folder:
        cut_substrings(write_shards(texts[:SHARDS], Path(folder) / "warm"))
        plan = write_shards(texts, Path(folder) / "all")
        (our_seconds,) = fastest(1, lambda: cut_substrings(plan))
    data = "".join(texts).encode()[:PEER_BYTES]
    (peer_seconds,) = fastest(1, lambda: repeated_bytes(data, REPEATED_BYTES))
    return row(
        "repeated passages, against a NumPy suffix array",
        text_megabytes(texts) / our_seconds,
        len(data) / 1e6 / peer_seconds,
        "MB/s",
        f"the peer gets {PEER_BYTES} bytes",
    )


def write_shards(texts: Sequence[str], folder: Path) -> RepeatsPlan[DedupSubstrings]:
    """Write document shards, and plan the stage over them."""
    for shard in range(SHARDS):
        write_shard(folder / "ingest", shard, texts[shard::SHARDS])
    numbering = number_documents(folder / "ingest")
    return RepeatsPlan(
        {"ingest": folder / "ingest"},
        DedupSubstrings(),
        numbering,
        PARTITIONS,
        folder / "out",
    )


def cut_substrings(plan: RepeatsPlan[DedupSubstrings]) -> None:
    """Run the stage's jobs one after the other."""
    run_jobs(plan, Context(work=plan.out.with_name("work"), emit=lambda event: None))


def repeated_bytes(data: bytes, length: int) -> np.ndarray:
    """Mark bytes of substrings of `length` bytes that occur twice (bool), by prefix
    doubling of a suffix array.
    """
    rank = np.frombuffer(data, np.uint8).astype(np.int64)
    order, step = np.argsort(rank, kind="stable"), 1
    while step < length:
        next_rank = np.full(len(rank), -1, np.int64)
        next_rank[:-step] = rank[step:]
        order = np.lexsort((next_rank, rank))
        is_new = (np.diff(rank[order], prepend=-1) != 0) | (
            np.diff(next_rank[order], prepend=-2) != 0
        )
        rank[order] = np.cumsum(is_new)
        step *= 2
    repeated = np.bincount(rank)[rank] > 1
    covered = np.zeros(len(rank) + 1, np.int64)
    starts = np.flatnonzero(repeated)
    np.add.at(covered, starts, 1)
    np.add.at(covered, np.minimum(starts + length, len(rank)), -1)
    marks: np.ndarray = np.cumsum(covered[:-1]) > 0
    return marks
