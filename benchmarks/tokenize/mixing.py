"""`gristmill bench tokenize`: mixing, packing and reading against plain copies of the
same bytes or plain Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.measuring import Row, fastest, row
from gristmill.core.files import atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import write_table
from gristmill.dataprep.runners.shuffle import Shuffled, send_to_files
from gristmill.dataprep.runners.tasks import Task
from gristmill.tokenize.document_sampling import word_ids
from gristmill.tokenize.encoding.bpe import train
from gristmill.tokenize.encoding.encode import DOCS_SCHEMA, docs_name, tokens_name
from gristmill.tokenize.encoding.tokenizer import load, write_tokenizer
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.tokenize.mixing import mix
from gristmill.tokenize.mixing.streams import (
    SEGMENTS,
    Bases,
    Draws,
    Segment,
    Streams,
    segment_name,
)
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import TokenizerEntry
from gristmill.tokenize.packing.array_files import save
from gristmill.tokenize.packing.best_fit import best_fit_decreasing
from gristmill.tokenize.packing.fill_in_middle import ADDED, Rearranging
from gristmill.tokenize.packing.packing import Packing, RowCounts
from gristmill.tokenize.packing.row_layout import PLACE_JOB, Shards, place_segment
from gristmill.tokenize.packing.write_shards import RowPlan, gather, write_train_shard
from gristmill.tokenize.shuffle import Order
from tests.packed_sets import write_packed_set

ROWS, LENGTH = 16_384, 1024
MEAN_DOCUMENT_TOKENS = 900
BATCH_ROWS = 64
FIM_DOCUMENTS = 10_000
VOCAB = 32_000
TOKENIZER: TokenizerEntry = {"vocab_size": VOCAB, "eos": 0, "pad": 1, "sha256": ""}
TEXT_BYTES = 4_000_000
REPEATS = 3
PACKED_DOCUMENTS, PACKED_LENGTH = 200_000, 2048
MEDIAN_TOKENS, SPREAD = 600, 1.2
"""Parameters of a log-normal distribution, near that of extracted web pages (FineWeb's
mean is about 1,000 tokens).
"""
SHARDS, DOCUMENTS, MEAN_TOKENS = 8, 200_000, 500
"""200 MB of 16-bit tokens in documents of 1 kB: 2 million documents per 2 GB, a tenth
of it.
"""
BYTE_VOCAB = 256
SOURCES = {"web": 0.7, "books": 0.2, "code": 0.1}
BOUND_MB_PER_S = 300
"""Bound per core on a local disk: a mixture ablation then takes seconds."""
MEGA = 1e6


def rows() -> Iterator[Row]:
    """Measure parts of a mixture, packing, and a whole mixture."""
    with tempfile.TemporaryDirectory() as folder:
        yield gathering_row()
        yield rearranging_row()
        yield shard_row(Path(folder))
        yield from reading_rows(Path(folder))
        yield ordering_row()
        yield batches_row(Path(folder))
    yield from packing_rows()
    yield from remixing_rows()


def gathering_row() -> Row:
    """Measure copying the pieces of a shard from the order of their origin into its
    rows, against a plain copy.
    """
    rng = np.random.default_rng(4)
    flat = rng.integers(0, VOCAB, ROWS * LENGTH, dtype=np.uint16)
    out, copy = np.empty_like(flat), np.empty_like(flat)
    piece = LENGTH // 2
    origin = np.arange(0, len(flat), piece)
    target, length, part = (
        rng.permutation(origin),
        np.full(len(origin), piece),
        np.zeros_like(origin),
    )
    addresses, begins = (
        np.array([flat.ctypes.data], dtype=np.uint64),
        np.array([0, len(flat)]),
    )
    chosen = np.arange(len(origin))
    ours = _rate(
        flat.nbytes,
        lambda: gather(
            addresses,
            begins,
            chosen,
            part,
            origin,
            target,
            length,
            length,
            0,
            np.zeros(1, np.int32),
            out,
        ),
    )
    return row(
        "mix: pieces of half a row, gathered",
        ours,
        _rate(flat.nbytes, lambda: np.copyto(copy, flat)),
        "MB/s copy",
    )


def rearranging_row() -> Row:
    """Measure rearranging documents for fill-in-the-middle, against `permute` of
    BigCode's Megatron-LM at the same cuts.

    The peer is its arithmetic on tokens (megatron/data/gpt_dataset.py), without
    decoding and encoding text.
    """
    rng = np.random.default_rng(5)
    tokens = rng.poisson(MEAN_DOCUMENT_TOKENS, FIM_DOCUMENTS).astype(np.int64)
    flat, first = (
        rng.integers(0, VOCAB, int(tokens.sum()), dtype=np.uint16),
        np.cumsum(tokens) - tokens,
    )
    words, copies = (
        rng.integers(0, 2**64, (FIM_DOCUMENTS, 2), dtype=np.uint64),
        np.zeros(FIM_DOCUMENTS, np.int32),
    )
    rearranging = Rearranging((1.0,), 0.5, 6, VOCAB, VOCAB + 1, VOCAB + 2, VOCAB + 3)
    length, offset, is_end = (
        tokens + 1 + ADDED,
        np.zeros_like(tokens),
        np.ones(FIM_DOCUMENTS, dtype=bool),
    )
    begin, out = (
        np.cumsum(length) - length,
        np.empty(int(length.sum()), dtype=np.uint16),
    )
    addresses, begins = (
        np.array([flat.ctypes.data], dtype=np.uint64),
        np.array([0, len(flat)]),
    )

    def ours() -> None:
        runs = rearranging.cut_pieces(is_end, words, copies, 0, tokens, offset, length)
        chosen, part = (
            np.arange(len(runs.piece)),
            np.zeros(len(runs.piece), dtype=np.int64),
        )
        gather(
            addresses,
            begins,
            chosen,
            part,
            first[runs.piece] + runs.source,
            begin[runs.piece] + runs.offset,
            runs.text,
            runs.length,
            0,
            runs.end,
            out,
        )

    lower, upper, spm = rearranging.cuts(words, copies, 0, tokens)

    def permute() -> np.ndarray:
        parts: list[np.ndarray | list[int]] = []
        for start, number, low, high, is_spm in zip(
            first, tokens, lower, upper, spm, strict=True
        ):
            document = flat[start : start + number]
            prefix, middle, suffix = document[:low], document[low:high], document[high:]
            if is_spm:
                parts += [
                    [rearranging.prefix, rearranging.suffix],
                    suffix,
                    [rearranging.middle],
                    prefix,
                    middle,
                ]
            else:
                parts += [
                    [rearranging.prefix],
                    prefix,
                    [rearranging.suffix],
                    suffix,
                    [rearranging.middle],
                    middle,
                ]
            parts.append([rearranging.eos])
        return np.concatenate(parts)

    ours()
    if not np.array_equal(out, permute()):
        raise RuntimeError("the two sides give different tokens")
    return row(
        "mix: fill-in-the-middle, per document",
        _rate(flat.nbytes, ours),
        _rate(flat.nbytes, permute),
        "MB/s permute",
    )


def shard_row(folder: Path) -> Row:
    """Measure a whole shard (cut, placed, gathered, written with its pieces, hashed),
    against writing its bytes alone.
    """
    rng = np.random.default_rng(0)
    number = ROWS * LENGTH // MEAN_DOCUMENT_TOKENS
    tokens = rng.poisson(MEAN_DOCUMENT_TOKENS, number).astype(np.int64)
    flat = rng.integers(0, VOCAB, int(tokens.sum()), dtype=np.uint16)
    flat.tofile(folder / "part.bin")
    words = rng.integers(0, 2**64, (number, 2), dtype=np.uint64)
    counts = (ROWS * 3 // 4, ROWS // 4)
    first = np.array([0, number * 3 // 4, number, number, number])
    save(
        folder / SEGMENTS,
        segment_name(0, 0),
        Segment(
            first,
            words,
            np.zeros(number, np.int32),
            np.zeros(number, np.int32),
            np.cumsum(tokens) - tokens,
            tokens,
        ),
    )
    none = np.zeros((1, 1, 4), dtype=np.int64)
    save(folder, "bases", Bases(none, none, none))
    streams = Streams(folder, 0, Draws(2, 0, 0), Bases(none, none, none))
    shards = Shards(1, ("a", "b"), (counts,), ROWS, (1, 1))
    plan = RowPlan(
        placed=Shuffled(folder / PLACE_JOB, 3, ["00000-0.arrow"]),
        out=str(folder),
        parts=(str(folder / "part.bin"),),
        dtype="uint16",
        eos=0,
        pad=1,
        sequence_length=LENGTH,
    )
    ends = [[count * LENGTH] for count in (*counts, 0, 0)]
    task = Task(
        "train-00000",
        {"file": "train-00000.bin", "partition": 0, "first": 0, "rows": ROWS},
    )
    size = ROWS * LENGTH * 2

    def place_and_write() -> None:
        sender = partial(
            place_segment,
            streams=streams,
            shards=shards,
            packing=Packing(LENGTH),
            ends=ends,
            plan=folder,
        )
        send_to_files(
            sender,
            str(folder),
            {PLACE_JOB: 3},
            Task("00000", {"pass": 0, "partition": 0}),
        )
        write_train_shard(task, plan)

    ours = _rate(size, place_and_write)

    def write() -> None:
        with atomic_write(folder / "copy.bin") as sink:
            sink.write(flat[: ROWS * LENGTH].data)

    return row("mix: a shard with its pieces", ours, _rate(size, write), "MB/s write")


def reading_rows(folder: Path) -> Iterator[Row]:
    """Measure batches in training order, widened to int64, against a sequential copy
    that widens, too.
    """
    tokens = np.random.default_rng(1).integers(0, VOCAB, (ROWS, LENGTH))
    write_packed_set(
        folder / "set", tokens, {"a": ROWS * 3 // 4, "b": ROWS // 4}, TOKENIZER
    )
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
    yield row(
        "stream: shuffled batches, order computed",
        _rate(size, compute_and_read),
        peer,
        "MB/s copy",
    )
    yield row(
        "stream: shuffled batches, order known", _rate(size, read), peer, "MB/s copy"
    )


def ordering_row() -> Row:
    """Measure a computed shuffled order of a billion rows, against numpy's shuffle of a
    million.
    """
    order, number, rng = (
        Order([700_000_000, 300_000_000], 7),
        1_000_000,
        np.random.default_rng(2),
    )
    ours = _rate(number, lambda: order.span(0, number))
    peer = _rate(number, lambda: rng.permutation(number))
    return row("order: positions computed", ours, peer, "M/s shuffle")


def batches_row(folder: Path) -> Row:
    """Measure documents in batches against one by one, with the same tokenizer."""
    rng = np.random.default_rng(3)
    letters = np.frombuffer(b"etaoinshrdlu", dtype=np.uint8)
    lexicon = [
        rng.choice(letters, rng.integers(2, 9)).tobytes().decode() for _ in range(5000)
    ]
    texts, total = [], 0
    while total < TEXT_BYTES:
        texts.append(
            " ".join(lexicon[number] for number in rng.zipf(1.3, 700) % len(lexicon))
        )
        total += len(texts[-1])
    write_tokenizer(
        train(TokenizerSample({"words": texts[:100]}, {}), 2000), folder / "tokenizer"
    )
    tokenizer = load(folder / "tokenizer")
    ours = _rate(total, lambda: tokenizer.encode(texts))
    peer = _rate(total, lambda: [tokenizer.encode([text]) for text in texts])
    return row("tokenize: batches", ours, peer, "MB/s one by one")


def _rate(amount: float, work: Callable[[], object]) -> float:
    """Return millions per second, the best of some repeats."""
    (seconds,) = fastest(REPEATS, work)
    return amount / seconds / MEGA


def packing_rows() -> Iterator[Row]:
    """Measure best-fit packing against plain Python, and the documents that each
    packing cuts.
    """
    drawn = np.random.default_rng(5).lognormal(
        np.log(MEDIAN_TOKENS), SPREAD, PACKED_DOCUMENTS
    )
    sizes = drawn.astype(np.int64) + 1
    remainders = (sizes % PACKED_LENGTH)[sizes % PACKED_LENGTH > 0].astype(np.int32)
    best_fit_decreasing(remainders[:10], PACKED_LENGTH)
    ours, python = fastest(
        REPEATS,
        lambda: best_fit_decreasing(remainders, PACKED_LENGTH),
        lambda: bisected(remainders.tolist(), PACKED_LENGTH),
    )
    million = len(remainders) / 1e6
    yield row(
        "pack_best_fit",
        million / ours,
        million / python,
        "M documents/s",
        "peer: a sorted list and bisect",
    )
    starts = np.concatenate([[0], np.cumsum(sizes)])
    packings = {"stream": False, "best_fit": True}
    costs = {}
    for name, best_fit in packings.items():
        counts = RowCounts([int(starts[-1])], Packing(PACKED_LENGTH, best_fit))
        counts.add(starts)
        costs[name] = counts.cost()
    for name, cost in costs.items():
        padding = cost.padding_tokens / cost.rows / PACKED_LENGTH
        yield row(
            f"documents cut: {name}",
            cost.split_documents / PACKED_DOCUMENTS,
            costs["stream"].split_documents / PACKED_DOCUMENTS,
            "share",
            f"padding {padding:.3%}; peer: stream",
        )


def bisected(lengths: list[int], capacity: int) -> int:
    """Pack by best-fit-decreasing with the spaces of all bins in a sorted list; returns
    the number of bins.
    """
    spaces: list[int] = []
    bins = 0
    for length in sorted(lengths, reverse=True):
        place = bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces.pop(place)
        else:
            bins += 1
            space = capacity
        if space > length:
            insort(spaces, space - length)
    return bins


class Seconds(NamedTuple):
    """Seconds of the processor and of the wall clock."""

    cpu: float
    wall: float


def remixing_rows() -> Iterator[Row]:
    """Measure the whole stage on one worker, including planning, tables and checksums,
    against a copy of its tokens.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = prepare(folder, DOCUMENTS)
        size = (
            sum(path.stat().st_size for path in inputs["tokenize"].glob("*.bin")) / MEGA
        )
        ours, peer = list[Seconds](), list[Seconds]()
        for number in range(3 * REPEATS):  # by turns
            ours.append(mixed(folder, inputs, seed=number))
            peer.append(copied(folder, inputs))
    our_cpu, peer_cpu = (
        min(seconds.cpu for seconds in ours),
        min(seconds.cpu for seconds in peer),
    )
    our_wall, peer_wall = (
        min(seconds.wall for seconds in ours),
        min(seconds.wall for seconds in peer),
    )
    peer_note = "peer: a copy with SHA-256 and fsync"
    note = (
        "one worker, by processor time, of all its threads; bound: "
        f"{BOUND_MB_PER_S} MB/s; {peer_note}"
    )
    # 0.44, 2026-11-24 04:24; 0.33 to 0.36 on another machine, 2026-11-28; 2 cores.
    yield row(
        "remix_mb_per_s_per_core",
        size / our_cpu,
        size / peer_cpu,
        "MB/s",
        note,
        floor=0.3,
    )
    note = (
        "one worker, by the clock: it waits for the disk, and writes tokens "
        f"beside its tables; {peer_note}"
    )
    yield row("remix_mb_per_s", size / our_wall, size / peer_wall, "MB/s", note)


