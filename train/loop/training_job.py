"""Job of the training loop: settings, objective and model, and the schedule derived
from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from gristmill.core.stage_context import Context
from gristmill.mixtures.training import EarlyStopping, Training, TrainingPhase
from gristmill.tokenize.mixing.continue_mixture import SetBefore
from gristmill.tokenize.packed import PackedPhase
from gristmill.train.loop.bad_steps import Decode, Known
from gristmill.train.loop.batch_plan import RowPlan, plan_of
from gristmill.train.loop.loop_state import Part
from gristmill.train.loop.objective import Objective
from gristmill.train.loop.prefetch import READING_THREADS
from gristmill.train.optim.averaging import AveragedWeights
from gristmill.train.optim.ewc import ElasticWeights
from gristmill.train.optim.schedules import learning_rate, warmup_steps
from gristmill.train.parallel.process_groups import World


@dataclass(frozen=True)
class Job:
    """Inputs of the training loop.

    Attributes:
        section: steps, batch sizes, optimizer, schedule.
        objective: data and loss.
        model: sharded.
        world: the processes.
        context: working folder, checkpoint policy, progress reports.
        peak_flops: of one device, if known.
        causal_share: share of the objective's FLOPs that remains if masked attention is
            not counted.
        after_step: called on every rank after each step; its result is logged as a line
            of that step.
        average: running mean of the weights, if enabled.
        decode: from token ids to text, for loss-spike reports.
        known: from document ids to their origin and quality, for loss-spike reports.
        elastic: penalty on moving weights away from their start, if enabled.
        before_step: called on every rank with the steps done and the rows of the next
            step, before its gradients.
        state: further state for checkpoints, by name.
        reading_threads: see prefetch.reading_threads.
        phases: of the packed set, see PackedSet.described_phases.
        phase_ends: positions at which the phases of the section end.
        sets_before: sets that the packed set continues.
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
    known: Known | None = None
    elastic: ElasticWeights | None = None
    before_step: Callable[[int, np.ndarray], None] = lambda step, rows: None
    state: Mapping[str, Part] = field(default_factory=dict)
    reading_threads: int = READING_THREADS
    phases: Sequence[PackedPhase] = ()
    phase_ends: Sequence[int] = ()
    sets_before: Sequence[SetBefore] = ()

    @cached_property
    def plan(self) -> RowPlan:
        """Positions of each step, without rollbacks."""
        return plan_of(self.section, self.objective.sequence_length, self.phase_ends)

    @cached_property
    def first_steps(self) -> list[int]:
        """First step, counted from 0, of each phase of the set."""
        return [self.plan.first_step(phase.begin) for phase in self.phases]

    def phase_of(self, step: int) -> TrainingPhase | None:
        """Settings of the phase of a step, counted from 0; None without phases."""
        phases: Sequence[TrainingPhase] = getattr(self.section, "phases", ())
        return phases[self.plan.phase_of(step)] if phases else None

    @cached_property
    def early_stopping(self) -> EarlyStopping | None:
        """Criterion for ending before the last step."""
        return getattr(self.section, "early_stopping", None)


def scheduled_rate(job: Job, step: int) -> float:
    """Learning rate of a step, counted from 1. A warm-up in tokens assumes the first
    step's tokens per step.
    """
    section, phase = job.section, job.phase_of(step - 1)
    rate = learning_rate(
        section.schedule,
        section.optimizer.learning_rate,
        step,
        section.steps,
        _step_tokens(job),
    )
    return rate if phase is None else rate * phase.learning_rate_scale


def describe_phase(job: Job, step: int) -> dict[str, Any] | None:
    """Line of metrics for a step, counted from 1, that begins a phase: its number,
    shares and settings; else None.
    """
    number = max(
        (index for index, first in enumerate(job.first_steps) if first == step - 1),
        default=None,
    )
    if number is None:
        return None
    shares, settings = job.phases[number].shares, job.phase_of(step - 1)
    return {
        "step": step,
        "phase": {
            "number": number + 1,
            "of": len(job.phases),
            "shares": shares,
            **({} if settings is None else settings.model_dump(exclude_none=True)),
        },
    }


def _step_tokens(job: Job) -> int:
    """Tokens of the first step if the warm-up is given in tokens, else 0."""
    if job.section.schedule.warmup_tokens is None:
        return 0
    return job.objective.num_tokens(job.plan.rows(job.objective.order, 0))


def warn_of_long_warmup(job: Job) -> None:
    """Warn if the learning rate rises for most of the training."""
    schedule, steps = job.section.schedule, job.section.steps
    if schedule.use is not None:
        return
    warmup = min(warmup_steps(schedule, steps, _step_tokens(job)), steps)
    if schedule.kind != "one_cycle" and 2 * warmup > steps:
        job.context.warn(
            f"{job.context.stage}: the learning rate rises for {warmup} of the {steps} "
            f"steps ({job.context.stage}.schedule), and is at its peak for few of them "
            "or none; shorten the warm-up, or train for longer"
        )


def is_logged(section: Training, step: int) -> bool:
    """Return True for steps (counted from 1) that are logged: the first, the last and
    every `log_every`-th.
    """
    return step in (1, section.steps) or step % section.log_every == 0
