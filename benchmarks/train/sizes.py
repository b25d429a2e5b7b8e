"""`gristmill bench sizes`, a part of `bench train`: speed and memory of whole trainings
of some sizes.

Per size three rows: tokens per second beside transformers' Llama of the same sizes,
arithmetic beside a plain matrix product on the same device, and peak memory beside the
same Llama's. The note of the second row has MFU by both conventions ("unknown" if the
device's peak is), the wait for data, and the pauses for checkpoints.

The sizes of a GPU are those that papers and other projects report: one micro-batch is
as large as the memory of an H200 allows without activation checkpointing, and
micro-batches accumulate as in published recipes. Each side trains in a process of its
own, whose memory is measured. `--model PATH` measures a folder of transformers in their
place, beside its class in a plain loop.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import torch

from benchmarks.checkout import ROOT
from benchmarks.measuring import Row, row
from benchmarks.train.small_models import random_packed_set
from gristmill.mixtures.schema.model import Model
from gristmill.train.models.weights import read_shape

GIGA = 1e9
WINDOWS = 8
"""Groups of steps that are timed as one: the first does not count, a checkpoint is
written after the third and the sixth, and the fourth and seventh share a CPU with its
writing.
"""
Side = Literal["ours", "transformers"]
ROUNDS = 2
"""Both sides take turns, and the faster round of each counts: the speed of a shared
machine changes in a minute.
"""


@dataclass(frozen=True)
class Size:
    """A training.

    Attributes:
        name: beginning of its rows' names.
        model: the section, or the folder of a model.
        vocab: number of ids.
        length: tokens per row.
        micro_rows, rows: per forward pass and per step.
        window_steps: steps that are timed as one.
        compile: see Compute.compile; transformers' model is compiled unless this is
            `off`.
        published: MFU that others report, with the place.
    """

    name: str
    model: Model | Path
    vocab: int
    length: int
    micro_rows: int
    rows: int
    window_steps: int
    compile: Literal["auto", "off", "block", "model"] = "off"
    published: str = ""


class Speed(TypedDict):
    """Speed and memory of a training."""

    tokens_per_second: float
    peak_memory_bytes: int


class OurSpeed(Speed):
    """Measurements of our training."""

    mfu: float | str
    """Of the model's FLOPs; `unknown` on an unknown device."""
    mfu_causal: float | str
    """With causal attention halved."""
    data_wait_share: float
    checkpoint_seconds: list[float]
    """Pauses."""
    flops: float
    """Per second."""
    matmul: float
    """FLOPs per second of a matrix product."""


class Rounds(TypedDict, total=False):
    """Fastest round of each side."""

    ours: OurSpeed
    transformers: Speed


ON_GPU = (
    Size(
        "124M, T=1024",
        Model(preset="llama-125m"),
        50_304,
        1024,
        64,
        512,
        5,
        "model",
        "nanochat 41 % (d12, dev/LOG.md), llm.c 41 % (modded-nanogpt, record 1)",
    ),
    Size(
        "350M, T=1024",
        Model(preset="llama-350m"),
        50_304,
        1024,
        32,
        256,
        5,
        "model",
        "nanochat 46 % (d18, dev/LOG.md)",
    ),
    Size(
        "1.1B, T=2048",
        Model(
            layers=22,
            width=2048,
            heads=16,
            kv_heads=4,
            ffn_width=5632,
            tied_embeddings=False,
        ),
        32_000,
        2048,
        16,
        64,
        5,
        "model",
        "nanochat 49 % (d26, dev/LOG.md), torchtitan 39 % (Llama 3 8B, 8 H100)",
    ),
)
"""1.1B is TinyLlama's shape with heads of 128 channels (Zhang et al. 2024). The
published figures are those of one GPU of eight H100, which have the H200's peak:
benchmarks/llama3_h100_202412_torchtitan.md, nanochat's and modded-nanogpt's own
records; some are worked out from their tokens per second.
"""
ON_CPU = (
    Size("1.4M, T=256", Model(preset="llama-1m"), 4096, 256, 4, 8, 2),
    Size("14M, T=512", Model(preset="llama-10m"), 8192, 512, 1, 2, 2),
)


