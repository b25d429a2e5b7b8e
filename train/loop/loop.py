"""The training loop: one for all objectives. An objective says what to read and what the loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.dataprep.context import Context
from gristmill.mixtures.training import LOOK_EVERY_STEPS, EarlyStopping, Training
from gristmill.tokenize.streaming.ahead import ReadAhead
from gristmill.train.loop.batches import READING_THREADS, Batch, batches_ahead
from gristmill.train.loop.checkpoints import Checkpoints, Keeping
from gristmill.train.loop.examination import Decode, finite, look_at_device
from gristmill.train.loop.gradients import accumulate_gradients, measuring_parts
from gristmill.train.loop.log import Clock, UpdateSize, peak_memory_bytes, speed_metrics
from gristmill.train.loop.objective import Objective
from gristmill.train.loop.profiling import Profiler
from gristmill.train.loop.progress import Part, Progress, Seen
from gristmill.train.loop.record import Record
from gristmill.train.loop.rollback import describe_rollback, is_given_up, plan_after, read_rollbacks, write_rollbacks
from gristmill.train.loop.spikes import Streak, empty_window, judge, remember_loss, rollback_step
from gristmill.train.loop.stopping import StoppedError, held_out_loss, no_longer_improves, stop_requested
from gristmill.train.loop.stream import Plan, extend_digest, plan_of
from gristmill.train.optim.averaging import AveragedWeights
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.elastic import ElasticWeights
from gristmill.train.optim.loss_scale import LossScale
from gristmill.train.optim.noise_scale import NoiseScale
from gristmill.train.optim.optimizer import make_optimizers, update
from gristmill.train.optim.schedules import learning_rate
from gristmill.train.optim.sophia import Sophia
from gristmill.train.parallel.sharding import assert_sharded
from gristmill.train.parallel.world import World, agree, any_rank

CHECKPOINTS = "checkpoints"


class OtherRowsError(RuntimeError):
    """A checkpoint was made with other rows than there are now."""


@dataclass(frozen=True)
class Job:
    """All that the loop needs to know.

    Attributes:
        section: steps, batch sizes, optimizer, schedule.
        objective: what to read and the loss.
        model: sharded.
        world: the processes.
        context: working folder, checkpoint policy, where progress goes.
        peak_flops: of one device, if known.
        causal_share: of the objective's arithmetic, what remains where masked attention is not counted.
        after_step: called on every rank after each step; what it returns is logged as a line of that step.
        average: the running mean of the weights, if one is kept.
        decode: from token ids to text, for autopsies.
        elastic: what pulls the weights back to where they were, if anything does.
        before_step: called on every rank with the steps done, before the next one's gradients.
        state: further state that lies in checkpoints, by name.
        reading_threads: see batches.reading_threads.
    """

    section: Training
    objective: Objective
    model: nn.Module
    world: World
    context: Context
    peak_flops: float | None = None
    causal_share: float = 1.0
    after_step: Callable[[int], dict[str, Any] | None] = lambda step: None
    average: AveragedWeights | None = None
    decode: Decode | None = None
    elastic: ElasticWeights | None = None
    before_step: Callable[[int], None] = lambda step: None
    state: Mapping[str, Part] = field(default_factory=dict)
    reading_threads: int = READING_THREADS

    @cached_property
    def plan(self) -> Plan:
        """Which positions each step reads, as long as the training does not go back."""
        return plan_of(self.section, self.objective.sequence_length)

    @cached_property
    def early_stopping(self) -> EarlyStopping | None:
        """When to end before the last step."""
        return getattr(self.section, "early_stopping", None)


class Attempt:
    """One attempt at a job: what lives from its start, or from a checkpoint, to its end or the next kill."""

    def __init__(self, job: Job) -> None:
        section, context, device = job.section, job.context, job.world.device
        self.job = job
        self.optimizers = make_optimizers(job.model, section.optimizer, context.compute.offload_optimizer)
        self.loss_scale = LossScale(device) if section.precision == "fp16" else None
        self.noise_scale = None if section.noise_scale_every is None else NoiseScale(device)
        parts: dict[str, Part | None] = {
            "loss_scale": self.loss_scale, "noise_scale": self.noise_scale, "average": job.average,
            **job.state}
        self.progress = Progress(
            empty_window(device, section.spikes.window),
            torch.zeros(1 + job.objective.sums_length, dtype=torch.float64, device=device),
            job.objective.fingerprint, {name: part for name, part in parts.items() if part is not None})
        goes_back = section.spikes.rollback_after is not None
        keeping = Keeping(context.keep_checkpoints, context.permanent_every,
                          section.spikes.rollback_steps if goes_back else None)
        self.checkpoints = Checkpoints(context.work / CHECKPOINTS, job.model, self.optimizers, job.world, keeping,
                                       context.warn)
        self.rollbacks: list[dict[str, Any]] = agree(read_rollbacks(context.work), job.world)
        self.progress.rollbacks = len(self.rollbacks)
        self._resume()
        if goes_back and self.progress.step == 0:
            self.save()
        self.record = Record(context.work, self.progress.step, len(self.rollbacks),
                             context.wandb) if job.world.is_first else None
        self.profiler = Profiler(context.profile, context, job.world, self.progress.step)
        self.clock = Clock()

    @property
    def plan(self) -> Plan:
        """Which positions each step reads, after all rollbacks."""
        return plan_after(self.job.plan, self.rollbacks)

    def save(self) -> None:
        """Begin to write a checkpoint of the step that is done."""
        self.checkpoints.save(self.progress.step, self.progress.tensors(),
                              self.progress.plain(self.job.objective.fingerprint))

    def look(self) -> None:
        """Ask the device which steps were bad."""
        look_at_device(self.progress, self.job.objective, self.plan, self.job.section.spikes.rollback_after,
                       self.job.decode, self.job.world, self.job.context, self.record)

    def _resume(self) -> None:
        found = self.checkpoints.load_newest(
            self.progress.tensors(), lambda step, state: is_given_up(step, state, self.rollbacks))
        if found is not None:
            check_rows(found[1].get("rows_of"), self.job.objective.fingerprint, self.checkpoints.folder)
            self.progress.restore(*found)
            self.progress.rollbacks = len(self.rollbacks)


def train(job: Job) -> tuple[Record | None, dict[str, Any]]:
    """Train from the newest checkpoint, or from the start, to the last step.

    Returns:
        the record (on the first rank), and a summary: steps, tokens, skipped steps, rows_digest, rollbacks, and
        whether it stopped early.

    Raises:
        StoppedError: SIGTERM came; the state is saved.
        OtherRowsError: the newest checkpoint has read other rows than there are.
    """
    assert_sharded(job.model)
    if job.context.deterministic:
        torch.use_deterministic_algorithms(True)  # an error in place of the warning
    attempt = Attempt(job)
    progress = attempt.progress
    stopped_early = _has_stopped(job, progress)
    while progress.step < job.section.steps and not stopped_early:
        # A rollback changes what the coming steps read: they are read ahead anew.
        stopped_early = _train_until_rollback(attempt)
    attempt.look()
    attempt.profiler.close()
    attempt.checkpoints.close()
    if attempt.record is not None:
        attempt.record.close()
    return attempt.record, {
        "steps": progress.step, "tokens": progress.tokens, "skipped_steps": progress.skipped,
        "rows_digest": progress.digest, "rollbacks": attempt.rollbacks, "stopped_early": stopped_early,
        "peak_memory_bytes": peak_memory_bytes(job.world.device, job.world)}


def _train_until_rollback(attempt: Attempt) -> bool:
    """Train to the last step, or until the training has gone back; returns whether it is over before its last step."""
    job, progress = attempt.job, attempt.progress
    with closing(batches_ahead(job.objective, attempt.plan, job.section.steps, job.section.micro_batch_size, job.world,
                               job.context.stream.read_ahead_steps, job.reading_threads)) as batches:
        while progress.step < job.section.steps:
            job.before_step(progress.step)
            _one_step(attempt, batches.take(progress.step), batches)
            attempt.profiler.after(progress.step)
            if _validate(attempt):
                return True
            if progress.step % LOOK_EVERY_STEPS == 0:
                attempt.look()
                if progress.streak.due is not None:
                    _go_back(attempt, progress.streak.due)
                    return False
            _save_where_due(attempt)
    return False


def _one_step(attempt: Attempt, batch: Batch, batches: ReadAhead[Batch]) -> None:
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


def scheduled_rate(job: Job, step: int) -> float:
    """The learning rate of a step, counted from 1; a warm-up in tokens goes by the first step's tokens."""
    section = job.section
    step_tokens = 0
    if section.schedule.warmup_tokens is not None:
        step_tokens = job.objective.num_tokens(job.plan.rows(job.objective.order, 0))
    return learning_rate(section.schedule, section.optimizer.learning_rate, step, section.steps, step_tokens)


