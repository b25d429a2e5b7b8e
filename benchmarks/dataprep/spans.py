"""How fast repeated lines, repeated passages and evaluation items are found, against plain Python and NumPy.

Everything runs on one thread on the text of `texts.py`; for passages whole stage jobs with their files are measured,
called in turn.
"""

from __future__ import annotations

import hashlib
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.dataprep.texts import compare, library_texts
from benchmarks.installed_texts import documentation
from gristmill.core.stage_context import Context
from gristmill.dataprep.document_numbers import number_documents
from gristmill.dataprep.documents import DOCUMENT_SCHEMA, document_id, write_table
from gristmill.dataprep.passages.dedup_lines import find_units
from gristmill.dataprep.passages.dedup_substrings import SubstringsPlan, run_jobs
from gristmill.dataprep.passages.ngram_index import build_index, find_ngrams
from gristmill.mixtures.steps.dedup import DedupSubstrings

DOCUMENTS = 2000
PASSAGE_DOCUMENTS = 6000
SHARDS, PARTITIONS = 2, 8
PEER_BYTES = 400_000
REPEATED_BYTES = 300
"""What the peer takes for a repeated passage: about 50 words."""
NGRAM, MIN_WORDS = 13, 8
ITEMS, ITEM_WORDS = 5000, 60


def rows() -> Iterator[dict[str, Any]]:
    """Measure, all in MB of UTF-8 per second."""
    texts = library_texts(DOCUMENTS // 2) + documentation(DOCUMENTS // 2)
    random.Random(0).shuffle(texts)
    yield compare("lines to keys, against MD5 in plain Python", texts, _lines, lines_in_python)
    items = [" ".join(text.split()[:ITEM_WORDS]) for text in library_texts(ITEMS)[::2]]
    index = build_index(pa.array(items, pa.large_string()), NGRAM, MIN_WORDS)
    wanted = {ngram for item in items for ngram in _ngrams(item)}
    yield compare(
        "13-grams of evaluation items, against Python sets",
        texts,
        lambda array: find_ngrams(array, index),
        partial(ngrams_in_python, wanted=wanted),
    )
    yield substrings(library_texts(PASSAGE_DOCUMENTS // 2) + documentation(PASSAGE_DOCUMENTS // 2))


def _lines(texts: pa.Array) -> Any:
    return find_units(texts, "line", lower=True)


def lines_in_python(texts: Sequence[str]) -> list[list[bytes]]:
    """C4's key of every line (c4_utils.py)."""
    return [[hashlib.md5(line.strip().lower().encode()).digest() for line in text.split("\n")] for text in texts]


def ngrams_in_python(texts: Sequence[str], wanted: set[tuple[str, ...]]) -> list[int]:
    """How many n-grams of each text are wanted."""
    return [sum(ngram in wanted for ngram in _ngrams(text)) for text in texts]


def _ngrams(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return (tuple(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1))


def substrings(texts: Sequence[str]) -> dict[str, Any]:
    """All jobs of `dedup_substrings`, against a suffix array by prefix doubling in NumPy on the beginning."""
    with tempfile.TemporaryDirectory() as folder:
        cut_substrings(write_shards(texts[:SHARDS], Path(folder) / "warm"))
        plan = write_shards(texts, Path(folder) / "all")
        ours = _megabytes(texts) / _seconds(lambda: cut_substrings(plan))
    data = "".join(texts).encode()[:PEER_BYTES]
    peer = len(data) / 1e6 / _seconds(lambda: repeated_bytes(data, REPEATED_BYTES))
    return {
        "name": "repeated passages, against a NumPy suffix array",
        "ours": ours,
        "peer": peer,
        "unit": "MB/s",
        "ratio": ours / peer,
        "note": f"the peer gets {PEER_BYTES} bytes",
    }


def write_shards(texts: Sequence[str], folder: Path) -> SubstringsPlan:
    """Write document shards, and plan the stage over them."""
    for shard in range(SHARDS):
        rows = [
            {
                "id": document_id("bench", str(number), text),
                "source": "bench",
                "locator": str(number),
                "text": text,
                "metadata": "{}",
            }
            for number, text in enumerate(texts)
            if number % SHARDS == shard
        ]
        write_table(folder / "ingest" / f"part-{shard:05d}.parquet", pa.Table.from_pylist(rows, DOCUMENT_SCHEMA))
    numbering = number_documents(folder / "ingest")
    return SubstringsPlan(
        {"ingest": folder / "ingest"}, DedupSubstrings(), numbering, PARTITIONS, folder / "work", folder / "out"
    )


def cut_substrings(plan: SubstringsPlan) -> None:
    """Run the stage's jobs one after the other, without Beam."""
    run_jobs(plan, Context(work=plan.work, emit=lambda event: None), direct=True)


def repeated_bytes(data: bytes, length: int) -> np.ndarray:
    """Which bytes lie in a substring of so many bytes that occurs twice (bool): a suffix array by prefix doubling."""
    rank = np.frombuffer(data, np.uint8).astype(np.int64)
    order, step = np.argsort(rank, kind="stable"), 1
    while step < length:
        behind = np.full(len(rank), -1, np.int64)
        behind[:-step] = rank[step:]
        order = np.lexsort((behind, rank))
        new = (np.diff(rank[order], prepend=-1) != 0) | (np.diff(behind[order], prepend=-2) != 0)
        rank[order] = np.cumsum(new)
        step *= 2
    repeated = np.bincount(rank)[rank] > 1
    covered = np.zeros(len(rank) + 1, np.int64)
    starts = np.flatnonzero(repeated)
    np.add.at(covered, starts, 1)
    np.add.at(covered, np.minimum(starts + length, len(rank)), -1)
    marks: np.ndarray = np.cumsum(covered[:-1]) > 0
    return marks


def _megabytes(texts: Sequence[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
