"""The training loop: one for all objectives. An objective says what to read and what the loss is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gristmill.dataprep.context import Context
from gristmill.mixtures.training import Training
from gristmill.tokenize.order import Order
from gristmill.train.loop.checkpoints import Checkpoints, Keeping
from gristmill.train.loop.record import Record
from gristmill.train.loop.spikes import empty_window, is_bad_step, remember_loss
from gristmill.train.loop.stopping import StoppedError, stop_requested
from gristmill.train.loop.stream import extend_digest, micro_batches, rows_in_step
from gristmill.train.loop.throughput import model_flops_utilisation
from gristmill.train.optim.clipping import clip_gradients
from gristmill.train.optim.optimizer import make_optimizers, update
from gristmill.train.optim.schedules import learning_rate
from gristmill.train.parallel.sharding import assert_sharded
from gristmill.train.parallel.world import World, any_rank, sum_over_ranks

CHECKPOINTS = "checkpoints"


class Objective(Protocol):
    """What a training optimises. Rows are numbers of rows, examples or pairs: whatever `order` orders."""

    order: Order
    fingerprint: str
    """Of what the rows hold: the same one, the same content under every number."""
    sums_length: int
    """Length of the vector that `loss` returns beside the loss."""
    flops_per_token: float
    """Model arithmetic per token that `num_tokens` counts."""

    def weight(self, rows: np.ndarray) -> float:
        """What the summed loss of these rows (a whole batch) is divided by: their trained tokens, or pairs."""

    def num_tokens(self, rows: np.ndarray) -> int:
        """Tokens that go through the model for these rows."""

    def loss(self, model: nn.Module, rows: np.ndarray, scale: float) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch (perhaps an empty one).

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

    def plain(self) -> dict[str, Any]:
        """The part of the state that is JSON."""
        return {"digest": self.digest, "tokens": self.tokens, "skipped": self.skipped}


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


def train(job: Job) -> tuple[Record | None, dict[str, Any]]:
    """Train from the newest checkpoint, or from the start, to the last step.

    Returns:
        the record (on the first rank), and a summary: steps, tokens, skipped steps, rows_digest.

    Raises:
        StoppedError: SIGTERM came; the state is saved.
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
        progress.digest, progress.tokens, progress.skipped = plain["digest"], plain["tokens"], plain["skipped"]
    record = Record(job.context.work, progress.step) if job.world.is_first else None
    clock = _Clock()
    while progress.step < job.section.steps:
        _one_step(job, optimizers, progress)
        _log(job, progress, record, clock)
        if (line := job.after_step(progress.step)) is not None and record is not None:
            record.metrics({"step": progress.step, **line})
        stopping = any_rank(stop_requested(), job.world)
        if progress.step < job.section.steps and (stopping or progress.step % job.context.checkpoint_every == 0):
            _look_at_flags(job, progress, record)
            checkpoints.save(progress.step, progress.tensors(), progress.plain())
        if stopping:
            checkpoints.close()
            raise StoppedError(f"asked to stop after step {progress.step}")
    checkpoints.close()
    if record is not None:
        record.close()
    return record, {"steps": progress.step, "tokens": progress.tokens, "skipped_steps": progress.skipped,
                    "rows_digest": progress.digest}


def _one_step(job: Job, optimizers: Sequence[torch.optim.Optimizer], progress: Progress) -> None:
    """Read a batch, compute its gradients, and update the weights unless the step is a bad one."""
    section, objective, world = job.section, job.objective, job.world
    rows = rows_in_step(objective.order, progress.step, section.global_batch_size)
    weight = objective.weight(rows)
    sums = accumulate_gradients(job.model, objective, rows, weight, section.micro_batch_size, world)
    norm = clip_gradients(job.model, section.optimizer)
    loss = (sums[0] / weight).float()
    bad = is_bad_step(loss, norm, progress.window, section.spike_sigma)
    progress.step += 1
    update(optimizers, scheduled_rate(job, progress.step), bad)
    remember_loss(progress.window, loss, progress.step)
    progress.sums += torch.where(bad, 0.0, torch.cat((sums.new_tensor([weight]), sums)))
    progress.flags.append((progress.step, bad, loss, norm))
    progress.digest = extend_digest(progress.digest, rows)
    progress.tokens += objective.num_tokens(rows)


def scheduled_rate(job: Job, step: int) -> float:
    """The learning rate of a step, counted from 1; a warm-up in tokens goes by the first step's tokens."""
    section = job.section
    step_tokens = 0
    if section.schedule.warmup_tokens is not None:
        step_tokens = job.objective.num_tokens(rows_in_step(job.objective.order, 0, section.global_batch_size))
    return learning_rate(section.schedule, section.optimizer.learning_rate, step, section.steps, step_tokens)


def accumulate_gradients(
    model: nn.Module, objective: Objective, rows: np.ndarray, weight: float, micro_batch_size: int, world: World
) -> Tensor:
    """Gradients of a whole batch's mean loss, and its sums over all ranks.

    Every loss is divided by the weight of the whole batch, so that neither the cut into micro-batches nor uneven
    shares of the ranks matter. FSDP averages over ranks: that is undone by the factor world size.
    """
    scale = world.size / weight
    sums = torch.zeros(objective.sums_length, dtype=torch.float64, device=world.device)
    parts = micro_batches(rows, world.rank, world.size, micro_batch_size)
    for number, part in enumerate(parts):
        model.set_requires_gradient_sync(number == len(parts) - 1)  # type: ignore[operator]
        loss, measured = objective.loss(model, part, scale)
        loss.backward()
        sums += measured
    return sum_over_ranks(sums, world)


class _Clock:
    """Time and tokens since the last logged step of this attempt."""

    def __init__(self) -> None:
        self.restart(None)

    def restart(self, tokens: int | None) -> None:
        """Start measuring; `tokens` read so far (None: not known yet)."""
        self.started, self.tokens = time.perf_counter(), tokens

    def rate(self, tokens: int) -> float | None:
        """Tokens per second since the start."""
        return None if self.tokens is None else (tokens - self.tokens) / (time.perf_counter() - self.started)


def _log(job: Job, progress: Progress, record: Record | None, clock: _Clock) -> None:
    """On the first, the last and every `log_every`-th step: write a line, report progress."""
    section, step = job.section, progress.step
    if step not in (1, section.steps) and step % section.log_every:
        return
    norm = finite(progress.flags[-1][3])
    _look_at_flags(job, progress, record)
    weight, *sums = progress.sums.tolist()
    progress.sums.zero_()
    if record is None:
        return
    measured = job.objective.report(sums, weight) if weight > 0 else {}
    rate = clock.rate(progress.tokens)
    clock.restart(progress.tokens)
    speed = {} if rate is None else {"tokens_per_second": round(rate, 1), "mfu": model_flops_utilisation(
        rate, job.objective.flops_per_token, job.peak_flops, job.world.size)}
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
        rows = rows_in_step(job.objective.order, step - 1, job.section.global_batch_size)
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
