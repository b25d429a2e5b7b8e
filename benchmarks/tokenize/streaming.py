"""`gristmill bench stream`: shuffled batches of tokens as tensors, beside plain loops
and MosaicML Streaming.

Both sides read the same rows of random tokens once, 128 MB in the page cache, in a
shuffled order, and hold one batch of 256 rows of 2,048 tokens at a time as a tensor.

`stream_vs_memmap`: the plain loop maps one file, draws a permutation of all rows with
numpy when it starts, and takes each batch with one fancy index, as uint16. Ours
computes its order (two sources, keyed, without a permutation in memory), looks up each
row in one of eight shards and checks it, as uint16 too; it reads each batch when it is
taken, as a training does whose processors compute the steps. Opening the files is in
neither time. `..._per_core` is the same by processor time. `stream_ahead_vs_memmap`
reads in two threads, as beside an accelerator, unlike the plain loop.

MosaicML Streaming needs other versions of packages than gristmill: the environment
variable GRISTMILL_STREAMING_PYTHON names the Python of an environment that has it. Its
rate is the better one of two settings of its loader, in the process and with two
workers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

import numpy as np

from benchmarks.measuring import Row, fastest, row
from benchmarks.tokenize import mosaic_peer
from gristmill.core.files import read_json, write_json
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.packed_files import PIECES_SCHEMA, train_name
from gristmill.tokenize.packed_writing import write_rows
from gristmill.tokenize.shuffle import Order
from gristmill.tokenize.streaming.read_ahead import ReadAhead
from tests.packed_sets import write_packed_set

PYTHON_VARIABLE = "GRISTMILL_STREAMING_PYTHON"
ROWS, LENGTH, BATCH, SHARDS = 32_768, 2048, 256, 8
VOCAB = 32_000
RESUMED_STEP = 1_000_000
PEER_BATCHES = 20
KNOWN_ROWS = 20_000_000
"""Rows of the permutation that numpy draws; ours orders 50,000 times as many."""
HUGE_ROWS = 10**12
AHEAD = 4
READING_THREADS = 2
"""Beside an accelerator training reads with 4 (`train.loop.prefetch`)."""
REPEATS = 5
PAIRS = 60
MEGA = 1e6


def rows() -> Iterator[Row]:
    """Measure speed, start, resumption and memory."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_set(folder)
        read_epoch(folder, 0, 1)  # imports torch
        before = mosaic_peer.anonymous_bytes()
        read_epoch(folder, 0)
        memory = mosaic_peer.anonymous_bytes() - before
        packed, total = PackedSet(folder / "set"), ROWS * LENGTH / MEGA
        plain = partial(read_plainly, np.load(folder / "tokens.npy", mmap_mode="r"))
        ours, peer = fastest(REPEATS, lambda: read_batches(packed, 0), plain)
        yield row("stream_vs_memmap", total / ours, total / peer, "M tokens/s")
        yield per_core_row(packed, plain)
        ahead, peer = fastest(
            REPEATS, lambda: read_batches(packed, 0, threads=READING_THREADS), plain
        )
        note = f"ours with {READING_THREADS} threads, the loop with none"
        yield row(
            "stream_ahead_vs_memmap", total / ahead, total / peer, "M tokens/s", note
        )
        yield from mosaic_rows(folder, total / ours, memory)
        yield order_row()