def is_logged(section: Training, step: int) -> bool:
    """Whether a step, counted from 1, gets a line: the first, the last and every `log_every`-th one."""
    return step in (1, section.steps) or step % section.log_every == 0


def check_rows(saved: str | None, now: str, folder: Path) -> None:
    """Refuse to go on with other rows than those that a checkpoint has read.

    Raises:
        OtherRowsError: names both sets of rows.
    """
    if saved != now:
        raise OtherRowsError(
            f"{folder}: the checkpoint there has read rows of {saved}, but the rows now are of {now}: going on would "
            "skip some and repeat others; give back the data that it began with, or delete the folder and train anew")


def _validate(attempt: Attempt) -> bool:
    """Log what the job says after a step; returns whether the training ends for it."""
    job, progress = attempt.job, attempt.progress
    line = job.after_step(progress.step)
    if line is None:
        return False
    if attempt.record is not None:
        attempt.record.metrics({"step": progress.step, **line})
    if job.early_stopping is not None and (loss := held_out_loss(line)) is not None:
        progress.best, progress.stale = no_longer_improves(progress.best, progress.stale, loss,
                                                           job.early_stopping.least_improvement)
    return _has_stopped(job, progress)


def _has_stopped(job: Job, progress: Progress) -> bool:
    return job.early_stopping is not None and progress.stale >= job.early_stopping.patience


