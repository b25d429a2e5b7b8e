"""`gristmill bench tokenize`: mixing, packing and reading against plain copies of the same bytes or plain Python."""

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
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measuring import Row, fastest, row
from gristmill.core.files import atomic_write
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import write_table
from gristmill.dataprep.jobs.shuffle import Shuffled, send_to_files
from gristmill.dataprep.jobs.tasks import Task
from gristmill.tokenize.document_sampling import word_ids
from gristmill.tokenize.encoding.encode import DOCS_SCHEMA, docs_name, tokens_name
from gristmill.tokenize.encoding.tokenizer import load, write_tokenizer
from gristmill.tokenize.encoding.vocabulary import train
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.tokenize.mixing import mix
from gristmill.tokenize.mixing.array_files import save
from gristmill.tokenize.mixing.best_fit import best_fit_decreasing
from gristmill.tokenize.mixing.fill_in_middle import ADDED, Rearranging
from gristmill.tokenize.mixing.packing import Costs, Packing
from gristmill.tokenize.mixing.row_layout import PLACE_JOB, Shards, place_segment
from gristmill.tokenize.mixing.streams import SEGMENTS, Bases, Draws, Segment, Streams, segment_name
from gristmill.tokenize.mixing.write_shards import RowPlan, gather, write_train_shard
from gristmill.tokenize.order import Order
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_writing import write_packed_set

ROWS, LENGTH = 16_384, 1024
MEAN_DOCUMENT_TOKENS = 900
BATCH_ROWS = 64
FIM_DOCUMENTS = 10_000
VOCAB = 32_000
TOKENIZER = {"vocab_size": VOCAB, "eos": 0, "pad": 1, "sha256": ""}
TEXT_BYTES = 4_000_000
REPEATS = 3
PACKED_DOCUMENTS, PACKED_LENGTH = 200_000, 2048
MEDIAN_TOKENS, SPREAD = 600, 1.2
"""Of a log-normal distribution: near what web pages have after extraction (FineWeb's mean is about 1,000 tokens)."""
SHARDS, DOCUMENTS, MEAN_TOKENS = 8, 200_000, 500
"""200 MB of 16-bit tokens in documents of 1 kB: 2 million documents per 2 GB, a tenth of it."""
BYTE_VOCAB = 256
SOURCES = {"web": 0.7, "books": 0.2, "code": 0.1}
BOUND_MB_PER_S = 300
"""What a mixture ablation must reach per core on a local disk, so that it costs seconds."""
MEGA = 1e6


def rows() -> Iterator[Row]:
    """Measure what a mixture is made of, packing, and a whole mixture."""
    with tempfile.TemporaryDirectory() as folder:
        yield _gathering()
        yield _rearranging()
        yield _mixing(Path(folder))
        yield from _reading(Path(folder))
        yield _ordering()
        yield _encoding(Path(folder))
    yield from packing_rows()
    yield from remixing_rows()


def _gathering() -> Row:
    """The pieces of a shard copied in the order of their origin to where its rows are, against one plain copy."""
    rng = np.random.default_rng(4)
    flat = rng.integers(0, VOCAB, ROWS * LENGTH, dtype=np.uint16)
    out, other = np.empty_like(flat), np.empty_like(flat)
    piece = LENGTH // 2
    origin = np.arange(0, len(flat), piece)
    target, length, part = rng.permutation(origin), np.full(len(origin), piece), np.zeros_like(origin)
    where, begins = np.array([flat.ctypes.data], dtype=np.uint64), np.array([0, len(flat)])
    chosen = np.arange(len(origin))
    ours = _rate(
        flat.nbytes,
        lambda: gather(where, begins, chosen, part, origin, target, length, length, 0, np.zeros(1, np.int32), out),
    )
    return row(
        "mix: pieces of half a row, gathered", ours, _rate(flat.nbytes, lambda: np.copyto(other, flat)), "MB/s copy"
    )