def floor_rows() -> Iterator[Row]:
    """Measure the row of processor time alone."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_set(folder)
        plain = partial(read_plainly, np.load(folder / "tokens.npy", mmap_mode="r"))
        yield per_core_row(PackedSet(folder / "set"), plain)


def per_core_row(packed: PackedSet, plain: Callable[[], None]) -> Row:
    """Measure the median ratio of consecutive pairs, by processor time: the price of
    order and checks.
    """
    seconds = np.empty((PAIRS, 2))
    for pair in seconds:
        pair[:] = fastest(
            1, lambda: read_batches(packed, 0), plain, clock=time.process_time
        )
    peer, ratio = (
        float(np.median(seconds[:, 1])),
        float(np.median(seconds[:, 1] / seconds[:, 0])),
    )
    rate = ROWS * LENGTH / MEGA / peer
    note = f"by processor time, median of {PAIRS} pairs: the price of order and checks"
    # 0.95 was reached before rows were compared with their checksums (2026-11-21), and
    # is reached with that.
    return row(
        "stream_vs_memmap_per_core", rate * ratio, rate, "M tokens/s", note, floor=0.95
    )


def read_plainly(tokens: np.ndarray) -> None:
    """Read an epoch of shuffled batches by one fancy index each."""
    import torch

    permutation = np.random.default_rng(1).permutation(ROWS)
    for first in range(0, ROWS, BATCH):
        torch.from_numpy(tokens[permutation[first : first + BATCH]])


def write_set(folder: Path) -> None:
    """Write the same random tokens as a packed set of several shards and as one plain
    array.
    """
    tokens = np.random.default_rng(0).integers(
        0, VOCAB, (ROWS, LENGTH), dtype=np.uint16
    )
    np.save(folder / "tokens.npy", tokens)
    counts = {"a": ROWS * 3 // 4, "b": ROWS // 4}
    write_packed_set(
        folder / "set",
        tokens[:ROWS],
        counts,
        {"vocab_size": VOCAB, "eos": 0, "pad": 1, "sha256": ""},
    )
    shards = [
        write_rows(
            folder / "set" / train_name(number), part, PIECES_SCHEMA.empty_table()
        )
        for number, part in enumerate(np.array_split(tokens, SHARDS))
    ]
    manifest = read_json(folder / "set" / "packed.json")
    write_json(
        folder / "set" / "packed.json",
        {**manifest, "train": {**manifest["train"], "shards": shards}},
    )


def read_epoch(folder: Path, first_step: int, steps: int = ROWS // BATCH) -> None:
    """Open the set and read batches as tensors."""
    read_batches(PackedSet(folder / "set"), first_step, steps)


def read_batches(
    packed: PackedSet, first_step: int, steps: int = ROWS // BATCH, threads: int = 0
) -> None:
    """Read batches as tensors, as training does."""
    import torch

    order = packed.order(7)

    def read(step: int) -> torch.Tensor:
        return torch.from_numpy(packed.tokens(order.span(step * BATCH, BATCH)))

    ahead = ReadAhead(read, first_step + steps, AHEAD, threads)
    for step in range(first_step, first_step + steps):
        ahead.take(step)
    ahead.close()


class Peer(TypedDict):
    """Output of mosaic_peer.py."""

    rows_per_second: float
    start_seconds: float
    resume_seconds: float
    memory_bytes: int


class Measured(NamedTuple):
    """A measurement of ours, and its name in `mosaic_peer.py`'s JSON.

    Attributes:
        name: of the row.
        ours: value.
        unit: of both sides.
        key: of the peer's value.
        scale: factor of the peer's value, or of its reciprocal for seconds.
        note: of the row.
    """

    name: str
    ours: float
    unit: str
    key: Literal["rows_per_second", "start_seconds", "resume_seconds", "memory_bytes"]
    scale: float
    note: str = ""

    def row(self, peer: Peer) -> Row:
        """Return the row beside the peer's values."""
        value = peer[self.key]
        peer_value = (
            self.scale / value if self.key.endswith("_seconds") else self.scale * value
        )
        return row(self.name, self.ours, peer_value, self.unit, self.note)


def mosaic_rows(folder: Path, rate: float, memory: int) -> Iterator[Row]:
    """Measure MosaicML Streaming, if it is installed."""
    (start,) = fastest(REPEATS, lambda: read_epoch(folder, 0, 1))
    (resume,) = fastest(REPEATS, lambda: read_epoch(folder, RESUMED_STEP, 1))
    start_note = f"ours takes {start:.4f} s to the first batch"
    resume_note = f"ours takes {resume:.4f} s to the batch of step {RESUMED_STEP}"
    memory_note = "an epoch's growth of the process; less is better"
    measurements = (
        Measured(
            "stream_vs_mosaicml", rate, "M tokens/s", "rows_per_second", LENGTH / MEGA
        ),
        Measured(
            "stream_start_vs_mosaicml",
            1 / start,
            "starts/s",
            "start_seconds",
            1.0,
            start_note,
        ),
        Measured(
            "stream_resume_vs_mosaicml",
            1 / resume,
            "resumes/s",
            "resume_seconds",
            1.0,
            resume_note,
        ),
        Measured(
            "stream_memory_vs_mosaicml",
            max(memory, 0) / MEGA,
            "MB",
            "memory_bytes",
            1 / MEGA,
            memory_note,
        ),
    )
    peer = measure_mosaic(folder)
    missing = (
        f"mosaicml-streaming is not installed ({PYTHON_VARIABLE} can name "
        "another environment's Python)"
    )
    for measured in measurements:
        yield (
            row(measured.name, measured.ours, None, measured.unit, missing)
            if peer is None
            else measured.row(peer)
        )


def measure_mosaic(folder: Path) -> Peer | None:
    """Run mosaic_peer.py by the Python that has the library, and return its JSON; None
    if there is none.

    Raises:
        RuntimeError: it failed; the message has its output.
    """
    python = os.environ.get(PYTHON_VARIABLE)
    if python is None:
        if importlib.util.find_spec("streaming") is None:
            return None
        python = sys.executable
    command = [
        python,
        mosaic_peer.__file__,
        str(folder / "tokens.npy"),
        str(folder / "mds"),
        str(BATCH),
        str(PEER_BATCHES),
        str(RESUMED_STEP),
    ]
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH"
    }
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    measurements: Peer = json.loads(done.stdout.splitlines()[-1])
    return measurements


def order_row() -> Row:
    """Measure the first batch of an order of 10**12 rows, against drawing a permutation
    of 2 * 10**7.
    """
    positions, seeds = np.arange(BATCH), iter(range(10 * REPEATS))
    counts = [HUGE_ROWS * 3 // 4, HUGE_ROWS // 4]
    ours, peer = fastest(
        REPEATS,
        lambda: Order(counts, next(seeds)).rows(positions),
        lambda: np.random.default_rng(next(seeds)).permutation(KNOWN_ROWS),
    )
    note = f"ours of {HUGE_ROWS} rows, numpy's of {KNOWN_ROWS}"
    return row(
        "stream_order_start_vs_permutation", 1 / ours, 1 / peer, "orders/s", note
    )
