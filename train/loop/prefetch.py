"""Prefetching of batches: threads read the batches of the next steps into host memory
while the device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.batch_plan import RowPlan, micro_batches
from gristmill.train.loop.objective import Objective

READING_THREADS = 4
"""Number of steps that are read concurrently; reads over a network mostly wait for
answers.
"""


def reading_threads(local: bool, device: torch.device) -> int:
    """Number of steps that are prefetched concurrently; 0 reads each step
    synchronously.

    Rows on a local disk cost tenths of a millisecond. Beside an accelerator a thread
    hides them; on a CPU a thread would compete with the training.
    """
    return 0 if local and device.type == "cpu" else READING_THREADS


@dataclass(frozen=True)
class Batch:
    """Batch of one step.

    Attributes:
        rows: (B,) the global batch, equal on every rank.
        weight: of the global batch.
        parts: micro-batches of this rank, from `Objective.prepare`.
    """

    rows: np.ndarray
    weight: float
    parts: Sequence[Any]


def read_batch(
    objective: Objective,
    plan: RowPlan,
    step: int,
    micro_batch_size: int,
    rank: int,
    size: int,
) -> Batch:
    """Read the batch of one rank of `size`; `step` counts from 0."""
    rows = plan.rows(objective.order, step)
    cuts = plan.cuts_in_step(step)
    parts = [
        objective.prepare(part, cuts, step)
        for part in micro_batches(rows, rank, size, micro_batch_size)
    ]
    # Layouts carry their own weights: only the rows of other ranks are left to count.
    weights = [
        part.weight for part in parts if getattr(part, "weight", None) is not None
    ]
    if len(weights) < len(parts):
        return Batch(rows, objective.weight(rows, cuts, step), parts)
    other_rows = np.delete(rows, slice(rank, None, size))
    return Batch(rows, sum(weights) + objective.weight(other_rows, cuts, step), parts)


@dataclass(frozen=True)
class TensorBatch:
    """Base of micro-batches: dataclasses of tensors and plain values."""

    def apply(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Copy with a function of every tensor in its place."""
        batch = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                vars(batch)[name] = function(value)
        return batch

    def pinned(self) -> Self:
        """Copy in pinned memory, on a machine with a GPU."""
        return self.apply(pinned)

    def to(self, device: torch.device) -> Self:
        """Copy on a device."""
        return self.apply(lambda tensor: tensor.to(device, non_blocking=True))


def pinned(values: Tensor | np.ndarray) -> Tensor:
    """Copy of a tensor or array in page-locked memory, so that its transfer overlaps
    with compute; no copy without a GPU.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def read_pinned(packed: PackedSet, rows: np.ndarray) -> Tensor:
    """Read the tokens of rows (int64, (n,)) into an (n, L) tensor, page-locked if there
    is a GPU.
    """
    if not torch.cuda.is_available():
        return torch.from_numpy(packed.tokens(rows))
    dtype = torch.uint16 if packed.dtype.itemsize == 2 else torch.uint32
    # PyTorch reuses page-locked memory only after its copies have finished.
    tokens = torch.empty(
        (len(rows), packed.sequence_length), dtype=dtype, pin_memory=True
    )
    packed.tokens(rows, out=tokens.numpy())
    return tokens
