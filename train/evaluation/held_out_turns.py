"""Conversations that fine-tuning holds out, measured while it trains: what is learnt, not by heart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from gristmill.train.loop.stream import micro_batches
from gristmill.train.objectives.assistant_turns import AssistantTurns
from gristmill.train.parallel.sharding import evaluating
from gristmill.train.parallel.world import World, sum_over_ranks


class HeldOutTurns:
    """Measures held-out conversations after some steps and after the last.

    Args:
        every: steps between measurements; only after the last one where it is None.
        steps: of the whole training.
        turns: the held-out rows.
        micro_batch_size: most rows of a forward pass on one rank.
        model: sharded.
        world: the processes.
    """

    def __init__(
        self, every: int | None, steps: int, turns: AssistantTurns, micro_batch_size: int, model: nn.Module,
        world: World,
    ) -> None:
        self._every, self._last, self._turns, self._size = every or steps, steps, turns, micro_batch_size
        self._model, self._world = model, world

    def __call__(self, step: int) -> dict[str, Any] | None:
        """`held_out`: loss per trained token and bits per byte, of all sets and of each; None after a step without."""
        if step != self._last and step % self._every:
            return None
        world, rows = self._world, np.arange(self._turns.packed.rows, dtype=np.int64)
        sums = torch.zeros(self._turns.sums_length, dtype=torch.float64, device=world.device)
        with evaluating(self._model):
            for part in micro_batches(rows, world.data_rank, world.data_size, self._size):
                sums += self._turns.loss(self._model, self._turns.prepare(part), 1.0).sums
        return {"held_out": self._turns.report(sum_over_ranks(sums, world).tolist(), self._turns.weight(rows))}
