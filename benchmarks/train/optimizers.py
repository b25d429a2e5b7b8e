"""`gristmill bench optimizers`: held-out loss of each optimizer beside AdamW's, on
equal tokens, with three seeds.

All train the same small decoder on the bytes of the standard library's source code,
under the same schedule, and are measured on held-out rows. A seed draws the first
weights and the order of the rows, the same for all optimizers. Each has the learning
rate that is best for it on another seed and on other held-out rows: it is doubled or
halved until its neighbours are worse. All other settings are the manifest's defaults;
Lion's decay is as much larger as its rate has to be smaller (Chen et al. 2023, section
5).
"""

from __future__ import annotations

import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import Row, row
from benchmarks.train.small_models import drawn_decoder
from gristmill.mixtures.base import RawSection
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.optimizer import Optimizer
from gristmill.mixtures.schema.pretrain import Schedule
from gristmill.train.models.model_config import shape_of
from gristmill.train.models.transformer import Llama
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.optimizer import make_optimizers, update
from gristmill.train.optim.schedules import learning_rate

VOCAB, LENGTH, ROWS, STEPS, HELD_OUT = 256, 64, 8, 300, 256
CHOOSING_SEED, SEEDS = 0, (1, 2, 3)
SECTION = Model(layers=3, width=128, heads=2)
ADAMW = Optimizer(learning_rate=4e-3)
SIDES: dict[str, RawSection] = {
    "muon": {"kind": "muon"},
    "muon, cautious decay": {"kind": "muon", "cautious_decay": True},
    "normuon": {"kind": "normuon"},
    "normuon, cautious decay": {"kind": "normuon", "cautious_decay": True},
    "lion": {"kind": "lion", "learning_rate": 5e-4, "weight_decay": 0.8},
    "adafactor": {"kind": "adafactor", "learning_rate": 1.6e-2},
}
"""Name -> differences from ADAMW; the search for the best learning rate begins at the
one named here.
"""


def rows() -> Iterator[Row]:
    """Measure; the ratio is the held-out loss over AdamW's, less is better."""
    shape, texts = shape_of(SECTION, VOCAB, LENGTH), source_rows()
    adamw_rate = best_rate(ADAMW, texts)
    adamw = losses_at(ADAMW, adamw_rate, texts)
    common = (
        f"{shape.parameters:,} weights, {STEPS * ROWS * LENGTH:,} bytes; {len(SEEDS)} "
        f"seeds; adamw: rate {adamw_rate:g}, deviation {statistics.stdev(adamw):.4f}"
    )
    for name, settings in SIDES.items():
        section = Optimizer.model_validate(
            {**ADAMW.model_dump(exclude_unset=True), **settings}
        )
        rate = best_rate(section, texts)
        losses = losses_at(section, rate, texts)
        differences = [
            loss - adamw_loss for loss, adamw_loss in zip(losses, adamw, strict=True)
        ]
        yield row(
            f"loss of {name}, vs adamw",
            statistics.mean(losses),
            statistics.mean(adamw),
            "nats/byte",
            f"rate {rate:g}, deviation {statistics.stdev(losses):.4f}; less adamw's at "
            f"the same seed: {statistics.mean(differences):+.4f}, deviation "
            f"{statistics.stdev(differences):.4f}, {min(differences):+.4f} to "
            f"{max(differences):+.4f}; {common}",
        )


def source_rows() -> Tensor:
    """Return rows of bytes of Python's standard library, (n, LENGTH + 1); the last 2 *
    HELD_OUT are held out.
    """
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)
    all_rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    chosen = np.random.default_rng(0).permutation(len(all_rows))[
        : STEPS * ROWS + 2 * HELD_OUT
    ]
    return torch.from_numpy(all_rows[chosen].astype(np.int64))


def losses_at(section: Optimizer, rate: float, texts: Tensor) -> list[float]:
    """Return the held-out loss at a learning rate for each seed."""
    return [
        held_out_loss(section.model_copy(update={"learning_rate": rate}), texts, seed)[
            1
        ]
        for seed in SEEDS
    ]


def best_rate(section: Optimizer, texts: Tensor) -> float:
    """Return the learning rate whose half and double have a higher loss on the rows for
    choosing.
    """
    losses: dict[float, float] = {}

    def loss_at(rate: float) -> float:
        if rate not in losses:
            losses[rate] = held_out_loss(
                section.model_copy(update={"learning_rate": rate}), texts, CHOOSING_SEED
            )[0]
        return losses[rate]

    rate = section.learning_rate
    while (better := min((rate, rate / 2, rate * 2), key=loss_at)) != rate:
        rate = better
    return rate


def held_out_loss(section: Optimizer, texts: Tensor, seed: int) -> tuple[float, float]:
    """Train a model drawn with a seed; return nats per byte on the rows for choosing,
    and on those for reporting.
    """
    model, schedule = drawn_decoder(shape_of(SECTION, VOCAB, LENGTH), seed), Schedule()
    optimizers, is_spike = (
        make_optimizers(model, section),
        torch.tensor(False),
    )
    batches = np.random.default_rng(seed).permutation(STEPS * ROWS).reshape(STEPS, ROWS)
    for step, batch in enumerate(batches, start=1):
        loss_of(model, texts[batch]).backward()
        clip_gradients(model, section.clip_norm)
        update(
            optimizers,
            learning_rate(schedule, section.learning_rate, step, STEPS),
            is_spike,
        )
    with torch.no_grad():
        choosing, reporting = (
            float(loss_of(model, part))
            for part in texts[-2 * HELD_OUT :].split(HELD_OUT)
        )
    return choosing, reporting


def loss_of(model: Llama, ids: Tensor) -> Tensor:
    """Return mean nats per byte of rows (n, LENGTH + 1)."""
    return torch.nn.functional.cross_entropy(
        model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
    )
