"""Checks on the first rows that must pass before a fine-tuning starts.

- packed equals unpacked: rows have the loss that their examples have one by one (else attention leaks between
  documents, or positions do not restart);
- accumulation equals one big batch: gradients of micro-batches add up to those of the whole.

What was measured is in `step-0.json`, with the shares of the data, which the stage `sft_data` has checked. The proof of preference optimisation, a margin of zero and a
loss of ln 2, is `objectives/reference_logps.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.train.loop.row_plan import micro_batches
from gristmill.train.loop.step import accumulate_gradients
from gristmill.train.objectives.assistant_turns import AssistantTurns, Turns
from gristmill.train.parallel.sharding import evaluating
from gristmill.train.parallel.world import World, sum_over_ranks

CERTIFICATE = "step-0.json"
PROOF_ROWS = 4
"""Rows that each proof looks at: enough for a leak to show, few enough for seconds."""
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""What rounding alone may make of a relative difference: of sums in another order, and of kernels for other shapes."""


class NotProvedError(RuntimeError):
    """Before the first step something does not hold that training relies on."""


def prove(
    model: nn.Module,
    objective: AssistantTurns,
    data: Mapping[str, Any],
    dtype: torch.dtype,
    micro_batch_size: int,
    world: World,
) -> dict[str, Any]:
    """Measure everything, write it down, and refuse to train where something does not hold.

    Args:
        model: before its first step.
        objective: of the training.
        data: the counts of the stage `sft_data` (see conversation_tokens.counts_of).
        dtype: of the computation.
        micro_batch_size: most rows of a forward pass on one rank.
        world: the processes.

    Raises:
        NotProvedError: names everything that does not hold, with the value and the threshold.
    """
    # As many rows as fit into one forward pass of the training itself.
    count = min(PROOF_ROWS, micro_batch_size * world.data_size, objective.order.total)
    rows = objective.order.rows(np.arange(count, dtype=np.int64))
    together, alone = packed_and_unpacked(model, objective, rows, world)
    difference = accumulated_difference(model, objective, rows, world)
    certificate = {
        "loss": together / objective.weight(rows),
        "loss_unpacked": alone / objective.weight(rows),
        "accumulation_difference": difference,
        "largest_difference": LARGEST_DIFFERENCE[dtype],
        **{name: data[name] for name in ("trained_share", "masked_share", "truncated_share", "end_of_turn_share")},
    }
    problems = failures(certificate)
    certificate["problems"] = problems
    if problems:
        raise NotProvedError("sft: the training was not started: " + "; ".join(problems))
    return certificate


def failures(certificate: Mapping[str, Any]) -> list[str]:
    """What of a certificate does not hold, a sentence each."""
    most = certificate["largest_difference"]
    loss, alone = certificate["loss"], certificate["loss_unpacked"]
    found = []
    if not abs(loss - alone) <= most * abs(alone):
        found.append(
            f"packed rows have the loss {loss:.6f}, but their examples one by one {alone:.6f} (tolerance "
            f"{most:g}, relative): attention or positions cross from one example into another"
        )
    if not certificate["accumulation_difference"] <= most:
        found.append(
            f"gradients of micro-batches differ from those of one big batch by "
            f"{certificate['accumulation_difference']:.2e} of their norm (tolerance {most:g})"
        )
    return found


def packed_and_unpacked(
    model: nn.Module, objective: AssistantTurns, rows: np.ndarray, world: World
) -> tuple[float, float]:
    """The summed loss of some rows as they are packed, and of their pieces one by one, over all ranks."""
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    with evaluating(model):
        for part in micro_batches(rows, world.data_rank, world.data_size, 1):
            batch = objective.prepare(part)
            sums[0] += objective.loss(model, batch, 1.0).sums[0]
            # Each rank gives the model equally many batches: its forward passes are collective operations.
            for piece in pieces_of(batch, agree_on_most(len(starts_of(batch)), world)):
                sums[1] += objective.loss(model, piece, 1.0).sums[0]
    together, alone = sum_over_ranks(sums, world).tolist()
    return together, alone


def starts_of(batch: Turns) -> list[int]:
    """Where the pieces of a batch of one row begin; its padding counts to the last one."""
    return [0] if batch.positions is None else torch.nonzero(batch.positions[0] == 0).flatten().tolist()


def pieces_of(batch: Turns, count: int) -> list[Turns]:
    """The pieces of a batch of one row as batches of their own, filled up with ones that do not count."""
    t, starts = batch.ids.shape[1], starts_of(batch)
    found = []
    for start, end in zip(starts, [*starts[1:], t], strict=True):
        # As long as the row: compiled code takes one shape. What follows a piece is seen by none of its tokens.
        ids, trained = (F.pad(part[:, start:end], (0, t - end + start)) for part in (batch.ids, batch.trained))
        found.append(Turns(ids, trained, batch.sources, None, batch.real))
    unreal = replace(found[0], real=False)
    return found + [unreal] * (count - len(found))


def agree_on_most(value: int, world: World) -> int:
    """The largest of a number over all ranks."""
    if world.size == 1:
        return value
    most = torch.tensor([value], dtype=torch.int64, device=world.device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return int(most)


def accumulated_difference(model: nn.Module, objective: AssistantTurns, rows: np.ndarray, world: World) -> float:
    """How far the gradients of micro-batches of one row are from those of one big batch, as a share of their norm."""
    whole = gradients(model, objective, rows, len(rows), world)
    parts = gradients(model, objective, rows, 1, world)
    norms = torch.stack([squares(whole), squares([one - other for one, other in zip(whole, parts, strict=True)])])
    if world.size > 1:
        torch.distributed.all_reduce(norms)
    norm, difference = norms.sqrt().tolist()
    return float(difference / norm) if norm else 0.0


def gradients(
    model: nn.Module, objective: AssistantTurns, rows: np.ndarray, micro_batch_size: int, world: World
) -> list[Tensor]:
    """This rank's part of the gradients of some rows' mean loss, computed in micro-batches; none stay in the model."""
    parts = [
        objective.prepare(part) for part in micro_batches(rows, world.data_rank, world.data_size, micro_batch_size)
    ]
    accumulate_gradients(model, objective, parts, objective.weight(rows), world)
    found = [local(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def local(gradient: Tensor) -> Tensor:
    """This rank's shard of a gradient."""
    shard: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return shard


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all squares, float64."""
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
