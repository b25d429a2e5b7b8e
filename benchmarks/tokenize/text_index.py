"""`gristmill bench text_index`: time to find the passages of a text in training rows,
at two sizes.

The text has 1,000 tokens, half of them in passages that are cut out of the rows. The
peer scans the rows with numpy for the n-grams of the text, by hashes, and does not find
the length of a passage. The two sizes show that with the index a query's time depends
on the text and not on the set, unlike the scan's. `gigabyte_rows` queries a gigabyte,
from disk and from memory, with passages whose places are known; it needs 10 GB of disk.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.measuring import Row, cost_row, fastest, row
from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.tokenize import text_index
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import (
    FORMAT,
    MANIFEST,
    PIECES_SCHEMA,
    TokenizerEntry,
    train_name,
)
from gristmill.tokenize.packed_writing import write_rows
from gristmill.tokenize.text_index import OpenIndex, Passage
from tests.packed_sets import write_packed_set

SIZES = (4_000_000, 32_000_000)
"""Tokens; the larger set has 64 MB."""
GIGABYTE_TOKENS, SHARD_TOKENS = 500_000_000, 50_000_000
TEXTS = 40
"""Queries of the gigabyte; each has 12 planted passages."""
TOKENIZER: TokenizerEntry = {"vocab_size": 32_000, "eos": 0, "pad": 1, "sha256": ""}
LENGTH, VOCAB, SHORTEST = 1024, 32_000, 8
TEXT_TOKENS, PASSAGE_TOKENS = 1000, 40
COPIED = 0.1
"""Share of rows that occur twice, as in a second epoch."""
REPEATS = 5
BOUND_SECONDS = 1.0
"""Bound of a query of a gigabyte of tokens with a mapped index."""
MEGA = 1e6
ODD = np.uint64(0x9E3779B97F4A7C15)


def rows() -> Iterator[Row]:
    """Measure seconds of a query, and the rate of making the index, at each size."""
    for size in SIZES:
        with tempfile.TemporaryDirectory() as name:
            yield from size_rows(Path(name), size)


def size_rows(folder: Path, size: int) -> Iterator[Row]:
    """Measure a set of one size."""
    rng = np.random.default_rng(size)
    tokens = _draw(rng, size)
    write_packed_set(folder / "set", tokens, {"all": len(tokens)}, TOKENIZER)
    packed = PackedSet(folder / "set")
    make = _making(folder, packed)
    making, sorting = fastest(
        1, make, lambda: np.argsort(_hashes(tokens.reshape(-1)), kind="stable")
    )
    index_bytes = sum(path.stat().st_size for path in (folder / "index").iterdir())
    label = f"{size * 2 / MEGA:.0f} MB"
    yield row(
        f"text_index_made, {label}",
        size / MEGA / making,
        size / MEGA / sorting,
        "M tokens/s",
        f"{index_bytes / size:.1f} bytes per token; peer: numpy sorts the hashes alone",
    )
    text = _text(rng, tokens)
    index = OpenIndex(folder / "index", packed)
    ngrams = set[int]()
    for passage in index.passages(text):
        ngrams.update(
            range(passage.begin, passage.begin + passage.tokens - SHORTEST + 1)
        )
    if ngrams != set(_scan(tokens, text).tolist()):
        raise RuntimeError("the index and the scan find different n-grams of the text")
    (opening,) = fastest(
        1, lambda: OpenIndex(folder / "index", PackedSet(folder / "set")).passages(text)
    )
    ours, peer = fastest(
        REPEATS, lambda: index.passages(text), lambda: _scan(tokens, text)
    )
    note = (
        f"{TEXT_TOKENS} tokens; {opening:.3f} s with opening it; bound: "
        f"{BOUND_SECONDS:g} s; peer: a scan"
    )
    yield cost_row(f"text_found_seconds, {label}", ours, peer, "s", note)


def _making(folder: Path, packed: PackedSet) -> Callable[[], object]:
    (folder / "work").mkdir()
    return partial(
        text_index.run,
        {"mix": packed.folder},
        {"shortest_span": SHORTEST},
        folder / "index",
        Context(work=folder / "work", emit=lambda event: None),
    )


def gigabyte_rows() -> Iterator[Row]:
    """Measure a gigabyte: making the index, queries from disk and from memory, and the
    share of planted passages that is found.
    """
    size, label = GIGABYTE_TOKENS, f"{GIGABYTE_TOKENS * 2 / MEGA:.0f} MB"
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), np.random.default_rng(size)
        packed = write_shards(folder / "set", rng, size)
        seconds, peak_bytes = _measured_making(_making(folder, packed))
        index_bytes = sum(path.stat().st_size for path in (folder / "index").iterdir())
        yield row(
            f"text_index_made, {label}",
            size / MEGA / seconds,
            None,
            "M tokens/s",
            f"one process, which held {peak_bytes / MEGA:.0f} MB beside mapped rows; "
            f"{index_bytes / size:.1f} bytes a token",
        )
        shutil.rmtree(folder / "work")
        texts = [planted_text(rng, packed) for _ in range(TEXTS)]
        for path in (*packed.folder.iterdir(), *(folder / "index").iterdir()):
            _forget(path)
        cold, answers = [], []
        index = OpenIndex(folder / "index", packed)
        for text, _ in texts:
            start = time.perf_counter()
            answers.append(index.passages(text))
            cold.append(time.perf_counter() - start)
        yield cost_row(
            f"text_found_seconds, {label}, from disk",
            max(cold),
            BOUND_SECONDS,
            "s",
            f"the slowest of {TEXTS} texts of {TEXT_TOKENS} tokens; the first took "
            f"{cold[0]:.3f} s, the slowest of the others {max(cold[1:]):.3f} s, the "
            f"median {np.median(cold):.3f} s; peer: the bound",
        )
        hits = total = 0
        for (_, spans), passages in zip(texts, answers, strict=True):
            hits += sum(is_found(span, passages) for span in spans)
            total += len(spans)
        note = (
            f"of {SHORTEST} to {PASSAGE_TOKENS} tokens, each with the place that "
            "it was cut from"
        )
        yield row(f"planted_spans_found, {label}", hits, total, "spans", note)
        warm = fastest(REPEATS, *(partial(index.passages, text) for text, _ in texts))
        shards = [
            np.memmap(path, "<u2", "r").reshape(-1, LENGTH)
            for path in sorted(packed.folder.glob("train-*.bin"))
        ]
        (scan,) = fastest(1, lambda: [_scan(tokens, texts[0][0]) for tokens in shards])
        note = f"in the median, the slowest took {max(warm):.4f} s; peer: a scan"
        yield cost_row(
            f"text_found_seconds, {label}, in memory",
            float(np.median(warm)),
            scan,
            "s",
            note,
        )


def write_shards(folder: Path, rng: np.random.Generator, size: int) -> PackedSet:
    """Write a set of `size` tokens in shards, one of which is in memory at a time."""
    shards, first = [], 0
    for number in range(size // SHARD_TOKENS):
        tokens = _draw(rng, SHARD_TOKENS)
        shards.append(
            write_rows(
                folder / train_name(number), tokens, PIECES_SCHEMA.empty_table(), first
            )
        )
        first += len(tokens)
    write_json(
        folder / MANIFEST,
        {
            "format": FORMAT,
            "dtype": "uint16",
            "sequence_length": LENGTH,
            "sources": ["all"],
            "tokenizer": TOKENIZER,
            "validation": {},
            "train": {"rows": first, "rows_per_source": [first], "shards": shards},
        },
    )
    return PackedSet(folder)


def _measured_making(make: Callable[[], object]) -> tuple[float, int]:
    """Return seconds, and peak bytes of arrays and tables."""
    default = pa.default_memory_pool()
    counting = pa.proxy_memory_pool(default)
    pa.set_memory_pool(counting)
    tracemalloc.start()
    try:
        (seconds,) = fastest(1, make)
        arrays = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(default)
    return seconds, arrays + int(counting.max_memory())


Planted = tuple[int, int, int]
"""First token of a passage in a text, its number of tokens, and its place in the
rows.
"""


def planted_text(
    rng: np.random.Generator, packed: PackedSet
) -> tuple[np.ndarray, list[Planted]]:
    """Return a text of passages of the rows, alternating with other tokens, and the
    passages.
    """
    parts, planted, size = [], list[Planted](), 0
    for _ in range(TEXT_TOKENS // PASSAGE_TOKENS // 2):
        tokens = int(rng.integers(SHORTEST, PASSAGE_TOKENS + 1))
        number, first = (
            int(rng.integers(packed.rows)),
            int(rng.integers(LENGTH - tokens)),
        )
        planted.append((size, tokens, number * LENGTH + first))
        parts += [
            packed.read(np.array([number]))[0, first : first + tokens],
            rng.integers(VOCAB // 2, VOCAB, 2 * PASSAGE_TOKENS - tokens),
        ]
        size += 2 * PASSAGE_TOKENS
    return np.concatenate(parts).astype(np.uint16), planted


def is_found(planted: Planted, passages: Sequence[Passage]) -> bool:
    """Return True if a longer passage contains the planted one, or an equally long one
    has its place.
    """
    begin, tokens, place = planted
    for passage in passages:
        if passage.begin <= begin and passage.begin + passage.tokens >= begin + tokens:
            return passage.tokens > tokens or place in passage.places
    return False


def _forget(path: Path) -> None:
    """Drop a file from the page cache, so that it is read from disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _draw(rng: np.random.Generator, size: int) -> np.ndarray:
    """Draw rows of tokens with the frequencies of words (Zipf), some of them twice."""
    drawn = (
        np.minimum(rng.zipf(1.2, size // LENGTH * LENGTH), VOCAB - 1)
        .astype(np.uint16)
        .reshape(-1, LENGTH)
    )
    copies = int(COPIED * len(drawn))
    drawn[-copies:] = drawn[:copies]
    return drawn


def _text(rng: np.random.Generator, tokens: np.ndarray) -> np.ndarray:
    """Return passages of the rows, alternating with as many other tokens."""
    parts = []
    for _ in range(TEXT_TOKENS // PASSAGE_TOKENS // 2):
        first = rng.integers(LENGTH - PASSAGE_TOKENS)
        parts += [
            tokens[rng.integers(len(tokens)), first : first + PASSAGE_TOKENS],
            rng.integers(VOCAB // 2, VOCAB, PASSAGE_TOKENS),
        ]
    return np.concatenate(parts).astype(np.uint16)


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """Return a hash (uint64) of every n-gram of SHORTEST tokens."""
    number = max(len(tokens) - SHORTEST + 1, 0)
    hashes = np.zeros(number, np.uint64)
    for offset in range(SHORTEST):
        hashes = hashes * ODD + tokens[offset : offset + number]
    return hashes ^ hashes >> np.uint64(29)


def _scan(tokens: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Return the places of a text's n-grams that occur in some row."""
    text_hashes = _hashes(text)
    occurs = np.zeros(len(text_hashes), bool)
    for first in range(0, len(tokens), 1024):
        part = tokens[first : first + 1024]
        hashes = np.concatenate(
            [_hashes(part.reshape(-1)), np.zeros(SHORTEST - 1, np.uint64)]
        ).reshape(part.shape)
        row_hashes = hashes[:, : LENGTH - SHORTEST + 1]
        occurs |= np.isin(text_hashes, row_hashes[np.isin(row_hashes, text_hashes)])
    return np.flatnonzero(occurs)
