"""Optimizer step of a training: gradients, the update unless the step is bad, and
metrics if due.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gristmill.tokenize.streaming.read_ahead import ReadAhead
from gristmill.train.distributed.fsdp import evaluating
from gristmill.train.distributed.process_groups import (
    World,
    sum_over_ranks,
    sum_with_flag,
)
from gristmill.train.distributed.rendezvous import waiting_file
from gristmill.train.loop.bad_steps import finite
from gristmill.train.loop.batch_plan import extend_digest
from gristmill.train.loop.loop_state import LoopState, Seen
from gristmill.train.loop.metrics_log import TIMINGS
from gristmill.train.loop.objective import JsonObject, Metrics, Objective
from gristmill.train.loop.prefetch import Batch
from gristmill.train.loop.spikes import judge, remember_loss
from gristmill.train.loop.stopping import stop_requested
from gristmill.train.loop.throughput import UpdateSize, peak_memory_bytes
from gristmill.train.loop.training_job import Job, is_logged, scheduled_rate
from gristmill.train.models.tensor_files import Tensors
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.optimizer import update
from gristmill.train.resuming import Attempt


def one_step(
    attempt: Attempt, batch: Batch, batches: ReadAhead[Batch]
) -> tuple[Seen, Metrics | None]:
    """Compute gradients, update the weights unless the step is bad, and log metrics if
    due.

    Returns:
        the step's flags on the device, and its metrics (on the first rank, if logged).
    """
    job = attempt.job
    progress = attempt.progress
    section = job.section
    learner = job.learner
    step = progress.step + 1
    is_due = is_logged(section, progress.step + 1)
    sums, row_losses = accumulate_gradients(
        learner.model, learner.objective, batch.parts, batch.weight, job.world
    )
    stops_here = stop_requested() or (
        step % job.context.training.checkpoint_every == 0
        and step < section.steps
        and waiting_file(job.context.work).exists()
    )
    sums, stops = sum_with_flag(sums, stops_here, job.world)
    attempt.stop.follow(stops)
    norm = clip_gradients(learner.model, section.optimizer.clip_norm)
    loss = (sums[0] / batch.weight).float()
    bad, mean, deviation = judge(loss, norm, progress.window, section.spikes.sigma)
    size = UpdateSize(learner.model) if is_due else None
    update(attempt.optimizers, scheduled_rate(job, step), bad)
    if learner.average is not None:
        learner.average.follow(step, bad)
    remember_loss(progress.window, loss, step)
    progress.step = step
    progress.sums += torch.where(
        bad, 0.0, torch.cat((sums.new_tensor([batch.weight]), sums))
    )
    step_flags = Seen(step, bad, loss, norm, mean, deviation, row_losses)
    progress.seen.append(step_flags)
    progress.digest = extend_digest(progress.digest, batch.rows)
    progress.tokens += learner.objective.num_tokens(batch.rows)
    if not is_due:
        attempt.clock.skip_first_step(progress.tokens, step, batches.waited_seconds)
    return step_flags, None if size is None else _log(
        attempt, {"grad_norm": norm, **size.norms()}, batches
    )


def metrics_of_step(
    job: Job, progress: LoopState, seen: Seen, logged: Metrics | None
) -> Metrics:
    """Metrics of a step for callbacks; synchronises with the device.

    Args:
        job: the training.
        progress: state of the loop.
        seen: flags of the step.
        logged: metrics, if the step is logged; callbacks get only the reproducible
            ones.
    """
    return {
        "loss": seen.loss.item(),
        "grad_norm": seen.norm.item(),
        "learning_rate": scheduled_rate(job, seen.step),
        "tokens": progress.tokens,
        "skipped": bool(seen.bad.item()),
        "logged": None
        if logged is None
        else {key: value for key, value in logged.items() if key not in TIMINGS},
    }


def _log(attempt: Attempt, norms: Tensors, batches: ReadAhead[Batch]) -> Metrics | None:
    """Write metrics and report progress; a collective. Returns them on the first
    rank.
    """
    job = attempt.job
    progress = attempt.progress
    objective = attempt.job.learner.objective
    measured_norms = {name: finite(norm) for name, norm in norms.items()}
    attempt.look()
    weight, *sums = progress.sums.tolist()
    progress.sums.zero_()
    clock = attempt.clock
    waiting = clock.data_wait(progress.step, batches.waited_seconds, job.world)
    memory = peak_memory_bytes(job.world.device, job.world)
    rate = clock.rate(progress.tokens)
    clock.restart(progress.tokens, progress.step, batches.waited_seconds)
    if attempt.record is None:
        return None
    measured = objective.report(sums, weight) if weight > 0 else {}
    metrics: JsonObject = {**measured, **measured_norms}
    metrics |= {
        "learning_rate": scheduled_rate(job, progress.step),
        "tokens": progress.tokens,
        "skipped_steps": progress.skipped,
        "rows_digest": progress.digest,
        "tokens_per_second": round(rate, 1),
        **job.utilisation.mfu(rate * objective.flops_per_token / job.world.size),
        **waiting,
    }
    if attempt.save_seconds:
        metrics["checkpoint_seconds"] = round(attempt.save_seconds, 6)
        attempt.save_seconds = 0.0
    metrics["peak_memory_bytes"] = memory
    attempt.record.metrics(progress.step, metrics)
    loss = {"loss": measured["loss"]} if measured.get("loss") is not None else {}
    job.context.progress(
        progress.step,
        job.section.steps,
        "steps",
        **loss,
        tokens=progress.tokens,
        tokens_per_second=rate,
    )
    return metrics


def summed_losses(
    model: nn.Module, objective: Objective, parts: Iterable[Any], world: World
) -> list[float]:
    """Sums of an objective over micro-batches of all ranks, without gradients."""
    sums = torch.zeros(objective.sums_length, dtype=torch.float64, device=world.device)
    with evaluating(model):
        for part in parts:
            sums += objective.loss(model, part, 1.0).sums
    return sum_over_ranks(sums, world).tolist()


def accumulate_gradients(
    model: nn.Module,
    objective: Objective,
    parts: Sequence[Any],
    weight: float,
    world: World,
) -> tuple[Tensor, list[Tensor]]:
    """Accumulate the gradients of the mean loss of a batch.

    Every loss is divided by the weight of the whole batch, so the gradients depend
    neither on the split into micro-batches nor on uneven shares of ranks. FSDP averages
    over ranks, so the loss is multiplied by their number. Ranks that share weights
    reduce-scatter the gradients of each micro-batch and accumulate their shards in
    float32; replicas all-reduce after the last micro-batch.

    Args:
        model, objective: define the loss.
        parts: micro-batches of this rank, see prefetch.Batch.
        weight: of the whole batch.
        world: the processes.

    Returns:
        the objective's sums and row losses of this rank's micro-batches, the latter in
        half precision.
    """
    scale = world.averaged_over / weight
    sums = torch.zeros(objective.sums_length, dtype=torch.float64, device=world.device)
    row_losses = []
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        if isinstance(model, FSDPModule):
            # Unreduced gradients are full float32 tensors; reduced gradients are
            # shards.
            model.set_requires_gradient_sync(is_last or world.shards_weights)
            model.set_requires_all_reduce(is_last)
        measured = objective.loss(model, part, scale)
        measured.loss.backward()
        sums += measured.sums
        row_losses.append(measured.row_losses.detach().half())
    return sums, row_losses
