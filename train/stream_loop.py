"""Training loop for any PyTorch model on a stream of rows, with gristmill's checkpoints
and record.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gristmill.core.stage_context import Context, Event
from gristmill.mixtures.schema.engine import Parallel, TrainingEngine
from gristmill.mixtures.schema.pretrain import Training
from gristmill.train.data.row_stream import RowStream
from gristmill.train.distributed.process_groups import (
    World,
    make_world,
    process_group,
    single_process,
)
from gristmill.train.loop.batch_plan import or_first
from gristmill.train.loop.metrics_log import MetricsLine
from gristmill.train.loop.objective import (
    UNTRAINED,
    JsonObject,
    Measured,
    Numbers,
    ReadDocument,
    mean_of_trained,
)
from gristmill.train.loop.prefetch import reading_threads
from gristmill.train.loop.training_job import Job, Learner, Observers
from gristmill.train.objectives.losses import IGNORED
from gristmill.train.trainer import TrainingSummary, train

TokenLosses = Callable[[nn.Module, Any], Tensor]
"""Function from a model and a batch to its losses: (n, t) float32, each at the position
of its label, 0 without one; of preference pairs (n,).
"""


def next_token_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of a causal model of transformers, (n, t) float32: each loss at the
    position of its label.

    Args:
        model: returns an object with `logits` (n, t, v), or the logits alone, for
            `input_ids` and optionally `position_ids`.
        batch: of a stream.
    """
    inputs = {
        name: batch[name] for name in ("input_ids", "position_ids") if name in batch
    }
    output = model(**inputs)
    logits = getattr(output, "logits", output)
    labels = batch["labels"]
    nll = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(),
        labels[:, 1:].flatten(),
        reduction="none",
        ignore_index=IGNORED,
    )
    return F.pad(nll.view(len(labels), -1), (1, 0))


@dataclass(frozen=True)
class _Read:
    """A micro-batch in host memory; `real`: False for padding."""

    batch: Mapping[str, Tensor]
    real: bool


