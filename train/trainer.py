"""Training loop of all objectives. An objective provides batches and their loss.

Garbage is collected at fixed steps: automatic collection starts on one rank at a time,
while the others wait for it in a collective (torchtitan, tools/utils.py; nanochat,
base_train.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NotRequired, TypedDict

import torch

from gristmill.core.files import write_json
from gristmill.mixtures.schema.pretrain import CallbackEvent
from gristmill.mixtures.user_code import OwnCodeError
from gristmill.tokenize.streaming.read_ahead import ReadAhead
from gristmill.train.checkpoint import (
    CHECKPOINTS,
    complete_steps,
    step_folder,
)
from gristmill.train.distributed.fsdp import assert_master_weights
from gristmill.train.loop.callbacks import StoppedBy
from gristmill.train.loop.metrics_log import Record
from gristmill.train.loop.objective import Metrics
from gristmill.train.loop.prefetch import Batch, read_batch
from gristmill.train.loop.step import metrics_of_step, one_step
from gristmill.train.loop.stopping import (
    StoppedError,
    held_out_loss,
    no_longer_improves,
)
from gristmill.train.loop.throughput import peak_memory_bytes
from gristmill.train.loop.training_job import (
    Job,
    describe_phase,
    warn_of_long_warmup,
)
from gristmill.train.resuming import Attempt, take_over
from gristmill.train.resuming import OtherRowsError as OtherRowsError

COLLECT_EVERY_STEPS = 50
"""Default of torchtitan."""
LOOK_EVERY_STEPS = 16
"""Largest number of steps after which the loop asks the device if any of them was
skipped.
"""


class TrainingSummary(TypedDict):
    """Summary of a training.

    Attributes:
        steps: optimizer steps done, skipped ones included.
        tokens: tokens read.
        skipped_steps: number of skipped updates.
        rows_digest: see batch_plan.extend_digest.
        stopped_early: early stopping or a callback ended it.
        peak_memory_bytes: see throughput.peak_memory_bytes.
        stopped_by: absent unless a callback ended it.
    """

    steps: int
    tokens: int
    skipped_steps: int
    rows_digest: str
    stopped_early: bool
    peak_memory_bytes: int
    stopped_by: NotRequired[StoppedBy]


def train(job: Job) -> tuple[Record | None, TrainingSummary]:
    """Train to the last step, from the newest checkpoint if there is one.

    Returns:
        the record (on the first rank), and a summary.

    Raises:
        StoppedError: SIGTERM was received; the state is saved.
        OtherRowsError: the newest checkpoint has read rows of a different set.
        gristmill.train.resuming.ContinueError: `continue_from` does not name a
            usable checkpoint.
    """
    assert_master_weights(job.learner.model)
    if job.context.training.deterministic:
        torch.use_deterministic_algorithms(True)  # raise instead of warn
    if job.section.continue_from is not None:
        take_over(job)
    warn_of_long_warmup(job)
    attempt = Attempt(job)
    progress = attempt.progress
    stopped_early = _has_stopped(attempt)
    with collecting_between_steps() as collect_garbage:
        try:
            if not stopped_early:
                stopped_early = _train_steps(attempt, collect_garbage)
        except BaseException as error:
            # The process may live on and train again in the same folder, so a pending
            # checkpoint is completed; but waiting for ranks that have not failed would
            # deadlock.
            if isinstance(error, OwnCodeError) or job.world.size == 1:
                attempt.checkpoints.close()
            raise
    attempt.look()
    attempt.profiler.close()
    attempt.checkpoints.close()
    if attempt.record is not None:
        attempt.record.close()
        every = job.context.training.permanent_every
        kept = [
            str(step_folder(Path(CHECKPOINTS), step))
            for step in complete_steps(job.context.work / CHECKPOINTS)
            if every is not None and step % every == 0
        ]
        write_json(job.context.work / "kept.json", kept)
    summary: TrainingSummary = {
        "steps": progress.step,
        "tokens": progress.tokens,
        "skipped_steps": progress.skipped,
        "rows_digest": progress.digest,
        "stopped_early": stopped_early,
        "peak_memory_bytes": peak_memory_bytes(job.world.device, job.world),
    }
    stopped = progress.stopped
    if stopped is not None and attempt.callbacks.asked_for(stopped):
        summary["stopped_by"] = {
            "callback": stopped["callback"],
            "step": stopped["step"],
            "reason": stopped["reason"],
        }
    return attempt.record, summary


def _train_steps(attempt: Attempt, collect_garbage: Callable[[int], None]) -> bool:
    """Train to the last step; returns True if the training ends early."""
    job = attempt.job
    progress = attempt.progress

    def read(step: int) -> Batch:
        return read_batch(
            job.learner.objective,
            job.plan,
            step,
            job.section.micro_batch_size,
            job.world.data_rank,
            job.world.data_size,
        )

    depth = job.context.training.stream.read_ahead_steps
    with closing(
        ReadAhead(read, job.section.steps, depth, job.reading_threads)
    ) as batches:
        while progress.step < job.section.steps:
            batch = batches.take(progress.step)
            job.observers.before_step(progress.step)
            step = progress.step + 1
            phase = describe_phase(job, step)
            if phase is not None and attempt.record is not None:
                attempt.record.metrics(step, {"phase": phase})
            step_flags, metrics = one_step(attempt, batch, batches)
            attempt.profiler.after(progress.step)
            collect_garbage(progress.step)
            _tell(
                attempt,
                "after_step",
                partial(metrics_of_step, job, progress, step_flags, metrics),
            )
            _validate(attempt)
            if _has_stopped(attempt):
                # The training can be continued after the callback that ended it.
                if progress.stopped is not None and progress.step < job.section.steps:
                    _save(attempt)
                return True
            if progress.step % LOOK_EVERY_STEPS == 0:
                attempt.look()
            stopping = attempt.stop.is_due()
            is_due = progress.step % job.context.training.checkpoint_every == 0
            if progress.step < job.section.steps and (stopping or is_due):
                _save(attempt)
            if stopping:
                attempt.checkpoints.close()
                if job.world.is_first:
                    job.context.progress(
                        progress.step,
                        job.section.steps,
                        "steps",
                        tokens=progress.tokens,
                    )
                raise StoppedError(f"asked to stop after step {progress.step}")
    return False


def _validate(attempt: Attempt) -> None:
    """Log the result of `after_step`, and update the state of early stopping."""
    job = attempt.job
    progress = attempt.progress
    if progress.stopped is not None:
        return
    metrics = job.observers.after_step(progress.step)
    if metrics is None:
        return
    if attempt.record is not None:
        attempt.record.metrics(progress.step, metrics)
    loss = held_out_loss(metrics)
    if job.early_stopping is not None and loss is not None:
        progress.best, progress.stale = no_longer_improves(
            progress.best, progress.stale, loss, job.early_stopping.min_delta
        )
    _tell(attempt, "after_validation", lambda: {"validation_loss": loss, **metrics})


def _has_stopped(attempt: Attempt) -> bool:
    """Return True if early stopping or a callback ended the training."""
    early_stopping = attempt.job.early_stopping
    progress = attempt.progress
    return attempt.callbacks.asked_for(progress.stopped) or (
        early_stopping is not None and progress.stale >= early_stopping.patience
    )


def _tell(
    attempt: Attempt, event: CallbackEvent, metrics: Callable[[], Metrics]
) -> None:
    """Notify callbacks of an event after the current step, which may end the
    training.
    """
    job = attempt.job
    progress = attempt.progress
    step = progress.step
    steps = job.section.steps
    stopped = attempt.callbacks.tell(
        event, step, lambda: {"step": step, "steps": steps, **metrics()}
    )
    if stopped is None:
        return
    progress.stopped = stopped
    job.context.warn(
        f"{job.context.stage}: {stopped['callback']} ended the training after step "
        f"{stopped['step']} of {steps}: {stopped['reason']}"
    )


def _save(attempt: Attempt) -> None:
    """Save a checkpoint; `on_checkpoint` callbacks run once it is complete."""
    attempt.look()
    attempt.save()
    if attempt.callbacks.wants("on_checkpoint"):
        attempt.checkpoints.join()
        step = attempt.progress.step
        folder = attempt.checkpoints.folder
        _tell(
            attempt, "on_checkpoint", lambda: {"path": str(step_folder(folder, step))}
        )


@contextmanager
def collecting_between_steps() -> Iterator[Callable[[int], None]]:
    """Replace automatic garbage collection by a yielded function of the step, which
    collects if due; restored on exit.

    Objects that exist at the start are frozen, which makes each collection short.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield _collect_where_due
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _collect_where_due(step: int) -> None:
    if step % COLLECT_EVERY_STEPS == 0:
        gc.collect()
