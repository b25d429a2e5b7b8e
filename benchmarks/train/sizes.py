"""`gristmill bench sizes`, a part of `bench train`: how fast whole trainings of some sizes are, and what they hold.

Per size three rows: tokens per second beside transformers' Llama of the same sizes, arithmetic beside a plain matrix
product on the same device, and peak memory beside the same Llama's. What else was measured is in the notes, and in the
keys of the first row: MFU by both conventions ("unknown" where the device's peak is), the wait for data, and how long
checkpoints held the training up.

The sizes of a GPU are those that papers and other projects report: one micro-batch is as large as the memory of an H200
allows without activation checkpointing, and micro-batches accumulate as in published recipes. Each side trains in a
process of its own, so that its memory is its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.checkout import ROOT
from benchmarks.measuring import Row, row
from gristmill.mixtures.model import Model
from gristmill.tokenize.packed_writing import write_packed_set

GIGA = 1e9
WINDOWS = 8
"""Of steps that are timed as one: the first one is not counted, a checkpoint is written after the third and the sixth,
and the fourth and seventh share a CPU with its writing."""
ROUNDS = 2
"""Of both sides by turns, of which each side's faster counts: the speed of a shared machine changes in a minute."""


@dataclass(frozen=True)
class Size:
    """A training.

    Attributes:
        name: what people read.
        model: the section.
        vocab: ids.
        length: tokens per row.
        micro_rows, rows: per forward pass and per step.
        window_steps: steps that are timed as one.
        compile: see Compute.compile; transformers' model is compiled where this is not `off`.
        published: what others reach, with where that stands.
    """

    name: str
    model: Model
    vocab: int
    length: int
    micro_rows: int
    rows: int
    window_steps: int
    compile: str = "off"
    published: str = ""


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
        "350M, T=1024", Model(preset="llama-350m"), 50_304, 1024, 32, 256, 5, "model", "nanochat 46 % (d18, dev/LOG.md)"
    ),
    Size(
        "1.1B, T=2048",
        Model(layers=22, width=2048, heads=16, kv_heads=4, ffn_width=5632, tied_embeddings=False),
        32_000,
        2048,
        16,
        64,
        5,
        "model",
        "nanochat 49 % (d26, dev/LOG.md), torchtitan 39 % (Llama 3 8B, 8 H100)",
    ),
)
"""1.1B is TinyLlama's shape with heads of 128 channels (Zhang et al. 2024). The published figures are those of one GPU
of eight H100, which have the H200's peak: benchmarks/llama3_h100_202412_torchtitan.md, nanochat's and modded-nanogpt's
own records; some are worked out from their tokens per second."""
ON_CPU = (
    Size("1.4M, T=256", Model(preset="llama-1m"), 4096, 256, 4, 8, 2),
    Size("14M, T=512", Model(preset="llama-10m"), 8192, 512, 1, 2, 2),
)


def rows() -> Iterator[Row]:
    """Measure all sizes of this device.

    Raises:
        RuntimeError: our own training failed; what it printed is in the message.
    """
    for size in ON_GPU if torch.cuda.is_available() else ON_CPU:
        yield from rows_of(size)


def rows_of(size: Size) -> Iterator[Row]:
    """Measure one size."""
    with tempfile.TemporaryDirectory() as folder:
        steps = WINDOWS * size.window_steps
        ids = np.random.default_rng(0).integers(0, size.vocab, (size.rows * steps, size.length))
        write_packed_set(
            Path(folder) / "mix", ids, {"all": len(ids)}, {"vocab_size": size.vocab, "eos": 0, "pad": 1, "sha256": ""}
        )
        installed = importlib.util.find_spec("transformers") is not None
        found, failed = _by_turns(["ours", *(["transformers"] if installed else [])], size, Path(folder))
    ours, peer = found.get("ours"), found.get("transformers")
    if ours is None:
        raise RuntimeError(f"a training of {size.name} could not be measured: {failed['ours']}")
    missing = failed.get("transformers") or "failed" if installed else "it is not installed"
    beside = "" if peer is not None else f"transformers: {missing.splitlines()[-1]}"
    yield {
        **_row(f"{size.name}, vs transformers", ours, peer, "tokens_per_second", "tokens/s", 1.0, beside),
        **{
            key: ours[key]
            for key in ("mfu", "mfu_causal", "peak_memory_bytes", "data_wait_share", "checkpoint_seconds")
        },
    }
    yield row(
        f"{size.name}, arithmetic vs matmul",
        ours["flops"] / GIGA,
        ours["matmul"] / GIGA,
        "GFLOP/s",
        describe(ours, size.published),
    )
    yield _row(f"{size.name}, peak memory", ours, peer, "peak_memory_bytes", "GB", GIGA, beside or "less is better")


def describe(ours: Mapping[str, Any], published: str) -> str:
    """The figures that have no peer here, in words."""
    mfu = (
        "unknown"
        if ours["mfu"] == "unknown"
        else (f"{ours['mfu']:.1%} ({ours['mfu_causal']:.1%} with causal attention halved)")
    )
    pauses = ", ".join(f"{seconds:.2f} s" for seconds in ours["checkpoint_seconds"])
    return f"MFU {mfu}; data wait {ours['data_wait_share']:.2%}; checkpoint pauses {pauses}" + (
        f"; published MFU: {published}" if published else ""
    )


def _row(
    name: str, ours: Mapping[str, Any], peer: Mapping[str, Any] | None, key: str, unit: str, scale: float, note: str
) -> Row:
    return row(name, ours[key] / scale, None if peer is None else peer[key] / scale, unit, note)


def _by_turns(sides: list[str], size: Size, folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """The faster round of each side, and what those printed that failed; these are not begun again."""
    found: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for _ in range(ROUNDS):
        for side in sides:
            one, said = (None, failed[side]) if side in failed else _measured(side, size, folder)
            if one is None:
                failed[side] = said
            elif side not in found or one["tokens_per_second"] > found[side]["tokens_per_second"]:
                found[side] = one
    return found, failed


def _measured(side: str, size: Size, folder: Path) -> tuple[dict[str, Any] | None, str]:
    """What a side's process has found, or None and what it printed."""
    wanted = {**vars(size), "model": size.model.model_dump(mode="json"), "windows": WINDOWS}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.train.whole_training", side, str(folder), json.dumps(wanted)],
        check=False,
        text=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    if done.returncode != 0:
        return None, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, ""