def rows(model: Path | None = None) -> Iterator[Row]:
    """Measure all sizes of this device, or a model.

    Raises:
        RuntimeError: our own training failed; the message has its output.
    """
    on_gpu = torch.cuda.is_available()
    if model is None:
        for size in ON_GPU if on_gpu else ON_CPU:
            yield from rows_of(size)
        return
    shape = read_shape(model)
    length = min(shape.sequence_length, 2048 if on_gpu else 256)
    name = f"{model.name}, {shape.parameters / 1e6:.0f}M, T={length}"
    yield from rows_of(Size(name, model, shape.vocab_size, length, 1, 4, 2))


def rows_of(size: Size) -> Iterator[Row]:
    """Measure one size."""
    sides: list[Side] = ["ours"]
    failures: dict[str, str] = {}
    if importlib.util.find_spec("transformers") is None:
        failures["transformers"] = "it is not installed"
    else:
        sides.append("transformers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = WINDOWS * size.window_steps
        random_packed_set(
            folder / "mix", size.vocab, size.rows * steps, size.length
        ).close()
        fastest_rounds = _measure_by_turns(sides, size, folder, failures)
    ours, peer = fastest_rounds.get("ours"), fastest_rounds.get("transformers")
    if ours is None:
        raise RuntimeError(
            f"a training of {size.name} could not be measured: {failures['ours']}"
        )
    missing_peer = (
        ""
        if peer is not None
        else f"transformers: {failures['transformers'].splitlines()[-1]}"
    )
    yield row(
        f"{size.name}, vs transformers",
        ours["tokens_per_second"],
        None if peer is None else peer["tokens_per_second"],
        "tokens/s",
        missing_peer,
    )
    yield row(
        f"{size.name}, arithmetic vs matmul",
        ours["flops"] / GIGA,
        ours["matmul"] / GIGA,
        "GFLOP/s",
        describe(ours, size.published),
    )
    yield row(
        f"{size.name}, peak memory",
        ours["peak_memory_bytes"] / GIGA,
        None if peer is None else peer["peak_memory_bytes"] / GIGA,
        "GB",
        missing_peer or "less is better",
    )


def describe(ours: OurSpeed, published: str) -> str:
    """Return a note of the measurements that have no peer here."""
    mfu = ours["mfu"]
    if not isinstance(mfu, str):
        mfu = f"{mfu:.1%} ({ours['mfu_causal']:.1%} with causal attention halved)"
    pauses = ", ".join(f"{seconds:.2f} s" for seconds in ours["checkpoint_seconds"])
    note = (
        f"MFU {mfu}; data wait {ours['data_wait_share']:.2%}; checkpoint pauses "
        f"{pauses}"
    )
    return f"{note}; published MFU: {published}" if published else note


def _measure_by_turns(
    sides: Sequence[Side], size: Size, folder: Path, failures: dict[str, str]
) -> Rounds:
    """Return the faster round of each side; `failures` takes the output of those that
    failed, which do not run again.
    """
    fastest_rounds: Rounds = {}
    for _ in range(ROUNDS):
        for side in sides:
            if side in failures:
                continue
            done = _train(side, size, folder)
            if done.returncode != 0:
                failures[side] = done.stderr[-4000:] or "failed"
                continue
            measurements = json.loads(done.stdout.splitlines()[-1])
            speed = measurements["tokens_per_second"]
            if (
                side not in fastest_rounds
                or speed > fastest_rounds[side]["tokens_per_second"]
            ):
                fastest_rounds[side] = measurements
    return fastest_rounds


def _train(side: str, size: Size, folder: Path) -> subprocess.CompletedProcess[str]:
    settings = {
        **vars(size),
        "model": str(size.model.absolute())
        if isinstance(size.model, Path)
        else size.model.model_dump(mode="json"),
    }
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.train.whole_training",
            side,
            str(folder),
            json.dumps(settings),
        ],
        check=False,
        text=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