def _rearranging() -> Row:
    """Documents rearranged for filling in the middle, against `permute` of BigCode's Megatron-LM at the same cuts.

    The peer is its arithmetic on tokens (megatron/data/gpt_dataset.py), without the text that it decodes and encodes.
    """
    rng = np.random.default_rng(5)
    tokens = rng.poisson(MEAN_DOCUMENT_TOKENS, FIM_DOCUMENTS).astype(np.int64)
    flat, first = rng.integers(0, VOCAB, int(tokens.sum()), dtype=np.uint16), np.cumsum(tokens) - tokens
    words, time = rng.integers(0, 2**64, (FIM_DOCUMENTS, 2), dtype=np.uint64), np.zeros(FIM_DOCUMENTS, np.int32)
    how = Rearranging((1.0,), 0.5, 6, VOCAB, VOCAB + 1, VOCAB + 2, VOCAB + 3)
    length, offset, one = tokens + 1 + ADDED, np.zeros_like(tokens), np.ones(FIM_DOCUMENTS, dtype=bool)
    begin, out = np.cumsum(length) - length, np.empty(int(length.sum()), dtype=np.uint16)
    where, begins = np.array([flat.ctypes.data], dtype=np.uint64), np.array([0, len(flat)])

    def ours() -> None:
        runs = how.cut_pieces(one, words, time, 0, tokens, offset, length)
        chosen, part = np.arange(len(runs.piece)), np.zeros(len(runs.piece), dtype=np.int64)
        gather(
            where,
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

    lower, upper, spm = how.cuts(words, time, 0, tokens)

    def permute() -> np.ndarray:
        found = []
        for start, number, low, high, is_spm in zip(first, tokens, lower, upper, spm, strict=True):
            document = flat[start : start + number]
            prefix, middle, suffix = document[:low], document[low:high], document[high:]
            found.append(
                np.concatenate(
                    [[how.prefix, how.suffix], suffix, [how.middle], prefix, middle, [how.eos]]
                    if is_spm
                    else [[how.prefix], prefix, [how.suffix], suffix, [how.middle], middle, [how.eos]]
                )
            )
        return np.concatenate(found)

    ours()
    if not np.array_equal(out, permute()):
        raise AssertionError("the two sides give different tokens")
    return row(
        "mix: fill-in-the-middle, per document", _rate(flat.nbytes, ours), _rate(flat.nbytes, permute), "MB/s permute"
    )


def _mixing(folder: Path) -> Row:
    """A whole shard (cut, placed, gathered, written with its pieces, hashed), against writing its bytes alone."""
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
            first, words, np.zeros(number, np.int32), np.zeros(number, np.int32), np.cumsum(tokens) - tokens, tokens
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
    task = Task("train-00000", {"file": "train-00000.bin", "partition": 0, "first": 0, "rows": ROWS})
    size = ROWS * LENGTH * 2

    def place_and_write() -> None:
        sender = partial(
            place_segment, streams=streams, shards=shards, packing=Packing(LENGTH), ends=ends, plan=str(folder)
        )
        send_to_files(sender, str(folder), {PLACE_JOB: 3}, Task("00000", {"pass": 0, "partition": 0}))
        write_train_shard(task, plan)

    ours = _rate(size, place_and_write)

    def write() -> None:
        with atomic_write(folder / "copy.bin") as sink:
            sink.write(flat[: ROWS * LENGTH].data)

    return row("mix: a shard with its pieces", ours, _rate(size, write), "MB/s write")


def _reading(folder: Path) -> Iterator[Row]:
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
    yield row("stream: shuffled batches, order computed", _rate(size, compute_and_read), peer, "MB/s copy")
    yield row("stream: shuffled batches, order known", _rate(size, read), peer, "MB/s copy")


def _ordering() -> Row:
    """A shuffled order of a billion rows, computed, against numpy's shuffle of a million."""
    order, number, rng = Order([700_000_000, 300_000_000], 7), 1_000_000, np.random.default_rng(2)
    ours = _rate(number, lambda: order.span(0, number))
    peer = _rate(number, lambda: rng.permutation(number))
    return row("order: positions computed", ours, peer, "M/s shuffle")


def _encoding(folder: Path) -> Row:
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
    return row("tokenize: batches", ours, peer, "MB/s one by one")


def _rate(amount: float, work: Callable[[], object]) -> float:
    """Millions per second, the best of some repeats."""
    (seconds,) = fastest(REPEATS, work)
    return amount / seconds / MEGA


def packing_rows() -> Iterator[Row]:
    """Best-fit packing against the usual Python of it, and what it saves beside `stream`."""
    drawn = np.random.default_rng(5).lognormal(np.log(MEDIAN_TOKENS), SPREAD, PACKED_DOCUMENTS)
    sizes = drawn.astype(np.int64) + 1
    rests = (sizes % PACKED_LENGTH)[sizes % PACKED_LENGTH > 0].astype(np.int32)
    best_fit_decreasing(rests[:10], PACKED_LENGTH)
    ours, python = fastest(
        REPEATS, lambda: best_fit_decreasing(rests, PACKED_LENGTH), lambda: bisected(rests.tolist(), PACKED_LENGTH)
    )
    million = len(rests) / 1e6
    yield row("pack_best_fit", million / ours, million / python, "M documents/s", "peer: a sorted list and bisect")
    starts = np.concatenate([[0], np.cumsum(sizes)])
    counted, tokens = Costs([int(starts[-1])], Packing(PACKED_LENGTH)), int(starts[-1])
    counted.add(starts)
    costs = counted.accounts()
    for name, found in costs.items():
        note = (
            f"padding {found['padding_tokens'] / found['rows'] / PACKED_LENGTH:.3%}, dropped "
            f"{found['dropped_tokens'] / tokens:.2%}; peer: stream"
        )
        yield row(
            f"documents cut: {name}",
            found["split_documents"] / PACKED_DOCUMENTS,
            costs["stream"]["split_documents"] / PACKED_DOCUMENTS,
            "share",
            note,
        )


def bisected(lengths: list[int], capacity: int) -> int:
    """Best-fit-decreasing with the spaces of all bins in a sorted list; the number of bins."""
    spaces: list[int] = []
    used = 0
    for length in sorted(lengths, reverse=True):
        place = bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces.pop(place)
        else:
            used, space = used + 1, capacity
        if space > length:
            insort(spaces, space - length)
    return used


def remixing_rows() -> Iterator[Row]:
    """A whole mixture from token parts, against a copy of the same bytes: by processor time, and by the clock.

    It is the whole stage on one worker; planning, tables and checksums are in it.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs = prepare(Path(folder), DOCUMENTS)
        size = sum(path.stat().st_size for path in inputs["tokenize"].glob("*.bin"))
        ours = peer = (float("inf"), float("inf"))
        for number in range(3 * REPEATS):  # By turns.
            ours = least(ours, mixed(Path(folder), inputs, seed=number))
            peer = least(peer, copied(Path(folder), inputs))
        notes = (
            f"one worker, by processor time, of all its threads; bound: {BOUND_MB_PER_S} MB/s",
            "one worker, by the clock: it waits for the disk, and writes tokens beside its tables",
        )
        names = ("remix_mb_per_s_per_core", "remix_mb_per_s")
        for name, own, other, note in zip(names, ours, peer, notes, strict=True):
            # By processor time 0.44, 2026-11-24 04:24, 2 cores, load 1.
            floor = 0.38 if name.endswith("core") else None
            peer_note = f"{note}; peer: a copy with SHA-256 and fsync"
            yield row(name, size / own / 1e6, size / other / 1e6, "MB/s", peer_note, floor)


def least(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """The smaller one of each."""
    return min(one[0], other[0]), min(one[1], other[1])


def prepare(folder: Path, documents: int) -> dict[str, Path]:
    """Stages that a mixture reads, as if they had been committed: random tokens of three sources."""
    inputs = {name: folder / name for name in ("ingest", "tokenizer", "tokenize")}
    for path in inputs.values():
        path.mkdir()
    write_tokenizer(train(TokenizerSample({"words": ["a few words"]}, {}), BYTE_VOCAB + 64), inputs["tokenizer"])
    rng = np.random.default_rng(8)
    for shard in range(SHARDS):
        name, number = f"part-{shard:05d}.parquet", documents // SHARDS
        (inputs["ingest"] / name).touch()
        tokens = rng.geometric(1 / MEAN_TOKENS, number)
        rng.integers(0, BYTE_VOCAB, int(tokens.sum()), dtype=np.uint16).tofile(inputs["tokenize"] / tokens_name(name))
        sources = pa.array(rng.choice(list(SOURCES), number, p=list(SOURCES.values()))).dictionary_encode()
        write_table(
            inputs["tokenize"] / docs_name(name),
            pa.table(
                {
                    "row": np.arange(number),
                    "id": word_ids(rng.integers(0, 2**64, (number, 2), dtype=np.uint64)),
                    "source": sources.cast(DOCS_SCHEMA.field("source").type),
                    "offset": np.cumsum(tokens) - tokens,
                    "tokens": tokens,
                    "bytes": tokens * 4,
                },
                schema=DOCS_SCHEMA,
            ),
        )
    return inputs


def mixed(folder: Path, inputs: dict[str, Path], seed: int) -> tuple[float, float]:
    """Seconds of the processor and of the clock of the stage, into new folders.

    It takes as many tokens as the parts hold, less than a row aside.
    """
    for name in ("work", "out"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    size = sum(path.stat().st_size for path in inputs["tokenize"].glob("*.bin")) // 2
    source: dict[str, Any] = {
        "weight": 1.0,
        "max_epochs": 4.0,
        **dict.fromkeys(("where", "epochs", "min_tokens", "max_tokens")),
    }
    config = {
        "mix": {
            "tokens": size // PACKED_LENGTH * PACKED_LENGTH,
            "sequence_length": PACKED_LENGTH,
            "weights": {"alpha": 1.0},
        },
        "sources": dict.fromkeys(SOURCES, source),
        "seed": seed,
    }
    begun, used = time.perf_counter(), time.process_time()
    mix.run(inputs, config, folder / "out", Context(work=folder / "work", stage="mix", emit=lambda event: None))
    return time.process_time() - used, time.perf_counter() - begun


def copied(folder: Path, inputs: dict[str, Path]) -> tuple[float, float]:
    """Seconds of the processor and of the clock of a copy of the token parts, with checksums and on the disk."""
    begun, used = time.perf_counter(), time.process_time()
    for path in sorted(inputs["tokenize"].glob("*.bin")):
        content = path.read_bytes()
        hashlib.sha256(content).hexdigest()
        with open(folder / "copy.bin", "wb") as sink:
            sink.write(content)
            sink.flush()
            os.fsync(sink.fileno())
    return time.process_time() - used, time.perf_counter() - begun
