"""The training loop: one for all objectives. An objective says what to read and what the loss is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.dataprep.context import Context
from gristmill.mixtures.training import Training
from gristmill.tokenize.order import Order
from gristmill.tokenize.streaming.ahead import ReadAhead
from gristmill.train.loop.batches import Batch, batches_ahead
from gristmill.train.loop.checkpoints import Checkpoints, Keeping
from gristmill.train.loop.record import Record
from gristmill.train.loop.spikes import empty_window, is_bad_step, remember_loss
from gristmill.train.loop.stopping import StoppedError, stop_requested
from gristmill.train.loop.stream import Plan, extend_digest, plan_of
from gristmill.train.loop.throughput import model_flops_utilisation
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.optimizer import make_optimizers, update
from gristmill.train.optim.schedules import learning_rate
from gristmill.train.parallel.sharding import assert_sharded
from gristmill.train.parallel.world import World, any_rank, max_over_ranks, sum_over_ranks

CHECKPOINTS = "checkpoints"


class OtherRowsError(RuntimeError):
    """A checkpoint was made with other rows than there are now."""


class Objective(Protocol):
    """What a training optimises. Rows are numbers of rows, examples or pairs: whatever `order` orders."""

    order: Order
    fingerprint: str
    """Of what the rows hold: the same one, the same content under every number."""
    sums_length: int
    """Length of the vector that `loss` returns beside the loss."""
    flops_per_token: float
    """Model arithmetic per token that `num_tokens` counts."""
    sequence_length: int
    """Tokens of the longest row."""

    def weight(self, rows: np.ndarray, cuts: int = 1) -> float:
        """What the summed loss of these rows (a whole batch) is divided by: their trained tokens, or pairs.

        `cuts`: into how many shorter rows each row is cut (1 wherever there is no ramp of lengths).
        """

    def num_tokens(self, rows: np.ndarray) -> int:
        """Tokens that go through the model for these rows."""

    def prepare(self, rows: np.ndarray, cuts: int = 1) -> Any:
        """Read the rows of a micro-batch (perhaps an empty one) into host memory, as `loss` wants them.

        Called ahead of time in a thread, so it touches neither the model nor the device; on a machine with a GPU its
        tensors are pinned.
        """

    def loss(self, model: nn.Module, batch: Any, scale: float) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch, from what `prepare` made of its rows.

        Returns:
            `scale` times the summed loss, to call backward on, and a float64 vector of sums on the device, whose
            first entry is the plain summed loss. They are added up over micro-batches, ranks and logged steps.
        """

    def report(self, sums: Sequence[float], weight: float) -> dict[str, Any]:
        """Metrics from the sums of some steps, and the sum of their weights (positive)."""

    def describe(self, rows: np.ndarray) -> dict[str, Any]:
        """Names what a step read, for the record of skipped steps."""


