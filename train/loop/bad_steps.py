"""Detection of bad steps on the host, and the records of what they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.core.stage_context import Context
from gristmill.train.distributed.process_groups import World
from gristmill.train.loop.loop_state import LoopState
from gristmill.train.loop.metrics_log import Record
from gristmill.train.loop.objective import UNTRAINED, JsonObject, ReadDocument
from gristmill.train.loop.spike_report import (
    AUTOPSIES,
    Decode,
    Known,
    Origins,
    SkippedStep,
    examine,
    write_spike_report,
)
from gristmill.train.loop.training_job import Job


def look_at_device(progress: LoopState, job: Job, record: Record | None) -> None:
    """Read the flags of the steps since the last call from the device, and record bad
    steps; a collective.

    Args:
        progress: its `seen` steps are judged and cleared.
        job: the training; its working folder receives loss-spike reports.
        record: of the first rank; None elsewhere.
    """
    pending = list(progress.seen)
    progress.seen.clear()
    if not pending:
        return
    flags = torch.stack([step_flags.bad for step_flags in pending]).tolist()
    objective = job.learner.objective
    observers = job.observers
    for step_flags, bad in zip(pending, flags, strict=True):
        if not bad:
            continue
        progress.skipped += 1
        rows = job.plan.rows(objective.order, step_flags.step - 1)
        row_losses = gather_row_losses(step_flags.row_losses, len(rows), job.world)
        if record is None:
            continue
        figures: SkippedStep = {
            "step": step_flags.step,
            "loss": finite(step_flags.loss),
            "grad_norm": finite(step_flags.norm),
            "mean": finite(step_flags.mean),
            "deviation": finite(step_flags.deviation),
        }
        line: JsonObject = {**figures, "rows": rows.tolist()}
        del line["mean"], line["deviation"]
        record.skipped({**line, **objective.describe(rows)})
        documents = objective.blame(rows, row_losses)
        for document in documents:
            head = document.pop("head", None)
            if head is not None and observers.decode is not None:
                document["text"] = observers.decode(head)
        write_spike_report(
            job.context.work / AUTOPSIES,
            examine(
                figures, documents, origins_of(documents, observers.known, job.context)
            ),
        )
        job.context.warn(
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
    # Ranks from `rows` on hold only padding rows.
    losses_by_rank = {rank: losses for rank, losses in gathered if rank < rows}
    width = max(part.shape[1] for losses in losses_by_rank.values() for part in losses)
    row_losses = np.empty((rows, width), dtype=np.float32)
    for rank, losses in losses_by_rank.items():
        padded = [
            np.pad(
                part, ((0, 0), (0, width - part.shape[1])), constant_values=UNTRAINED
            )
            for part in losses
        ]
        rows_of_rank = row_losses[rank :: world.data_size]
        rows_of_rank[:] = np.concatenate(padded)[: len(rows_of_rank)]
    return row_losses


def origins_of(
    documents: Sequence[ReadDocument], known: Known | None, context: Context
) -> Origins:
    """Origin and quality of documents, by id; empty, with a warning, if they cannot be
    read.
    """
    if known is None:
        return {}
    try:
        return known(sorted({document["id"] for document in documents}))
    except (OSError, ValueError, RuntimeError) as error:
        # A report is no reason to end a training.
        context.warn(
            "the loss-spike report does not say where its documents are from and "
            f"how they were judged: {error}"
        )
        return {}


def finite(value: Tensor | float) -> float | None:
    """A finite float for JSON; None for NaN and Inf."""
    number = float(value)
    return number if math.isfinite(number) else None


def decoder(tokenizer: Path) -> Decode:
    """Function from token ids to text; the tokenizer is loaded on first use."""

    def decode(ids: Sequence[int]) -> str:
        from gristmill.tokenize.encoding.tokenizer import load

        return load(tokenizer).decode(ids)

    return decode
