"""`gristmill bench text_index`: how long it takes to find the passages of a text in training rows, at two sizes.

The text has 1,000 tokens, half of them in passages that are cut out of the rows. The peer scans the rows with numpy for
the n-grams of the text, by hashes, and does not say how long a passage is. That the index makes the question's time
depend on the text and not on the set is what the two sizes show: what grows is the scan. `gigabyte_rows` asks the same
of a gigabyte, from the disk and from memory, with passages whose places are known; it takes 10 GB of disk for a while.
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

from benchmarks.measuring import Row, fastest, row
from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.tokenize import text_index
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import FORMAT, MANIFEST, PIECES_SCHEMA, train_name
from gristmill.tokenize.packed_writing import write_packed_set, write_rows
from gristmill.tokenize.text_index import OpenIndex, Passage

SIZES = (4_000_000, 32_000_000)
"""Tokens: a set of 64 MB is the larger one."""
GIGABYTE_TOKENS, SHARD_TOKENS = 500_000_000, 50_000_000
TEXTS = 40
"""That are asked for in the gigabyte; each has 12 planted passages."""
TOKENIZER = {"vocab_size": 32_000, "eos": 0, "pad": 1, "sha256": ""}
LENGTH, VOCAB, SHORTEST = 1024, 32_000, 8
TEXT_TOKENS, PASSAGE_TOKENS = 1000, 40
COPIED = 0.1
"""Of the rows so many are there twice, as in a second epoch."""
REPEATS = 5
BOUND_SECONDS = 1.0
"""What a question to a gigabyte of tokens may take once its index is mapped."""
MEGA = 1e6
ODD = np.uint64(0x9E3779B97F4A7C15)


def rows() -> Iterator[Row]:
    """Per size: seconds of a question (ratio: how many times as long the scan takes), and of making the index."""
    for size in SIZES:
        with tempfile.TemporaryDirectory() as name:
            yield from _of_size(Path(name), size)


def _of_size(folder: Path, size: int) -> Iterator[Row]:
    rng = np.random.default_rng(size)
    tokens = _draw(rng, size)
    write_packed_set(folder / "set", tokens, {"all": len(tokens)}, TOKENIZER)
    packed = PackedSet(folder / "set")
    make = _making(folder, packed)
    making, sorting = fastest(1, make), fastest(1, lambda: np.argsort(_hashes(tokens.reshape(-1)), kind="stable"))
    bytes_ = sum(path.stat().st_size for path in (folder / "index").iterdir())
    label = f"{size * 2 / MEGA:.0f} MB"
    yield row(
        f"text_index_made, {label}",
        size / MEGA / making[0],
        size / MEGA / sorting[0],
        "M tokens/s",
        f"{bytes_ / size:.1f} bytes per token; peer: numpy sorts the hashes alone",
    )
    text = _text(rng, tokens)
    index = OpenIndex(folder / "index", packed)
    found = {one.begin + at for one in index.passages(text) for at in range(one.tokens - SHORTEST + 1)}
    if found != set(_scan(tokens, text).tolist()):
        raise RuntimeError("the index and the scan find other n-grams of the text")
    opening = fastest(1, lambda: OpenIndex(folder / "index", PackedSet(folder / "set")).passages(text))[0]
    ours, peer = fastest(REPEATS, lambda: index.passages(text), lambda: _scan(tokens, text))
    yield {
        "name": f"text_found_seconds, {label}",
        "ours": ours,
        "peer": peer,
        "unit": "s",
        "ratio": peer / ours,
        "note": f"{TEXT_TOKENS} tokens; {opening:.3f} s with opening it; bound: {BOUND_SECONDS:g} s; peer: a scan",
    }


def _making(folder: Path, packed: PackedSet) -> Callable[[], object]:
    (folder / "work").mkdir()
    return partial(
        text_index.run,
        {"mix": packed.folder},
        {"shortest_span": SHORTEST},
        folder / "index",
        Context(work=folder / "work", emit=lambda event: None),
    )


def gigabyte_rows(size: int = GIGABYTE_TOKENS) -> Iterator[Row]:
    """Of a gigabyte: making the index, a question from the disk and from memory, and the share of planted passages that
    is found."""
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), np.random.default_rng(size)
        packed = write_shards(folder / "set", rng, size)
        making, held = _measured_making(_making(folder, packed))
        bytes_ = sum(path.stat().st_size for path in (folder / "index").iterdir())
        label = f"{size * 2 / MEGA:.0f} MB"
        yield row(
            f"text_index_made, {label}",
            size / MEGA / making,
            None,
            "M tokens/s",
            f"one process, which held {held / MEGA:.0f} MB beside mapped rows; {bytes_ / size:.1f} bytes a token",
        )
        shutil.rmtree(folder / "work")
        asked = [planted_text(rng, packed) for _ in range(TEXTS)]
        for path in (*packed.folder.iterdir(), *(folder / "index").iterdir()):
            _forget(path)
        cold, found = [], []
        index = OpenIndex(folder / "index", packed)
        for text, _ in asked:
            begun = time.perf_counter()
            found.append(index.passages(text))
            cold.append(time.perf_counter() - begun)
        yield _seconds(
            f"text_found_seconds, {label}, from disk",
            max(cold),
            BOUND_SECONDS,
            f"the slowest of {TEXTS} texts of {TEXT_TOKENS} tokens; the first took {cold[0]:.3f} s, the "
            f"slowest of the others {max(cold[1:]):.3f} s, the median {np.median(cold):.3f} s; peer: the "
            "bound",
        )
        planted = [(spans, passages) for (_, spans), passages in zip(asked, found, strict=True)]
        number = sum(len(spans) for spans, _ in planted)
        hit = sum(is_found(span, passages) for spans, passages in planted for span in spans)
        yield row(
            f"planted_spans_found, {label}",
            hit,
            number,
            "spans",
            f"of {SHORTEST} to {PASSAGE_TOKENS} tokens, each with the place that it was cut from",
        )
        warm = fastest(REPEATS, *(partial(index.passages, text) for text, _ in asked))
        shards = [np.memmap(path, "<u2", "r").reshape(-1, LENGTH) for path in sorted(packed.folder.glob("train-*.bin"))]
        (scan,) = fastest(1, lambda: [_scan(tokens, asked[0][0]) for tokens in shards])
        yield _seconds(
            f"text_found_seconds, {label}, in memory",
            float(np.median(warm)),
            scan,
            f"in the median, the slowest took {max(warm):.4f} s; peer: a scan",
        )


def _seconds(name: str, ours: float, peer: float, note: str) -> Row:
    return {"name": name, "ours": ours, "peer": peer, "unit": "s", "ratio": peer / ours, "note": note}


def write_shards(folder: Path, rng: np.random.Generator, size: int) -> PackedSet:
    """A set of so many tokens in shards, of which one is in memory at a time."""
    shards, first = [], 0
    for number in range(size // SHARD_TOKENS):
        tokens = _draw(rng, SHARD_TOKENS)
        shards.append(write_rows(folder / train_name(number), tokens, PIECES_SCHEMA.empty_table(), first))
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
    """Seconds, and bytes of arrays and tables at the peak."""
    usual = pa.default_memory_pool()
    counting = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(counting)
    tracemalloc.start()
    try:
        (seconds,) = fastest(1, make)
        arrays = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(usual)
    return seconds, arrays + int(counting.max_memory())


Planted = tuple[int, int, int]
"""Where in a text a passage begins, how many tokens it has, and the place that it was cut from."""


def planted_text(rng: np.random.Generator, packed: PackedSet) -> tuple[np.ndarray, list[Planted]]:
    """A text of passages of the rows, by turns with other tokens, and what was planted in it."""
    parts, planted, size = [], list[Planted](), 0
    for _ in range(TEXT_TOKENS // PASSAGE_TOKENS // 2):
        tokens = int(rng.integers(SHORTEST, PASSAGE_TOKENS + 1))
        number, at = int(rng.integers(packed.rows)), int(rng.integers(LENGTH - tokens))
        planted.append((size, tokens, number * LENGTH + at))
        parts += [
            packed.read(np.array([number]))[0, at : at + tokens],
            rng.integers(VOCAB // 2, VOCAB, 2 * PASSAGE_TOKENS - tokens),
        ]
        size += 2 * PASSAGE_TOKENS
    return np.concatenate(parts).astype(np.uint16), planted


def is_found(planted: Planted, passages: Sequence[Passage]) -> bool:
    """Whether a passage has it whole; where it ends as the planted one does, at the place that this was cut from."""
    begin, tokens, place = planted
    for one in passages:
        if one.begin <= begin and one.begin + one.tokens >= begin + tokens:
            return one.tokens > tokens or place in one.places
    return False


def _forget(path: Path) -> None:
    """Let the system keep nothing of a file in memory, so that it is read from the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _draw(rng: np.random.Generator, size: int) -> np.ndarray:
    """Rows of tokens as frequent as words are (Zipf), some of them twice."""
    drawn = np.minimum(rng.zipf(1.2, size // LENGTH * LENGTH), VOCAB - 1).astype(np.uint16).reshape(-1, LENGTH)
    copies = int(COPIED * len(drawn))
    drawn[-copies:] = drawn[:copies]
    return drawn


def _text(rng: np.random.Generator, tokens: np.ndarray) -> np.ndarray:
    """Passages of the rows, by turns with as many other tokens."""
    parts = []
    for _ in range(TEXT_TOKENS // PASSAGE_TOKENS // 2):
        at = rng.integers(LENGTH - PASSAGE_TOKENS)
        parts += [
            tokens[rng.integers(len(tokens)), at : at + PASSAGE_TOKENS],
            rng.integers(VOCAB // 2, VOCAB, PASSAGE_TOKENS),
        ]
    return np.concatenate(parts).astype(np.uint16)


def _hashes(tokens: np.ndarray) -> np.ndarray:
    """A hash (uint64) of every SHORTEST tokens that follow one another."""
    number = len(tokens) - SHORTEST + 1
    found = np.zeros(max(number, 0), np.uint64)
    for at in range(SHORTEST):
        found = found * ODD + tokens[at : at + number]
    return found ^ found >> np.uint64(29)


def _scan(tokens: np.ndarray, text: np.ndarray) -> np.ndarray:
    """The n-grams of a text that stand in some row, by their places in the text."""
    wanted = _hashes(text)
    there = np.zeros(len(wanted), bool)
    for begin in range(0, len(tokens), 1024):
        part = tokens[begin : begin + 1024]
        hashes = np.concatenate([_hashes(part.reshape(-1)), np.zeros(SHORTEST - 1, np.uint64)]).reshape(part.shape)
        there |= np.isin(
            wanted, hashes[:, : LENGTH - SHORTEST + 1][np.isin(hashes[:, : LENGTH - SHORTEST + 1], wanted)]
        )
    return np.flatnonzero(there)
