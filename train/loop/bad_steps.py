"""Detection of bad steps on the host, and the records of what they read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.core.stage_context import Context
from gristmill.train.loop.batch_plan import RowPlan
from gristmill.train.loop.loop_state import LoopState, Seen
from gristmill.train.loop.metrics_log import Record
from gristmill.train.loop.objective import UNTRAINED, Objective
from gristmill.train.loop.spike_report import AUTOPSIES, examine, write_spike_report
from gristmill.train.parallel.process_groups import World

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to text."""
Known = Callable[[Sequence[str]], Mapping[str, Mapping[str, Any]]]
"""Function from hexadecimal document ids to the origin and quality of each document."""


def look_at_device(
    progress: LoopState,
    objective: Objective,
    plan: RowPlan,
    rollback_after: int | None,
    decode: Decode | None,
    known: Known | None,
    world: World,
    context: Context,
    record: Record | None,
) -> None:
    """Read the flags of the steps since the last call from the device, and record bad
    steps; a collective.

    Args:
        progress: its `seen` steps are judged and cleared.
        objective, plan: the source of the rows of each step.
        rollback_after: consecutive bad steps that trigger a rollback.
        decode: for the text in loss-spike reports; None omits it.
        known: for the origin and quality of documents in the reports; None omits them.
        world: the processes.
        context: receives loss-spike reports and warnings.
        record: of the first rank; None elsewhere.
    """
    pending = list(progress.seen)
    progress.seen.clear()
    if not pending:
        return
    flags = torch.stack(
        [torch.stack((step_flags.bad, step_flags.overflow)) for step_flags in pending]
    ).tolist()
    for step_flags, (bad, overflow) in zip(pending, flags, strict=True):
        if overflow:
            progress.overflows += 1
            continue
        progress.streak = progress.streak.after(step_flags.step, bad, rollback_after)
        if not bad:
            continue
        progress.skipped += 1
        rows = plan.rows(objective.order, step_flags.step - 1)
        row_losses = gather_row_losses(step_flags.row_losses, len(rows), world)
        if record is None:
            continue
        figures = {
            "step": step_flags.step,
            "loss": finite(step_flags.loss),
            "grad_norm": finite(step_flags.norm),
        }
        record.skipped(
            {
                **figures,
                "rollbacks": progress.rollbacks,
                "rows": rows.tolist(),
                **objective.describe(rows),
            }
        )
        documents = _readable(objective.blame(rows, row_losses), decode)
        report = examine(
            {**figures, **_window(step_flags)}, with_known(documents, known, context)
        )
        write_spike_report(context.work / AUTOPSIES, report, progress.rollbacks)
        context.warn(
            f"step {step_flags.step} was skipped: loss {float(step_flags.loss):.4g}, "
            f"gradient norm {float(step_flags.norm):.4g}; "
            f"what it read is in skipped_steps.jsonl, ordered by loss in {AUTOPSIES}"
        )


def gather_row_losses(parts: Sequence[Tensor], rows: int, world: World) -> np.ndarray:
    """Losses of all rows of a batch, from the micro-batches of every rank (float32,
    shape (rows, k)).

    The micro-batches of a rank hold every data_size-th row, the shorter rows of a row
    side by side; an empty micro-batch holds a padding row, which is ignored. Parts may
    differ in k and are padded with UNTRAINED.
    """
    local_losses = [part.float().cpu().numpy() for part in parts]
    gathered: list[Any] = [(world.data_rank, local_losses)]
    if world.size > 1:
        gathered = [None] * world.size
        dist.all_gather_object(gathered, (world.data_rank, local_losses))
    losses_by_rank = {
        rank: _rows_of_share(rank_losses, len(range(rank, rows, world.data_size)))
        for rank, rank_losses in gathered
    }
    row_losses = np.full(
        (rows, max(rank_losses.shape[1] for rank_losses in losses_by_rank.values())),
        UNTRAINED,
        dtype=np.float32,
    )
    for rank, rank_losses in losses_by_rank.items():
        row_losses[rank :: world.data_size, : rank_losses.shape[1]] = rank_losses
    return row_losses


def _rows_of_share(parts: Sequence[np.ndarray], count: int) -> np.ndarray:
    """Row losses (count, k) of one rank, from its micro-batches."""
    if count == 0:
        return np.empty((0, 1), dtype=np.float32)
    longest = max(part.shape[1] for part in parts)
    padded = [
        np.pad(part, ((0, 0), (0, longest - part.shape[1])), constant_values=UNTRAINED)
        for part in parts
    ]
    return np.concatenate(padded)[:count]


def _window(step: Seen) -> dict[str, float | None]:
    return {"mean": finite(step.mean), "deviation": finite(step.deviation)}


def _readable(
    documents: Sequence[dict[str, Any]], decode: Decode | None
) -> list[dict[str, Any]]:
    """Documents with the decoded text of their `head` tokens."""
    return [
        {
            **{key: value for key, value in document.items() if key != "head"},
            **(
                {"text": decode(document["head"])}
                if decode is not None and "head" in document
                else {}
            ),
        }
        for document in documents
    ]


def with_known(
    documents: Sequence[dict[str, Any]], known: Known | None, context: Context
) -> Sequence[dict[str, Any]]:
    """Documents with their origin and quality; unchanged, with a warning, if those
    cannot be read.
    """
    if known is None:
        return documents
    try:
        details = known(sorted({document["id"] for document in documents}))
    except (OSError, ValueError, RuntimeError) as error:
        # A report is no reason to end a training.
        context.warn(
            "the loss-spike report does not say where its documents are from and "
            f"how they were judged: {error}"
        )
        return documents
    return [{**document, **details.get(document["id"], {})} for document in documents]


def finite(value: Tensor | float) -> float | None:
    """A finite float for JSON; None for NaN and Inf."""
    number = float(value)
    return number if math.isfinite(number) else None


def decoder(tokenizer: Path) -> Callable[[Sequence[int]], str]:
    """Function from token ids to text; the tokenizer is loaded on first use."""

    def decode(ids: Sequence[int]) -> str:
        from gristmill.tokenize.encoding.tokenizer import load

        return load(tokenizer).decode(ids)

    return decode
