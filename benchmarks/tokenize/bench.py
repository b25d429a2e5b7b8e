"""`gristmill bench tokenize`: mixing and reading against plain copies of the same bytes, encoding one by one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.dataprep.files import atomic_write
from gristmill.dataprep.jobs.engine import Task
from gristmill.tokenize.encoding.sample import TokenizerSample
from gristmill.tokenize.encoding.tokenizer import load, train, write_tokenizer
from gristmill.tokenize.mixing.candidates import Documents
from gristmill.tokenize.mixing.packing import Packing, lay_out, make_stream
from gristmill.tokenize.mixing.write_shards import RowPlan, gather, layout_of, save, train_stream, write_train_shard
from gristmill.tokenize.order import Order
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_writing import write_packed_set

ROWS, LENGTH = 16_384, 1024
MEAN_DOCUMENT_TOKENS = 900
BATCH_ROWS = 64
VOCAB = 32_000
TOKENIZER = {"vocab_size": VOCAB, "eos": 0, "pad": 1, "sha256": ""}
TEXT_BYTES = 4_000_000
REPEATS = 3
MEGA = 1e6


def rows() -> Iterator[dict[str, Any]]:
    """Rows of name, ours, peer, unit, ratio (ours / peer)."""
    with tempfile.TemporaryDirectory() as folder:
        yield _gathering()
        yield _mixing(Path(folder))
        yield from _reading(Path(folder))
        yield _ordering()
        yield _encoding(Path(folder))


def _gathering() -> dict[str, Any]:
    """The pieces of a shard copied in the order of their origin to where its rows are, against one plain copy."""
    rng = np.random.default_rng(4)
    flat = rng.integers(0, VOCAB, ROWS * LENGTH, dtype=np.uint16)
    out, other = np.empty_like(flat), np.empty_like(flat)
    piece = LENGTH // 2
    origin = np.arange(0, len(flat), piece)
    target, length, part = rng.permutation(origin), np.full(len(origin), piece), np.zeros_like(origin)
    where, begins = np.array([flat.ctypes.data], dtype=np.uint64), np.array([0, len(flat)])
    chosen = np.arange(len(origin))
    ours = _rate(flat.nbytes, lambda: gather(where, begins, chosen, part, origin, target, length, length, 0, 0, out))
    return _row("mix: pieces of half a row, gathered", ours, _rate(flat.nbytes, lambda: np.copyto(other, flat)),
                "MB/s copy")


def _mixing(folder: Path) -> dict[str, Any]:
    """A whole shard (ordered, cut, gathered, written with its pieces, hashed), against writing its bytes alone."""
    rng = np.random.default_rng(0)
    number = ROWS * LENGTH // MEAN_DOCUMENT_TOKENS
    tokens = rng.poisson(MEAN_DOCUMENT_TOKENS, number).astype(np.int64)
    flat = rng.integers(0, VOCAB, int(tokens.sum()), dtype=np.uint16)
    flat.tofile(folder / "part.bin")
    words = rng.integers(0, 2**64, (number, 2), dtype=np.uint64)
    save(folder, "documents", Documents(words, np.zeros(number, np.int64), np.cumsum(tokens) - tokens, tokens))
    counts = {"a": ROWS * 3 // 4, "b": ROWS // 4}
    halves = np.array_split(np.arange(number), [number * 3 // 4])
    for source, (members, count) in enumerate(zip(halves, counts.values(), strict=True)):
        stream = make_stream(members, words[members], tokens[members], source, count * LENGTH)
        save(folder, train_stream(source), stream)
        save(folder, layout_of(train_stream(source)), lay_out(stream, 0, count * LENGTH, Packing(LENGTH)))
    plan = RowPlan(folder=str(folder), out=str(folder), parts=(str(folder / "part.bin"),), dtype="uint16", eos=0, pad=1,
                sequence_length=LENGTH, seed=1, sources=tuple(counts), stages=(tuple(counts.values()),))
    task = Task("train-00000", {"file": "train-00000.bin", "first": 0, "rows": ROWS})
    size = ROWS * LENGTH * 2
    ours = _rate(size, lambda: write_train_shard(task, plan))

    def write() -> None:
        with atomic_write(folder / "copy.bin") as sink:
            sink.write(flat[: ROWS * LENGTH].data)

    return _row("mix: a shard with its pieces", ours, _rate(size, write), "MB/s write")


def _reading(folder: Path) -> Iterator[dict[str, Any]]:
    """Batches in training order, widened to int64, against a sequential copy that widens alike."""
    tokens = np.random.default_rng(1).integers(0, VOCAB, (ROWS, LENGTH))
    write_packed_set(folder / "set", tokens, {"a": ROWS * 3 // 4, "b": ROWS // 4}, TOKENIZER)
    packed, source = PackedSet(folder / "set"), tokens.astype(np.uint16)
    order = packed.order(7)
    known = order.rows(np.arange(ROWS))

    def read() -> None:
        for first in range(0, ROWS, BATCH_ROWS):
            packed.read(known[first : first + BATCH_ROWS])

    def compute_and_read() -> None:
        for first in range(0, ROWS, BATCH_ROWS):
            packed.read(order.span(first, BATCH_ROWS))

    def copy() -> None:
        for first in range(0, ROWS, BATCH_ROWS):
            source[first : first + BATCH_ROWS].astype(np.int64)

    size = ROWS * LENGTH * 2
    peer = _rate(size, copy)
    yield _row("stream: shuffled batches, order computed", _rate(size, compute_and_read), peer, "MB/s copy")
    yield _row("stream: shuffled batches, order known", _rate(size, read), peer, "MB/s copy")


def _ordering() -> dict[str, Any]:
    """A shuffled order of a billion rows, computed, against numpy's shuffle of a million."""
    order, number, rng = Order([700_000_000, 300_000_000], 7), 1_000_000, np.random.default_rng(2)
    ours = _rate(number, lambda: order.span(0, number))
    peer = _rate(number, lambda: rng.permutation(number))
    return _row("order: positions computed", ours, peer, "M/s shuffle")


def _encoding(folder: Path) -> dict[str, Any]:
    """Documents in batches against one by one, same tokenizer."""
    rng = np.random.default_rng(3)
    letters = np.frombuffer(b"etaoinshrdlu", dtype=np.uint8)
    lexicon = [rng.choice(letters, rng.integers(2, 9)).tobytes().decode() for _ in range(5000)]
    texts, total = [], 0
    while total < TEXT_BYTES:
        texts.append(" ".join(lexicon[k] for k in rng.zipf(1.3, 700) % len(lexicon)))
        total += len(texts[-1])
    write_tokenizer(train(TokenizerSample({"words": texts[:100]}, {}), 2000), folder / "tokenizer")
    tokenizer = load(folder / "tokenizer")
    ours = _rate(total, lambda: tokenizer.encode(texts))
    peer = _rate(total, lambda: [tokenizer.encode([text]) for text in texts])
    return _row("tokenize: batches", ours, peer, "MB/s one by one")


def _rate(amount: float, work: Callable[[], object]) -> float:
    """Millions per second, the best of some repeats."""
    best = float("inf")
    for _ in range(REPEATS):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return amount / best / MEGA


def _row(name: str, ours: float, peer: float, unit: str) -> dict[str, Any]:
    return {"name": name, "ours": ours, "peer": peer, "unit": unit, "ratio": ours / peer}
