"""One step of a training: gradients, the update unless the step is a bad one, and its line where that is due."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gristmill.tokenize.streaming.read_ahead import ReadAhead
from gristmill.train.loop.attempt import Attempt
from gristmill.train.loop.batches import Batch
from gristmill.train.loop.examination import finite
from gristmill.train.loop.gradients import accumulate_gradients, measuring_parts
from gristmill.train.loop.job import is_logged, scheduled_rate
from gristmill.train.loop.log import UpdateSize, peak_memory_bytes, speed_metrics
from gristmill.train.loop.progress import Seen
from gristmill.train.loop.spikes import judge, remember_loss
from gristmill.train.loop.stream import extend_digest
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.optimizer import update
from gristmill.train.optim.sophia import Sophia


def one_step(attempt: Attempt, batch: Batch, batches: ReadAhead[Batch]) -> None:
    """Compute a batch's gradients, update the weights unless the step is a bad one, and log it where that is due."""
    job, progress, section = attempt.job, attempt.progress, attempt.job.section
    step, logged = progress.step + 1, is_logged(section, progress.step + 1)
    _estimate_curvature(attempt, batch, step)
    sums, row_losses, noise = _gradients(attempt, batch, step)
    penalty = {} if job.elastic is None else {"elastic_penalty": job.elastic.add_gradients()}
    norm = clip_gradients(job.model, section.optimizer)
    loss = (sums[0] / batch.weight).float()
    bad, mean, deviation = judge(loss, norm, progress.window, section.spikes.sigma)
    overflow = torch.zeros_like(bad)
    if attempt.loss_scale is not None:
        overflow = loss.isfinite() & ~norm.isfinite()
        attempt.loss_scale.follow(overflow)
    if attempt.noise_scale is not None and noise is not None:
        attempt.noise_scale.follow(noise, bad)
    size = UpdateSize(job.model) if logged else None
    update(attempt.optimizers, scheduled_rate(job, step), bad)
    if job.average is not None:
        job.average.follow(step, bad)
    remember_loss(progress.window, loss, step)
    progress.step = step
    progress.sums += torch.where(bad, 0.0, torch.cat((sums.new_tensor([batch.weight]), sums)))
    progress.seen.append(Seen(step, bad, overflow, loss, norm, mean, deviation, row_losses))
    progress.digest = extend_digest(progress.digest, batch.rows)
    progress.tokens += job.objective.num_tokens(batch.rows)
    if size is not None:
        _log(attempt, {"grad_norm": norm, **penalty, **size.norms()}, batches)


def _gradients(attempt: Attempt, batch: Batch, step: int) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Gradients of a batch, unscaled; its sums, row losses, and the measured noise where that is due."""
    job, section = attempt.job, attempt.job.section
    scale = attempt.loss_scale.value if attempt.loss_scale is not None else 1.0
    norms = after_part = None
    if section.noise_scale_every is not None and step % section.noise_scale_every == 0:
        norms, after_part = measuring_parts(job.model, job.objective, batch.rows, attempt.plan.cuts_in_step(step - 1),
                                            section.micro_batch_size, job.world)
    sums, row_losses = accumulate_gradients(job.model, job.objective, batch.parts, batch.weight, job.world, scale,
                                            after_part)
    noise = None if norms is None else norms.estimate()
    if attempt.loss_scale is not None:
        attempt.loss_scale.divide(job.model)
        noise = None if noise is None else noise / attempt.loss_scale.value.double() ** 2
    return sums, row_losses, noise


def _estimate_curvature(attempt: Attempt, batch: Batch, step: int) -> None:
    """In Sophia's steps that call for it: gradients of the batch's loss against labels that the model draws."""
    job = attempt.job
    for optimizer in attempt.optimizers:
        if isinstance(optimizer, Sophia) and (step - 1) % job.section.optimizer.hessian_every == 0:
            scale = attempt.loss_scale.value if attempt.loss_scale is not None else 1.0
            accumulate_gradients(job.model, job.objective, batch.parts, batch.weight, job.world, scale, draw=step)
            if attempt.loss_scale is not None:
                attempt.loss_scale.divide(job.model)
            optimizer.estimate(batch.weight)


def _log(attempt: Attempt, norms: Mapping[str, Tensor], batches: ReadAhead[Batch]) -> None:
    """Write a line of metrics, and report progress; every rank calls this together."""
    job, progress, section = attempt.job, attempt.progress, attempt.job.section
    measured_norms = {name: finite(norm) for name, norm in norms.items()}
    attempt.look()
    weight, *sums = progress.sums.tolist()
    progress.sums.zero_()
    clock = attempt.clock
    waiting = clock.data_wait(progress.step, batches.waited_seconds, job.world)
    memory, rate = peak_memory_bytes(job.world.device, job.world), clock.rate(progress.tokens)
    clock.restart(progress.tokens, progress.step, batches.waited_seconds)
    if attempt.record is None:
        return
    measured = job.objective.report(sums, weight) if weight > 0 else {}
    speed = {} if rate is None else {
        **speed_metrics(rate, job.objective.flops_per_token, job.objective.flops_per_token * job.causal_share,
                        job.peak_flops, job.world.size), **waiting}
    scaling = {} if attempt.loss_scale is None else {
        "loss_scale": attempt.loss_scale.value.item(), "overflowed_steps": progress.overflows}
    noise = {} if attempt.noise_scale is None else attempt.noise_scale.report()
    saving = {"checkpoint_seconds": round(attempt.save_seconds, 6)} if attempt.save_seconds else {}
    attempt.save_seconds = 0.0
    attempt.record.metrics({
        "step": progress.step, **measured, **measured_norms, **scaling, **noise,
        "learning_rate": scheduled_rate(job, progress.step), "tokens": progress.tokens,
        "skipped_steps": progress.skipped, "rows_digest": progress.digest, **speed, **saving,
        "peak_memory_bytes": memory,
    })
    extra = {name: value for name, value in (
        ("loss", measured.get("loss")), ("tokens", progress.tokens), ("tokens_per_second", rate)) if value is not None}
    job.context.progress(progress.step, section.steps, "steps", **extra)
