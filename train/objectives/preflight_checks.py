"""Checks on the first rows that must pass before a fine-tuning starts.

- packed equals unpacked: rows have the summed loss of their single examples (else
  attention leaks between documents, or positions do not restart);
- accumulation equals one big batch: gradients of micro-batches add up to those of the
  batch.

The measurements are written to `step-0.json`; the stage `sft_data` checks the data. The
check of preference optimisation, a margin of zero and a
loss of ln 2, is in `objectives/reference_logps.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.train.distributed.process_groups import World, max_over_ranks
from gristmill.train.loop.step import accumulate_gradients, summed_losses
from gristmill.train.objectives.sft import AssistantTurns, Turns
from gristmill.train.optim.dtensor_sums import gradients_of, local

CERTIFICATE = "step-0.json"
PROOF_ROWS = 4
"""Number of rows of each check: enough to show a leak, and few enough to take
seconds.
"""
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Relative difference allowed for rounding: sums in another order, and kernels for
other shapes.
"""


class NotProvedError(RuntimeError):
    """A check before the first step failed."""


class Certificate(TypedDict):
    """Measurements of all checks.

    Attributes:
        loss, loss_unpacked: per trained token, of packed rows and of single examples.
        accumulation_difference: of gradients, relative to their norm.
        largest_difference: that is allowed.
    """

    loss: float
    loss_unpacked: float
    accumulation_difference: float
    largest_difference: float


def prove(
    model: nn.Module,
    objective: AssistantTurns,
    dtype: torch.dtype,
    micro_batch_size: int,
    world: World,
) -> Certificate:
    """Run all checks and return their measurements; raise if any of them fails.

    Args:
        model: before its first step.
        objective: of the training.
        dtype: of matrix products.
        micro_batch_size: maximum rows per forward pass on a rank.
        world: the processes.

    Raises:
        NotProvedError: names every failed check, with value and threshold.
    """
    # At most the rows of one forward pass of the training.
    count = min(PROOF_ROWS, micro_batch_size * world.data_size, objective.order.total)
    rows = objective.order.rows(np.arange(count, dtype=np.int64))
    batches = [objective.prepare(part) for part in world.micro_batches(rows, 1)]
    pieces: list[Turns] = []
    for batch in batches:
        # All ranks run equally many forward passes, which are collectives.
        most = int(max_over_ranks(float(len(starts_of(batch))), world))
        pieces += pieces_of(batch, most)
    together, alone = (
        summed_losses(model, objective, parts, world)[0] for parts in (batches, pieces)
    )
    batch_gradients = gradients(model, objective, rows, len(rows), world)
    accumulated = gradients(model, objective, rows, 1, world)
    errors = [
        expected - actual
        for expected, actual in zip(batch_gradients, accumulated, strict=True)
    ]
    norms = torch.stack(
        [
            torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
            for tensors in (batch_gradients, errors)
        ]
    )
    if world.size > 1:
        torch.distributed.all_reduce(norms)
    norm, distance = norms.sqrt().tolist()
    certificate: Certificate = {
        "loss": together / objective.weight(rows),
        "loss_unpacked": alone / objective.weight(rows),
        "accumulation_difference": distance / norm if norm else 0.0,
        "largest_difference": LARGEST_DIFFERENCE[dtype],
    }
    if problems := failures(certificate):
        raise NotProvedError(
            "sft: the training was not started: " + "; ".join(problems)
        )
    return certificate


def failures(certificate: Certificate) -> list[str]:
    """Messages of the failed checks of a certificate."""
    tolerance = certificate["largest_difference"]
    loss = certificate["loss"]
    alone = certificate["loss_unpacked"]
    messages = []
    if not abs(loss - alone) <= tolerance * abs(alone):
        messages.append(
            f"packed rows have the loss {loss:.6f}, but their examples one by one "
            f"{alone:.6f} (tolerance {tolerance:g}, relative): attention or positions "
            "cross from one example into another"
        )
    if not certificate["accumulation_difference"] <= tolerance:
        messages.append(
            f"gradients of micro-batches differ from those of one big batch by "
            f"{certificate['accumulation_difference']:.2e} of their norm (tolerance "
            f"{tolerance:g})"
        )
    return messages


def starts_of(batch: Turns) -> list[int]:
    """Starts of the pieces in a batch of one row; its padding belongs to the last
    piece.
    """
    return (
        [0]
        if batch.positions is None
        else torch.nonzero(batch.positions[0] == 0).flatten().tolist()
    )


def pieces_of(batch: Turns, count: int) -> list[Turns]:
    """Batch per piece of a batch of one row, followed by batches of weight zero up to
    `count`.
    """
    t = batch.ids.shape[1]
    starts = starts_of(batch)
    pieces = []
    for start, end in zip(starts, [*starts[1:], t], strict=True):
        # Padded to the row length, as compiled code takes one shape. Attention is
        # causal: padding has no effect.
        ids, trained = (
            F.pad(part[:, start:end], (0, t - end + start))
            for part in (batch.ids, batch.trained)
        )
        pieces.append(Turns(ids, trained, batch.sources, None, batch.real))
    return pieces + [replace(pieces[0], real=False)] * (count - len(pieces))


def gradients(
    model: nn.Module,
    objective: AssistantTurns,
    rows: np.ndarray,
    micro_batch_size: int,
    world: World,
) -> list[Tensor]:
    """This rank's shards of the gradients of the mean loss of rows, in micro-batches;
    the model keeps none.
    """
    parts = [
        objective.prepare(part) for part in world.micro_batches(rows, micro_batch_size)
    ]
    accumulate_gradients(model, objective, parts, objective.weight(rows), world)
    shards = [local(gradient).clone() for gradient in gradients_of(model)]
    model.zero_grad(set_to_none=True)
    return shards