def prepare(folder: Path, documents: int) -> dict[str, Path]:
    """Write the inputs of a mixture: random tokens of three sources."""
    inputs = {name: folder / name for name in ("ingest", "tokenizer", "tokenize")}
    for path in inputs.values():
        path.mkdir()
    write_tokenizer(
        train(TokenizerSample({"words": ["a few words"]}, {}), BYTE_VOCAB + 64),
        inputs["tokenizer"],
    )
    rng = np.random.default_rng(8)
    for shard in range(SHARDS):
        name, number = f"part-{shard:05d}.parquet", documents // SHARDS
        (inputs["ingest"] / name).touch()
        tokens = rng.geometric(1 / MEAN_TOKENS, number)
        rng.integers(0, BYTE_VOCAB, int(tokens.sum()), dtype=np.uint16).tofile(
            inputs["tokenize"] / tokens_name(name)
        )
        sources = pa.array(
            rng.choice(list(SOURCES), number, p=list(SOURCES.values()))
        ).dictionary_encode()
        write_table(
            inputs["tokenize"] / docs_name(name),
            pa.table(
                {
                    "row": np.arange(number),
                    "id": word_ids(
                        rng.integers(0, 2**64, (number, 2), dtype=np.uint64)
                    ),
                    "source": sources.cast(DOCS_SCHEMA.field("source").type),
                    "offset": np.cumsum(tokens) - tokens,
                    "tokens": tokens,
                    "bytes": tokens * 4,
                },
                schema=DOCS_SCHEMA,
            ),
        )
    return inputs