class _StreamObjective:
    """Rows of a stream with the caller's loss (see objective.Objective); the sums hold
    only the total loss.
    """

    sums_length = 1

    def __init__(
        self,
        rows: RowStream,
        losses: TokenLosses,
        parameters: int,
        device: torch.device,
    ) -> None:
        self._rows = rows
        self._losses = losses
        self._device = device
        self.order = rows.kind.order
        self.fingerprint = rows.fingerprint
        self.sequence_length = rows.kind.packed.sequence_length
        # Kaplan et al. 2020, table 1, without attention
        self.flops_per_token = 6.0 * parameters

    def weight(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> float:
        return float(self._rows.kind.trained(rows))

    def num_tokens(self, rows: np.ndarray) -> int:
        return len(rows) * self.sequence_length

    def prepare(self, rows: np.ndarray, cuts: int = 1, step: int = 0) -> _Read:
        return _Read(self._rows.kind.batch(or_first(rows), trim=True), bool(len(rows)))

    def loss(self, model: nn.Module, batch: _Read, scale: float) -> Measured:
        placed = {
            name: tensor.to(self._device, non_blocking=True)
            for name, tensor in batch.batch.items()
        }
        losses = self._losses(model, placed) * float(batch.real)
        total = losses.sum()
        row_losses = losses.detach()
        labels = placed.get("labels")
        if labels is not None and labels.shape == losses.shape:
            row_losses = torch.where(labels != IGNORED, row_losses, UNTRAINED)
        return Measured(
            total * scale,
            total.detach().double()[None],
            row_losses.view(len(losses), -1),
        )

    def report(self, sums: Sequence[float], weight: float) -> Numbers:
        return {"loss": sums[0] / weight}

    def describe(self, rows: np.ndarray) -> JsonObject:
        return {"read": self._rows.provenance(rows)}

    def blame(self, rows: np.ndarray, row_losses: np.ndarray) -> list[ReadDocument]:
        """Each document or pair of some rows, with the mean loss of its tokens."""
        entries: list[ReadDocument] = []
        for origin, losses in zip(self._rows.provenance(rows), row_losses, strict=True):
            row = origin["row"]
            source = origin["source"]
            if "example" in origin:
                entries.append(
                    {
                        "id": origin["example"],
                        "loss": mean_of_trained(losses),
                        "row": row,
                        "source": source,
                    }
                )
            for document in origin.get("documents", ()):
                start = document["start"]
                tokens = document["length"]
                entries.append(
                    {
                        "id": document["id"],
                        "start": start,
                        "tokens": tokens,
                        "row": row,
                        "source": source,
                        "loss": mean_of_trained(losses[start : start + tokens]),
                    }
                )
        return entries


class LoopSummary(TrainingSummary):
    """Summary of a training; `metrics` are the lines of metrics.jsonl, on the first
    rank.
    """

    metrics: list[MetricsLine]


def train_loop(
    model: nn.Module,
    rows: RowStream,
    *,
    steps: int,
    folder: str | Path,
    losses: TokenLosses = next_token_losses,
    optimizer: Mapping[str, object] | None = None,
    schedule: Mapping[str, object] | None = None,
    micro_batch_size: int | None = None,
    checkpoint_every: int = 100,
    log_every: int = 10,
    after_step: Callable[[int], Mapping[str, object] | None] = lambda step: None,
    **settings: Any,
) -> LoopSummary:
    """Train a model in place with the loop of gristmill's trainings, which resumes
    exactly.

    Called again with the same folder, it continues from the newest checkpoint there,
    and ends with the weights of an uninterrupted training. SIGTERM saves a checkpoint.
    A step with NaN in its loss or gradient, or with a loss spike, is skipped, and its
    rows are written to `folder/autopsies`.

    Args:
        model: float32 weights on the training device; under torchrun sharded by FSDP
            (`fully_shard`).
        rows: a stream with a batch_size, the rows of a step over all ranks; the loop
            distributes them, so its rank and world_size are left out. Its order starts
            at the first row.
        steps: of the whole training.
        folder: of checkpoints, metrics.jsonl and TensorBoard's files.
        losses: function from the model and a batch to the loss of each token, or of
            each preference pair.
        optimizer, schedule: keys of these sections of the manifest: {"kind": "muon",
            "learning_rate": 0.02}.
        micro_batch_size: most rows of a forward pass on one rank; all of a rank's if
            absent.
        checkpoint_every, log_every: steps between checkpoints, and between lines of
            metrics.
        after_step: called after each step (from 1); its result is logged as a line of
            that step.
        settings: further keys that all trainings have in the manifest, such as spikes.

    Returns:
        steps, tokens, skipped_steps, rows_digest and more (see loop.TrainingSummary),
        and `metrics`: the lines of metrics.jsonl.

    Raises:
        ValueError: the stream has no batch_size, or is a rank's share; the model is on
            another device than the training; or a precision is set.
        pydantic.ValidationError: a setting is wrong or unknown.
        gristmill.train.loop.stopping.StoppedError: SIGTERM was received; the state is
            saved.
        gristmill.train.trainer.OtherRowsError: the checkpoint has read other rows.
    """
    if rows.batch_size is None or rows.world_size > 1:
        raise ValueError(
            "train_loop deals batches out itself: give the stream batch_size (rows of "
            "a step on all ranks), and neither rank nor world_size"
        )
    section = Training.model_validate(
        {
            "steps": steps,
            "global_batch_size": rows.batch_size,
            "micro_batch_size": micro_batch_size or rows.batch_size,
            "optimizer": dict(optimizer or {}),
            "schedule": dict(schedule or {}),
            "log_every": log_every,
            "seed": rows.seed,
            **settings,
        }
    )
    if section.precision != "auto":
        raise ValueError(
            "`losses` says in which precision the model computes, such as by "
            "torch.autocast: leave precision out"
        )
    work = Path(folder)
    work.mkdir(parents=True, exist_ok=True)
    with _world() as world:
        device = next(model.parameters()).device
        if device.type != world.device.type:
            raise ValueError(
                f"the model is on {device}, but this machine's trainings compute on "
                f"{world.device}: move it there, or set CUDA_VISIBLE_DEVICES to nothing"
            )
        parameters = sum(
            parameter.numel()
            for parameter in model.parameters()
            if parameter.requires_grad
        )
        objective = _StreamObjective(rows, losses, parameters, device)
        objective.order.check_reads(steps * rows.batch_size)
        record, summary = train(
            Job(
                section=section,
                learner=Learner(objective, model),
                world=world,
                context=Context(
                    work,
                    "train_loop",
                    training=TrainingEngine(checkpoint_every=checkpoint_every),
                    emit=_quiet,
                ),
                observers=Observers(after_step=after_step),
                reading_threads=reading_threads(rows.kind.packed.local, device),
            )
        )
    return {**summary, "metrics": record.lines() if record is not None else []}


@contextmanager
def _world() -> Iterator[World]:
    """Current process group, or the one of torchrun, or a new group of one; restores
    the previous state.
    """
    if dist.is_initialized():
        yield make_world(
            Parallel(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
        )
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        with (
            process_group()
            if dist.is_torchelastic_launched()
            else single_process() as world
        ):
            yield world
    finally:
        if dist.is_initialized() and dist.get_world_size() == 1:  # after an error
            dist.destroy_process_group()
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _quiet(event: Event) -> None:
    """Emit only warnings; progress is in metrics.jsonl."""
    if event["event"] == "warning":
        warnings.warn(str(event["message"]), stacklevel=2)
