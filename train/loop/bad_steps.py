"""Asking the device which steps were bad, and writing down what those had read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.dataprep.context import Context
from gristmill.train.loop.objective import UNTRAINED, Objective
from gristmill.train.loop.record import Record
from gristmill.train.loop.row_plan import RowPlan
from gristmill.train.loop.spike_report import AUTOPSIES, examine, write_spike_report
from gristmill.train.loop.state import LoopState, Seen
from gristmill.train.parallel.world import World

Decode = Callable[[Sequence[int]], str]
"""From token ids to text."""
Known = Callable[[Sequence[str]], Mapping[str, Mapping[str, Any]]]
"""From documents' hexadecimal ids to what is known of each: where it is from, and how it was judged."""


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
    """Take note of the steps since the last look; every rank calls this together.

    Args:
        progress: its `seen` steps are judged, and forgotten.
        objective, plan: what the steps had read.
        rollback_after: bad steps in a row that make a rollback due.
        decode: for the text in loss-spike reports.
        known: for where their documents are from, and how they were judged.
        world: the processes.
        context: where loss-spike reports lie, and warnings go.
        record: of the first rank.
    """
    seen = list(progress.seen)
    progress.seen.clear()
    if not seen:
        return
    flags = torch.stack([torch.stack((one.bad, one.overflow)) for one in seen]).tolist()
    for one, (bad, overflow) in zip(seen, flags, strict=True):
        if overflow:
            progress.overflows += 1
            continue
        progress.streak = progress.streak.after(one.step, bad, rollback_after)
        if not bad:
            continue
        progress.skipped += 1
        rows = plan.rows(objective.order, one.step - 1)
        row_losses = gather_row_losses(one.row_losses, len(rows), world)
        if record is None:
            continue
        figures = {"step": one.step, "loss": finite(one.loss), "grad_norm": finite(one.norm)}
        record.skipped({**figures, "rollbacks": progress.rollbacks, "rows": rows.tolist(), **objective.describe(rows)})
        documents = _readable(objective.blame(rows, row_losses), decode)
        found = examine({**figures, **_window(one)}, with_known(documents, known, context))
        write_spike_report(context.work / AUTOPSIES, found, progress.rollbacks)
        context.warn(
            f"step {one.step} was skipped: loss {float(one.loss):.4g}, gradient norm {float(one.norm):.4g}; "
            f"what it read is in skipped_steps.jsonl, ordered by loss in {AUTOPSIES}"
        )


def gather_row_losses(parts: Sequence[Tensor], rows: int, world: World) -> np.ndarray:
    """The losses within all rows of a batch, from every rank's micro-batches (float32, shape (rows, k)).

    A share's micro-batches hold every data_size-th row, cut rows side by side; an empty one holds a row that does not
    count. Parts may have different k: what is not there is UNTRAINED.
    """
    own = [part.float().cpu().numpy() for part in parts]
    everybody: list[Any] = [(world.data_rank, own)]
    if world.size > 1:
        everybody = [None] * world.size
        dist.all_gather_object(everybody, (world.data_rank, own))
    shares = {rank: _rows_of_share(share, len(range(rank, rows, world.data_size))) for rank, share in everybody}
    whole = np.full((rows, max(share.shape[1] for share in shares.values())), UNTRAINED, dtype=np.float32)
    for rank, share in shares.items():
        whole[rank :: world.data_size, : share.shape[1]] = share
    return whole


def _rows_of_share(parts: Sequence[np.ndarray], count: int) -> np.ndarray:
    """One rank's rows (count, k) from its micro-batches."""
    if count == 0:
        return np.empty((0, 1), dtype=np.float32)
    longest = max(part.shape[1] for part in parts)
    padded = [np.pad(part, ((0, 0), (0, longest - part.shape[1])), constant_values=UNTRAINED) for part in parts]
    return np.concatenate(padded)[:count]


def _window(one: Seen) -> dict[str, float | None]:
    return {"mean": finite(one.mean), "deviation": finite(one.deviation)}


def _readable(documents: Sequence[dict[str, Any]], decode: Decode | None) -> list[dict[str, Any]]:
    """The documents with the beginning of their text in place of its tokens."""
    return [
        {
            **{key: value for key, value in one.items() if key != "head"},
            **({"text": decode(one["head"])} if decode is not None and "head" in one else {}),
        }
        for one in documents
    ]


def with_known(documents: Sequence[dict[str, Any]], known: Known | None, context: Context) -> Sequence[dict[str, Any]]:
    """The documents with what is known of each; without, and with a warning, where that cannot be read."""
    if known is None:
        return documents
    try:
        found = known(sorted({one["id"] for one in documents}))
    except (OSError, ValueError, RuntimeError) as error:
        # A training does not end for what only people read.
        context.warn(
            f"the loss-spike report does not say where its documents are from and how they were judged: {error}"
        )
        return documents
    return [{**one, **found.get(one["id"], {})} for one in documents]


def finite(value: Tensor | float) -> float | None:
    """A number that JSON can hold."""
    number = float(value)
    return number if math.isfinite(number) else None


def decoder(tokenizer: Path) -> Callable[[Sequence[int]], str]:
    """From token ids to text; the tokenizer is read when it is first needed."""

    def decode(ids: Sequence[int]) -> str:
        from gristmill.tokenize.encoding.tokenizer import load

        return load(tokenizer).decode(ids)

    return decode
