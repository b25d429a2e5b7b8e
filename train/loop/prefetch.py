"""The batches of coming steps, read and laid out in host memory by threads while the device computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.streaming.read_ahead import ReadAhead
from gristmill.train.loop.row_plan import RowOrder, RowPlan, micro_batches
from gristmill.train.parallel.world import World

READING_THREADS = 4
"""Steps that are read at a time: where rows come over a network, each waits for answers most of the time."""


def reading_threads(local: bool, device: torch.device) -> int:
    """How many steps are read at a time, ahead of the training; 0 reads each step when it begins.

    Rows on a local disk cost tenths of a millisecond. Beside an accelerator a thread hides them; where the processors
    compute the steps too, it would only take time from them, and handing over would come on top.
    """
    return 0 if local and device.type == "cpu" else READING_THREADS


class Readable(Protocol):
    """What of an objective reading needs (see objective.Objective)."""

    @property
    def order(self) -> RowOrder:
        """See objective.Objective."""

    def weight(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> float:
        """See objective.Objective."""

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> Any:
        """See objective.Objective."""


@dataclass(frozen=True)
class Batch:
    """One step's reading.

    Attributes:
        rows: (B,) the whole batch, the same on every rank.
        weight: of the whole batch.
        parts: this rank's micro-batches as `Objective.prepare` made them.
    """

    rows: np.ndarray
    weight: float
    parts: Sequence[Any]


def read_batch(objective: Readable, plan: RowPlan, step: int, micro_batch_size: int, rank: int, size: int) -> Batch:
    """What one rank of `size` reads in a step; `step` counts from 0."""
    rows, cuts = plan.rows(objective.order, step), plan.cuts_in_step(step)
    parts = [objective.prepare(part, cuts, step) for part in micro_batches(rows, rank, size, micro_batch_size)]
    # Where a layout says what is predicted, what was laid out for this rank is not laid out again to be counted.
    counted = [part.weight for part in parts if getattr(part, "weight", None) is not None]
    if len(counted) < len(parts):
        return Batch(rows, objective.weight(rows, cuts, step), parts)
    others = np.delete(rows, slice(rank, None, size))
    return Batch(rows, sum(counted) + objective.weight(others, cuts, step), parts)


def batches_ahead(
    objective: Readable, plan: RowPlan, steps: int, micro_batch_size: int, world: World, depth: int, threads: int
) -> ReadAhead[Batch]:
    """This rank's batches up to step `steps`, `depth` of them ahead, read by some threads (see `reading_threads`)."""

    def read(step: int) -> Batch:
        return read_batch(objective, plan, step, micro_batch_size, world.data_rank, world.data_size)

    return ReadAhead(read, steps, depth, threads)


def pinned(tensor: Tensor) -> Tensor:
    """The tensor in page-locked memory where there is a GPU, so that its copy to it overlaps with computing."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def read_pinned(packed: PackedSet, rows: np.ndarray) -> Tensor:
    """Tokens of rows (int64, (n,)) as an (n, L) tensor; where there is a GPU, in page-locked memory at once."""
    if not torch.cuda.is_available():
        return torch.from_numpy(packed.tokens(rows))
    dtype = torch.uint16 if packed.dtype.itemsize == 2 else torch.uint32
    # PyTorch gives such memory out again only when the copies from it have ended.
    tokens = torch.empty((len(rows), packed.sequence_length), dtype=dtype, pin_memory=True)
    packed.tokens(rows, out=tokens.numpy())
    return tokens
