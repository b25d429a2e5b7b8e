"""Optimizer step of a training: gradients, the update unless the step is bad, and
metrics if due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from gristmill.tokenize.streaming.read_ahead import ReadAhead
from gristmill.train.checkpoints.resuming import Attempt
from gristmill.train.distributed.process_groups import World, sum_over_ranks
from gristmill.train.loop.bad_steps import finite
from gristmill.train.loop.batch_plan import extend_digest, micro_batches
from gristmill.train.loop.loop_state import LoopState, Seen
from gristmill.train.loop.metrics_log import TIMINGS
from gristmill.train.loop.objective import Metrics, Objective
from gristmill.train.loop.prefetch import Batch
from gristmill.train.loop.spikes import judge, remember_loss
from gristmill.train.loop.throughput import UpdateSize, peak_memory_bytes, speed_metrics
from gristmill.train.loop.training_job import Job, is_logged, scheduled_rate
from gristmill.train.optimizers.clipping import clip_gradients
from gristmill.train.optimizers.noise_scale import PartNorms
from gristmill.train.optimizers.optimizer import update


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
    sums, row_losses, noise = _gradients(attempt, batch, step)
    norm = clip_gradients(learner.model, section.optimizer)
    loss = (sums[0] / batch.weight).float()
    bad, mean, deviation = judge(loss, norm, progress.window, section.spikes.sigma)
    if attempt.noise_scale is not None and noise is not None:
        attempt.noise_scale.follow(noise, bad)
    size = UpdateSize(learner.model) if is_due else None
    update(attempt.optimizers, scheduled_rate(job, step) * progress.scale_of(step), bad)
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
        "learning_rate": scheduled_rate(job, seen.step) * progress.scale_of(seen.step),
        "tokens": progress.tokens,
        "skipped": bool(seen.bad.item()),
        "logged": None
        if logged is None
        else {key: value for key, value in logged.items() if key not in TIMINGS},
    }


def _gradients(
    attempt: Attempt, batch: Batch, step: int
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Gradients of a batch; returns its sums, row losses, and noise scale if
    due.
    """
    job = attempt.job
    section = attempt.job.section
    learner = attempt.job.learner
    norms = after_part = None
    if section.noise_scale_every is not None and step % section.noise_scale_every == 0:
        norms, after_part = measuring_parts(
            learner.model,
            learner.objective,
            batch.rows,
            attempt.plan.cuts_in_step(step - 1),
            step - 1,
            section.micro_batch_size,
            job.world,
        )
    sums, row_losses = accumulate_gradients(
        learner.model,
        learner.objective,
        batch.parts,
        batch.weight,
        job.world,
        after_part,
    )
    noise = None if norms is None else norms.estimate()
    return sums, row_losses, noise


def _log(
    attempt: Attempt, norms: Mapping[str, Tensor], batches: ReadAhead[Batch]
) -> Metrics | None:
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
    metrics: dict[str, object] = {**measured, **measured_norms}
    if attempt.noise_scale is not None:
        metrics |= attempt.noise_scale.report()
    metrics |= {
        "learning_rate": scheduled_rate(job, progress.step)
        * progress.scale_of(progress.step),
        "tokens": progress.tokens,
        "skipped_steps": progress.skipped,
        "rows_digest": progress.digest,
        **speed_metrics(
            rate, objective.flops_per_token, job.utilisation, job.world.size
        ),
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


def accumulate_gradients(
    model: nn.Module,
    objective: Objective,
    parts: Sequence[Any],
    weight: float,
    world: World,
    after_part: Callable[[int], None] | None = None,
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
        after_part: called with the number of each micro-batch, after its gradients are
            reduced.

    Returns:
        the objective's sums over all ranks, and the row losses of this rank's
        micro-batches in half precision.
    """
    scale = world.averaged_over / weight
    sums = torch.zeros(objective.sums_length, dtype=torch.float64, device=world.device)
    row_losses = []
    for number, part in enumerate(parts):
        reduces = after_part is not None or number == len(parts) - 1
        if isinstance(model, FSDPModule):
            # Unreduced gradients are full float32 tensors; reduced gradients are
            # shards.
            model.set_requires_gradient_sync(reduces or world.shards_weights)
            model.set_requires_all_reduce(reduces)
        measured = objective.loss(model, part, scale)
        measured.loss.backward()
        sums += measured.sums
        row_losses.append(measured.row_losses.detach().half())
        if after_part is not None:
            after_part(number)
    return sum_over_ranks(sums, world), row_losses


def measuring_parts(
    model: nn.Module,
    objective: Objective,
    rows: np.ndarray,
    cuts: int,
    step: int,
    micro_batch_size: int,
    world: World,
) -> tuple[PartNorms, Callable[[int], None]]:
    """Estimator of the noise scale of a step, and a function to call after each of its
    micro-batches.

    Raises:
        ValueError: the batch has a single micro-batch, so there is nothing to compare.
    """
    shares = [
        micro_batches(rows, rank, world.data_size, micro_batch_size)
        for rank in range(world.data_size)
    ]
    parts = [np.concatenate(part) for part in zip(*shares, strict=True)]
    if len(parts) < 2:
        raise ValueError(
            "noise_scale_every compares micro-batches with the whole batch, but "
            f"micro_batch_size ({micro_batch_size}) times {world.data_size} ranks "
            f"holds all {len(rows)} rows of it; lower micro_batch_size, or remove "
            "noise_scale_every"
        )
    weight = objective.weight(rows, cuts, step)
    norms = PartNorms(model)
    return norms, lambda number: norms.take(
        objective.weight(parts[number], cuts, step) / weight, len(parts[number])
    )
