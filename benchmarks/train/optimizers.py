"""`gristmill bench optimizers`: what each optimizer reaches beside AdamW, on equal tokens, with three seeds.

All train the same small decoder on the bytes of the standard library's own source code, under the same schedule, and
are measured on rows that none has read. A seed draws the first weights and the order of the rows, which are the same
for all. Each has the learning rate that is best for it on another seed and on other held-out rows: it is doubled or
halved until its neighbours are worse. All else is what the manifest has where it does not say; Lion's decay is as much
larger as its rate is to be smaller (Chen et al. 2023, section 5).
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
from gristmill.train.models.decoder import Llama
from gristmill.train.models.model_config import Shape, shape_of
from gristmill.train.models.weights import drawn
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.optimizer import make_optimizers, update
from gristmill.train.optim.schedules import learning_rate

VOCAB, LENGTH, ROWS, STEPS, HELD_OUT = 256, 64, 8, 300, 256
CHOOSING_SEED, SEEDS = 0, (1, 2, 3)
SECTION = Model(layers=3, width=128, heads=2)
ADAMW = Optimizer(learning_rate=4e-3)
SIDES: dict[str, dict[str, Any]] = {
    "muon": {"kind": "muon"},
    "muon, cautious decay": {"kind": "muon", "cautious_decay": True},
    "normuon": {"kind": "normuon"},
    "normuon, cautious decay": {"kind": "normuon", "cautious_decay": True},
    "dion, rank 1/4": {"kind": "dion"},
    "ademamix": {"kind": "ademamix"},
    "lion": {"kind": "lion", "learning_rate": 5e-4, "weight_decay": 0.8},
    "adafactor": {"kind": "adafactor", "learning_rate": 1.6e-2},
}
"""Name -> what differs from ADAMW; the learning rate is where the search for the best begins."""


def rows() -> Iterator[Row]:
    """Measure; `ratio` is the held-out loss over AdamW's, less is better."""
    shape, texts = shape_of(SECTION, VOCAB, LENGTH), source_rows()
    rate = best_rate(ADAMW, texts)
    adamw = [held_out_loss(ADAMW.model_copy(update={"learning_rate": rate}), texts, seed)[1] for seed in SEEDS]
    told = (
        f"{shape.parameters:,} weights, {STEPS * ROWS * LENGTH:,} bytes; {len(SEEDS)} seeds; "
        f"adamw: rate {rate:g}, deviation {statistics.stdev(adamw):.4f}"
    )
    for name, settings in SIDES.items():
        section = Optimizer.model_validate({**ADAMW.model_dump(exclude_unset=True), **settings})
        rate = best_rate(section, texts)
        found = [held_out_loss(section.model_copy(update={"learning_rate": rate}), texts, seed)[1] for seed in SEEDS]
        less = [one - other for one, other in zip(found, adamw, strict=True)]
        yield row(
            f"loss of {name}, vs adamw",
            statistics.mean(found),
            statistics.mean(adamw),
            "nats/byte",
            f"rate {rate:g}, deviation {statistics.stdev(found):.4f}; less adamw's at the same seed: "
            f"{statistics.mean(less):+.4f}, deviation {statistics.stdev(less):.4f}, {min(less):+.4f} to "
            f"{max(less):+.4f}; {told}",
        )


def source_rows() -> Tensor:
    """Rows of bytes of Python's own library, (n, LENGTH + 1); the last 2 HELD_OUT are not trained on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    cut = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    chosen = np.random.default_rng(0).permutation(len(cut))[: STEPS * ROWS + 2 * HELD_OUT]
    return torch.from_numpy(cut[chosen].astype(np.int64))


def best_rate(section: Optimizer, texts: Tensor) -> float:
    """The learning rate whose half and whose double leave a higher loss, on the rows that are held out for choosing."""
    losses: dict[float, float] = {}

    def loss_at(rate: float) -> float:
        if rate not in losses:
            losses[rate] = held_out_loss(section.model_copy(update={"learning_rate": rate}), texts, CHOOSING_SEED)[0]
        return losses[rate]

    rate = section.learning_rate
    while (better := min((rate, rate / 2, rate * 2), key=loss_at)) != rate:
        rate = better
    return rate


def held_out_loss(section: Optimizer, texts: Tensor, seed: int) -> tuple[float, float]:
    """Nats per byte after all steps, of a model drawn with a seed: on rows for choosing, and for telling."""
    shape = shape_of(SECTION, VOCAB, LENGTH)
    model, schedule, good = drawn_model(shape, seed), Schedule(), torch.tensor(False)
    optimizers = make_optimizers(model, section, steps=STEPS)
    batches = np.random.default_rng(seed).permutation(STEPS * ROWS).reshape(STEPS, ROWS)
    for step, batch in enumerate(batches, start=1):
        loss_of(model, texts[batch]).backward()
        clip_gradients(model, section)
        update(optimizers, learning_rate(schedule, section.learning_rate, step, STEPS), good)
    with torch.no_grad():
        choosing, telling = (float(loss_of(model, part)) for part in texts[-2 * HELD_OUT :].split(HELD_OUT))
    return choosing, telling


def drawn_model(shape: Shape, seed: int) -> Llama:
    """A decoder with first weights of a seed."""
    model, tensor_of = Llama(shape), drawn(shape, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensor_of(name, parameter.shape))
    return model


def loss_of(model: Llama, ids: Tensor) -> Tensor:
    """Mean nats per byte of rows (n, LENGTH + 1)."""
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
