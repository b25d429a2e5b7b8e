"""`gristmill bench optimizers`: what each optimizer reaches beside AdamW, on equal tokens, with three seeds.

All train the same tiny decoder on the bytes of the standard library's own source code, with the same rows in the same
order, and are measured on rows that none has read. AdamW and those that take its learning rate have one rate; Lion's
and Adafactor's are what their papers say of AdamW's.
"""

from __future__ import annotations

import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import Row, row
from gristmill.mixtures.model import Model
from gristmill.mixtures.training import Optimizer, Schedule
from gristmill.train.models.llama import Llama
from gristmill.train.models.shape import shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.optimizer import make_optimizers, update
from gristmill.train.optim.schedules import learning_rate

VOCAB, LENGTH, ROWS, STEPS, HELD_OUT = 256, 64, 8, 150, 64
SEEDS = (0, 1, 2)
SECTION = Model(layers=2, width=64, heads=1)
RATE = 5e-3
SIDES: dict[str, dict[str, Any]] = {
    "muon": {"kind": "muon"}, "muon, cautious decay": {"kind": "muon", "cautious_decay": True},
    "normuon": {"kind": "normuon"}, "normuon, cautious decay": {"kind": "normuon", "cautious_decay": True},
    "dion, rank 1/4": {"kind": "dion"}, "ademamix": {"kind": "ademamix"},
    "lion": {"kind": "lion", "learning_rate": RATE / 5, "weight_decay": 0.5},
}


def rows() -> Iterator[Row]:
    """Measure; `ratio` is the held-out loss over AdamW's, less is better."""
    texts = source_rows()
    adamw = [held_out_loss(Optimizer(learning_rate=RATE), texts, seed) for seed in SEEDS]
    for name, settings in SIDES.items():
        section = Optimizer.model_validate({"learning_rate": RATE, **settings})
        found = [held_out_loss(section, texts, seed) for seed in SEEDS]
        yield row(f"loss of {name}, vs adamw", statistics.mean(found), statistics.mean(adamw), "nats/byte",
                  f"{STEPS * ROWS * LENGTH:,} bytes; {len(SEEDS)} seeds, deviation {statistics.stdev(found):.3f}, "
                  f"adamw's {statistics.stdev(adamw):.3f}")


def source_rows() -> Tensor:
    """Rows of bytes of Python's own library, (n, LENGTH + 1); the last HELD_OUT are not trained on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    wanted = STEPS * ROWS + HELD_OUT
    cut = np.frombuffer(text, dtype=np.uint8)[: wanted * (LENGTH + 1)].reshape(wanted, LENGTH + 1)
    return torch.from_numpy(cut[np.random.default_rng(0).permutation(wanted)].astype(np.int64))


def held_out_loss(section: Optimizer, texts: Tensor, seed: int) -> float:
    """Nats per byte after all steps, of a model drawn with a seed."""
    shape = shape_of(SECTION, VOCAB, LENGTH)
    model, schedule, good = Llama(shape), Schedule(), torch.tensor(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(drawn(shape, seed)(name, parameter.shape))
    optimizers = make_optimizers(model, section, steps=STEPS)
    for step in range(1, STEPS + 1):
        loss_of(model, texts[(step - 1) * ROWS : step * ROWS]).backward()
        clip_gradients(model, section)
        update(optimizers, learning_rate(schedule, section.learning_rate, step, STEPS), good)
    with torch.no_grad():
        return float(loss_of(model, texts[-HELD_OUT:]))


def loss_of(model: Llama, ids: Tensor) -> Tensor:
    """Mean nats per byte of rows (n, LENGTH + 1)."""
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