def _go_back(attempt: Attempt, first_bad_step: int) -> None:
    """Return to the checkpoint before a streak of bad steps; what was read since is never read again."""
    job, progress, spikes = attempt.job, attempt.progress, attempt.job.section.spikes
    target = rollback_step(first_bad_step, spikes.rollback_steps)
    line = describe_rollback(job.plan, attempt.rollbacks, progress.step, target, first_bad_step)
    attempt.checkpoints.join()
    attempt.rollbacks.append(line)
    if job.world.is_first:
        # From here on the rollback has happened: a kill before the rest of it is done changes nothing.
        write_rollbacks(job.context.work, attempt.rollbacks)
        attempt.checkpoints.remove(lambda step, state: is_given_up(step, state, attempt.rollbacks))
    progress.restore(target, attempt.checkpoints.load(target, progress.tensors()))
    progress.rollbacks, progress.streak = len(attempt.rollbacks), Streak()
    attempt.clock = Clock()
    if attempt.record is not None:
        attempt.record.go_back(line)
    job.context.warn(f"{spikes.rollback_after} bad steps in a row from step {first_bad_step} on: the training went "
                     f"back from step {line['from_step']} to step {target}, and reads on behind what it has read")


def _save_where_due(attempt: Attempt) -> None:
    """Save a checkpoint after the steps that call for one.

    Raises:
        StoppedError: SIGTERM came to any rank; the state is saved.
    """
    job, progress, spikes = attempt.job, attempt.progress, attempt.job.section.spikes
    stopping = any_rank(stop_requested(), job.world)
    due = progress.step % job.context.checkpoint_every == 0 or (
        spikes.rollback_after is not None and progress.step % spikes.rollback_steps == 0)
    if progress.step < job.section.steps and (stopping or due):
        attempt.look()
        attempt.save()
    if stopping:
        attempt.checkpoints.close()
        raise StoppedError(f"asked to stop after step {progress.step}")


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
    attempt.record.metrics({
        "step": progress.step, **measured, **measured_norms, **scaling, **noise,
        "learning_rate": scheduled_rate(job, progress.step), "tokens": progress.tokens,
        "skipped_steps": progress.skipped, "rows_digest": progress.digest, **speed, "peak_memory_bytes": memory,
    })
    extra = {name: value for name, value in (
        ("loss", measured.get("loss")), ("tokens", progress.tokens), ("tokens_per_second", rate)) if value is not None}
    job.context.progress(progress.step, section.steps, "steps", **extra)