@dataclass
class Progress:
    """The loop's own state. The tensors are on the device and the same on every rank.

    Attributes:
        step: optimizer steps done, skipped ones included.
        digest: rolling hash of what was read, see stream.extend_digest.
        tokens: tokens read.
        skipped: updates that did not happen, up to the last look at the device.
        window: see spikes.empty_window.
        sums: since the last logged step, without skipped steps: weight, then the objective's sums.
        flags: (step, bad, loss, gradient norm) of the steps since the last look at the device.
    """

    window: Tensor
    sums: Tensor
    digest: str
    step: int = 0
    tokens: int = 0
    skipped: int = 0
    flags: list[tuple[int, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def tensors(self) -> dict[str, Tensor]:
        """The part of the state that lies on the device."""
        return {"window": self.window, "sums": self.sums}

    def plain(self, fingerprint: str) -> dict[str, Any]:
        """The part of the state that is JSON, with the name of what the rows are of."""
        return {"digest": self.digest, "tokens": self.tokens, "skipped": self.skipped, "rows_of": fingerprint}


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
        after_step: called on every rank after each step; what it returns is logged as a line of that step.
    """

    section: Training
    objective: Objective
    model: nn.Module
    world: World
    context: Context
    peak_flops: float | None = None
    after_step: Callable[[int], dict[str, Any] | None] = lambda step: None

    @cached_property
    def plan(self) -> Plan:
        """Which positions each step reads."""
        return plan_of(self.section, self.objective.sequence_length)


def train(job: Job) -> tuple[Record | None, dict[str, Any]]:
    """Train from the newest checkpoint, or from the start, to the last step.

    Returns:
        the record (on the first rank), and a summary: steps, tokens, skipped steps, rows_digest.

    Raises:
        StoppedError: SIGTERM came; the state is saved.
        OtherRowsError: the newest checkpoint has read other rows than there are.
    """
    assert_sharded(job.model)
    optimizers = make_optimizers(job.model, job.section.optimizer)
    device = job.world.device
    progress = Progress(empty_window(device), torch.zeros(1 + job.objective.sums_length, dtype=torch.float64,
                                                          device=device), job.objective.fingerprint)
    checkpoints = Checkpoints(job.context.work / CHECKPOINTS, job.model, optimizers, job.world,
                              Keeping(job.context.keep_checkpoints, job.context.permanent_every), job.context.warn)
    found = checkpoints.load_newest(progress.tensors())
    if found is not None:
        progress.step, plain = found
        check_rows(plain.get("rows_of"), job.objective.fingerprint, job.context.work / CHECKPOINTS)
        progress.digest, progress.tokens, progress.skipped = plain["digest"], plain["tokens"], plain["skipped"]
    record = Record(job.context.work, progress.step) if job.world.is_first else None
    clock = _Clock()
    with closing(batches_ahead(job.objective, job.plan, job.section.steps, job.section.micro_batch_size, job.world,
                               job.context.stream.read_ahead_steps)) as batches:
        while progress.step < job.section.steps:
            _one_step(job, optimizers, progress, batches.take(progress.step))
            _log(job, progress, record, clock, batches)
            if (line := job.after_step(progress.step)) is not None and record is not None:
                record.metrics({"step": progress.step, **line})
            stopping = any_rank(stop_requested(), job.world)
            if progress.step < job.section.steps and (stopping or progress.step % job.context.checkpoint_every == 0):
                _look_at_flags(job, progress, record)
                checkpoints.save(progress.step, progress.tensors(), progress.plain(job.objective.fingerprint))
            if stopping:
                checkpoints.close()
                raise StoppedError(f"asked to stop after step {progress.step}")
    checkpoints.close()
    if record is not None:
        record.close()
    return record, {"steps": progress.step, "tokens": progress.tokens, "skipped_steps": progress.skipped,
                    "rows_digest": progress.digest}


def check_rows(saved: str | None, now: str, folder: Path) -> None:
    """Refuse to go on with other rows than those that a checkpoint has read.

    Raises:
        OtherRowsError: names both sets of rows.
    """
    if saved != now:
        raise OtherRowsError(
            f"{folder}: the checkpoint there has read rows of {saved}, but the rows now are of {now}: going on would "
            "skip some and repeat others; give back the data that it began with, or delete the folder and train anew")


def _one_step(job: Job, optimizers: Sequence[torch.optim.Optimizer], progress: Progress, batch: Batch) -> None:
    """Compute a batch's gradients, and update the weights unless the step is a bad one."""
    section, weight = job.section, batch.weight
    sums = accumulate_gradients(job.model, job.objective, batch.parts, weight, job.world)
    norm = clip_gradients(job.model, section.optimizer)
    loss = (sums[0] / weight).float()
    bad = is_bad_step(loss, norm, progress.window, section.spike_sigma)
    progress.step += 1
    update(optimizers, scheduled_rate(job, progress.step), bad)
    remember_loss(progress.window, loss, progress.step)
    progress.sums += torch.where(bad, 0.0, torch.cat((sums.new_tensor([weight]), sums)))
    progress.flags.append((progress.step, bad, loss, norm))
    progress.digest = extend_digest(progress.digest, batch.rows)
    progress.tokens += job.objective.num_tokens(batch.rows)


def scheduled_rate(job: Job, step: int) -> float:
    """The learning rate of a step, counted from 1; a warm-up in tokens goes by the first step's tokens."""
    section = job.section
    step_tokens = 0
    if section.schedule.warmup_tokens is not None:
        step_tokens = job.objective.num_tokens(job.plan.rows(job.objective.order, 0))
    return learning_rate(section.schedule, section.optimizer.learning_rate, step, section.steps, step_tokens)


def accumulate_gradients(
    model: nn.Module, objective: Objective, parts: Sequence[Any], weight: float, world: World
) -> Tensor:
    """Gradients of a whole batch's mean loss, and its sums over all ranks; `parts` as in batches.Batch.

    Every loss is divided by the weight of the whole batch, so that neither the cut into micro-batches nor uneven
    shares of the ranks matter. FSDP averages over ranks: that is undone by the number of shares.
    """
    scale = world.data_size / weight
    sums = torch.zeros(objective.sums_length, dtype=torch.float64, device=world.device)
    for number, part in enumerate(parts):
        model.set_requires_gradient_sync(number == len(parts) - 1)  # type: ignore[operator]
        loss, measured = objective.loss(model, part, scale)
        loss.backward()
        sums += measured
    return sum_over_ranks(sums, world)


class _Clock:
    """Time, tokens and waiting since the last logged step of this attempt."""

    def __init__(self) -> None:
        self.restart(None, 0, 0.0)

    def restart(self, tokens: int | None, step: int, waited_seconds: float) -> None:
        """Start measuring; what was read and waited for so far (tokens None: not known yet)."""
        self.started, self.tokens, self.step, self.waited_seconds = time.perf_counter(), tokens, step, waited_seconds

    def rate(self, tokens: int) -> float | None:
        """Tokens per second since the start."""
        return None if self.tokens is None else (tokens - self.tokens) / (time.perf_counter() - self.started)

    def data_wait(self, step: int, waited_seconds: float, world: World) -> dict[str, float]:
        """How long a step waited for its batch on the slowest rank: seconds, and as a share of the step's time.

        A mean over the steps since the start; every rank calls this together.
        """
        if self.tokens is None:
            return {}
        waited = max_over_ranks(waited_seconds - self.waited_seconds, world)
        return {"data_wait_seconds": round(waited / (step - self.step), 6),
                "data_wait_share": round(waited / (time.perf_counter() - self.started), 6)}


def _log(
    job: Job, progress: Progress, record: Record | None, clock: _Clock, batches: ReadAhead[Batch]
) -> None:
    """On the first, the last and every `log_every`-th step: write a line, report progress."""
    section, step = job.section, progress.step
    if step not in (1, section.steps) and step % section.log_every:
        return
    norm = finite(progress.flags[-1][3])
    _look_at_flags(job, progress, record)
    weight, *sums = progress.sums.tolist()
    progress.sums.zero_()
    waiting, rate = clock.data_wait(step, batches.waited_seconds, job.world), clock.rate(progress.tokens)
    clock.restart(progress.tokens, step, batches.waited_seconds)
    if record is None:
        return
    measured = job.objective.report(sums, weight) if weight > 0 else {}
    speed = {} if rate is None else {"tokens_per_second": round(rate, 1), "mfu": model_flops_utilisation(
        rate, job.objective.flops_per_token, job.peak_flops, job.world.size), **waiting}
    record.metrics({
        "step": step, **measured, "grad_norm": norm,
        "learning_rate": scheduled_rate(job, step),
        "tokens": progress.tokens, "skipped_steps": progress.skipped, "rows_digest": progress.digest, **speed,
    })
    extra = {name: value for name, value in (("loss", measured.get("loss")), ("tokens_per_second", rate))
             if value is not None}
    job.context.progress(step, section.steps, "steps", **extra)


def _look_at_flags(job: Job, progress: Progress, record: Record | None) -> None:
    """Ask the device which steps were skipped, and write down what they had read."""
    for step, bad, loss, norm in progress.flags:
        if not bool(bad):
            continue
        progress.skipped += 1
        rows = job.plan.rows(job.objective.order, step - 1)
        if record is not None:
            record.skipped({"step": step, "loss": finite(loss), "grad_norm": finite(norm),
                            "rows": rows.tolist(), **job.objective.describe(rows)})
            job.context.warn(f"step {step} was skipped: loss {float(loss):.4g}, gradient norm {float(norm):.4g}; "
                             "what it read is in skipped_steps.jsonl")
    progress.flags.clear()


def finite(value: Tensor) -> float | None:
    """A number that JSON can hold."""
    number = float(value)
    return number if math.isfinite(number) else None
