"""What a training is made of, and what its steps are due."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from gristmill.dataprep.context import Context
from gristmill.mixtures.training import EarlyStopping, Training, TrainingPhase
from gristmill.tokenize.mixing.continued import SetBefore
from gristmill.train.loop.bad_steps import Decode, Known
from gristmill.train.loop.objective import Objective
from gristmill.train.loop.prefetch import READING_THREADS
from gristmill.train.loop.row_plan import RowPlan, plan_of
from gristmill.train.loop.state import Part
from gristmill.train.optim.averaging import AveragedWeights
from gristmill.train.optim.ewc import ElasticWeights
from gristmill.train.optim.schedules import learning_rate, warmup_steps
from gristmill.train.parallel.world import World


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
        decode: from token ids to text, for loss-spike reports.
        known: from the ids of documents to what the stages before know of each, for loss-spike reports.
        elastic: what pulls the weights back to where they were, if anything does.
        before_step: called on every rank with the steps done and the rows that the next one reads, before its
            gradients.
        state: further state that lies in checkpoints, by name.
        reading_threads: see batches.reading_threads.
        phases: of the set that is read, see PackedSet.described_phases.
        phase_ends: the positions at which the phases of the section end.
        sets_before: the sets that the one which is read continues.
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
    phases: Sequence[Mapping[str, Any]] = ()
    phase_ends: Sequence[int] = ()
    sets_before: Sequence[SetBefore] = ()

    @cached_property
    def plan(self) -> RowPlan:
        """Which positions each step reads, as long as the training does not go back."""
        return plan_of(self.section, self.objective.sequence_length, self.phase_ends)

    @cached_property
    def first_steps(self) -> list[int]:
        """The first step, counted from 0, of each phase of the set."""
        return [self.plan.first_step(phase["begin"]) for phase in self.phases]

    def phase_of(self, step: int) -> TrainingPhase | None:
        """What the section says of the phase of a step, counted from 0; None where it has no phases."""
        phases: Sequence[TrainingPhase] = getattr(self.section, "phases", ())
        return phases[self.plan.phase_of(step)] if phases else None

    @cached_property
    def early_stopping(self) -> EarlyStopping | None:
        """When to end before the last step."""
        return getattr(self.section, "early_stopping", None)


def scheduled_rate(job: Job, step: int) -> float:
    """The learning rate of a step, counted from 1; a warm-up in tokens goes by the first step's tokens."""
    section, phase = job.section, job.phase_of(step - 1)
    rate = learning_rate(section.schedule, section.optimizer.learning_rate, step, section.steps, _step_tokens(job))
    return rate if phase is None else rate * phase.learning_rate_scale


def describe_phase(job: Job, step: int) -> dict[str, Any] | None:
    """The line of metrics for a step, counted from 1, where it begins a phase of the set: which one, and its shares."""
    number = max((place for place, first in enumerate(job.first_steps) if first == step - 1), default=None)
    if number is None:
        return None
    shares, told = job.phases[number]["shares"], job.phase_of(step - 1)
    return {
        "step": step,
        "phase": {
            "number": number + 1,
            "of": len(job.phases),
            "shares": dict(shares),
            **({} if told is None else told.model_dump(exclude_none=True)),
        },
    }


def _step_tokens(job: Job) -> int:
    """Tokens of the first step, where the warm-up is given in tokens."""
    if job.section.schedule.warmup_tokens is None:
        return 0
    return job.objective.num_tokens(job.plan.rows(job.objective.order, 0))


def warn_of_long_warmup(job: Job) -> None:
    """Tell of a learning rate that rises for most of the training."""
    schedule, steps = job.section.schedule, job.section.steps
    if schedule.use is not None:
        return
    rising = min(warmup_steps(schedule, steps, _step_tokens(job)), steps)
    if schedule.kind != "one_cycle" and 2 * rising > steps:
        job.context.warn(
            f"{job.context.stage}: the learning rate rises for {rising} of the {steps} steps "
            f"({job.context.stage}.schedule), and is at its peak for few of them or none; shorten the "
            "warm-up, or train for longer"
        )


def is_logged(section: Training, step: int) -> bool:
    """Whether a step, counted from 1, gets a line: the first, the last and every `log_every`-th one."""
    return step in (1, section.steps) or step % section.log_every == 0
