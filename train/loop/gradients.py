"""Gradients of a whole batch, accumulated over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.train.loop.objective import Objective
from gristmill.train.loop.stream import micro_batches
from gristmill.train.optim.noise_scale import PartNorms
from gristmill.train.parallel.pipeline import PipelineError, Stage
from gristmill.train.parallel.world import World, sum_over_ranks


def accumulate_gradients(
    model: nn.Module, objective: Objective, parts: Sequence[Any], weight: float, world: World,
    loss_scale: Tensor | float = 1.0, after_part: Callable[[int], None] | None = None, draw: int | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Gradients of a whole batch's mean loss, times a loss scale.

    Every loss is divided by the weight of the whole batch, so that neither the cut into micro-batches nor uneven
    shares of the ranks matter. FSDP averages over ranks: that is undone by the number of shares.

    Args:
        model, objective: what is differentiated.
        parts: this rank's micro-batches, see batches.Batch.
        weight: of the whole batch.
        world: the processes.
        loss_scale: multiplies what is differentiated, not what is returned.
        after_part: called with the number of each micro-batch; its gradients are then reduced already.
        draw: see Objective.loss.

    Returns:
        the objective's sums over all ranks, and the row losses of this rank's micro-batches in half precision.
    """
    scale = loss_scale * (world.data_size / weight)
    sums = torch.zeros(objective.sums_length, dtype=torch.float64, device=world.device)
    row_losses = []
    if isinstance(model, Stage):
        if after_part is not None:
            raise PipelineError("noise_scale_every needs each micro-batch's gradients, which a pipeline computes "
                                "together; remove it, or use engine.parallel.shard")
        for measured in model.accumulate(objective, parts, scale, draw)[: len(parts)]:
            sums += measured.sums
            row_losses.append(measured.row_losses.detach().half())
        # Stages before the last one measure nothing.
        return sum_over_ranks(sums, world), row_losses or [sums.new_zeros(1, 1).half()]
    for number, part in enumerate(parts):
        settles = after_part is not None or number == len(parts) - 1
        model.set_requires_gradient_sync(settles)  # type: ignore[operator]
        model.set_reshard_after_backward(settles or world.releases_weights)  # type: ignore[operator]
        measured = objective.loss(model, part, scale, draw)
        measured.loss.backward()
        sums += measured.sums
        row_losses.append(measured.row_losses.detach().half())
        if after_part is not None:
            after_part(number)
    return sum_over_ranks(sums, world), row_losses


def measuring_parts(
    model: nn.Module, objective: Objective, rows: np.ndarray, cuts: int, micro_batch_size: int, world: World
) -> tuple[PartNorms, Callable[[int], None]]:
    """What measures the noise scale in a step, and what to call after each of its micro-batches.

    Raises:
        ValueError: the batch is one micro-batch, which has nothing to compare with.
    """
    shares = [micro_batches(rows, rank, world.data_size, micro_batch_size) for rank in range(world.data_size)]
    parts = [np.concatenate(part) for part in zip(*shares, strict=True)]
    if len(parts) < 2:
        raise ValueError(f"noise_scale_every compares micro-batches with the whole batch, but micro_batch_size "
                         f"({micro_batch_size}) times {world.data_size} ranks holds all {len(rows)} rows of it; lower "
                         "micro_batch_size, or remove noise_scale_every")
    weight, norms = objective.weight(rows, cuts), PartNorms(model)
    return norms, lambda number: norms.take(objective.weight(parts[number], cuts) / weight, len(parts[number]))