def mixed(folder: Path, inputs: dict[str, Path], seed: int) -> Seconds:
    """Time the stage, into new folders. It takes all tokens of the parts, except less
    than a row.
    """
    for name in ("work", "out"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    size = sum(path.stat().st_size for path in inputs["tokenize"].glob("*.bin")) // 2
    config: mix.MixRecipe = {
        "mix": {
            "tokens": size // PACKED_LENGTH * PACKED_LENGTH,
            "sequence_length": PACKED_LENGTH,
            "weights": {"alpha": 1.0},
        },
        "sources": {source: {"max_epochs": 4.0} for source in SOURCES},
        "seed": seed,
    }
    start, cpu_start = time.perf_counter(), time.process_time()
    mix.run(
        inputs,
        config,
        folder / "out",
        Context(work=folder / "work", stage="mix", emit=lambda event: None),
    )
    return Seconds(time.process_time() - cpu_start, time.perf_counter() - start)


def copied(folder: Path, inputs: dict[str, Path]) -> Seconds:
    """Time a copy of the token parts, with checksums and fsync."""
    start, cpu_start = time.perf_counter(), time.process_time()
    for path in sorted(inputs["tokenize"].glob("*.bin")):
        content = path.read_bytes()
        hashlib.sha256(content).hexdigest()
        with open(folder / "copy.bin", "wb") as sink:
            sink.write(content)
            sink.flush()
            os.fsync(sink.fileno())
    return Seconds(time.process_time() - cpu_start, time.perf_counter() - start)
