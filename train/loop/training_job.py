"""Job of the training loop: settings, objective and model, and the schedule derived
from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from gristmill.core.stage_context import Context
from gristmill.mixtures.schema.pretrain import EarlyStopping, Training, TrainingPhase
from gristmill.tokenize.packed import PackedPhase, PackedSet
from gristmill.train.distributed.process_groups import World
from gristmill.train.loop.batch_plan import RowPlan, plan_of
from gristmill.train.loop.loop_state import Part
from gristmill.train.loop.objective import Metrics, Objective
from gristmill.train.loop.prefetch import READING_THREADS
from gristmill.train.loop.spike_report import Decode, Known
from gristmill.train.loop.throughput import Utilisation
from gristmill.train.optim.averaging import AveragedWeights
from gristmill.train.optim.schedules import learning_rate

Measure = Callable[[int], Metrics | None]
"""Function from a step, counted from 1, to its metrics, called on every rank; None if
nothing is measured after that step.
"""


@dataclass(frozen=True)
class Learner:
    """Model that a training changes, and the objective that it minimises.

    Attributes:
        objective: rows and loss.
        model: sharded.
        average: running mean of the weights, if enabled.
        state: further state for checkpoints, by name.
    """

    objective: Objective
    model: nn.Module
    average: AveragedWeights | None = None
    state: Mapping[str, Part] = field(default_factory=dict)


@dataclass(frozen=True)
class Observers:
    """Functions that a training calls.

    Attributes:
        before_step: called on every rank with the steps done, before the next step.
        after_step: called on every rank after each step; its result is logged as a line
            of that step.
        decode: from token ids to text, for loss-spike reports.
        known: from document ids to their origin and quality, for loss-spike reports.
    """

    before_step: Callable[[int], None] = lambda step: None
    after_step: Measure = lambda step: None
    decode: Decode | None = None
    known: Known | None = None


UNOBSERVED = Observers()


@dataclass(frozen=True)
class Job:
    """Inputs of the training loop.

    Attributes:
        section: steps, batch sizes, optimizer, schedule.
        learner: model and objective.
        world: the processes.
        context: working folder, checkpoint policy, progress reports.
        observers: functions to call.
        packed: set of a pre-training, whose phases it follows.
        reading_threads: see prefetch.reading_threads.
        utilisation: speed that the training is compared with.
    """

    section: Training
    learner: Learner
    world: World
    context: Context
    observers: Observers = UNOBSERVED
    packed: PackedSet | None = None
    reading_threads: int = READING_THREADS
    utilisation: Utilisation = field(default_factory=Utilisation)

    @cached_property
    def plan(self) -> RowPlan:
        """Positions of each step."""
        return plan_of(
            self.section,
            self.learner.objective.sequence_length,
            () if self.packed is None else self.packed.phase_ends(),
        )

    @cached_property
    def set_phases(self) -> Sequence[PackedPhase]:
        """See PackedSet.described_phases."""
        return () if self.packed is None else self.packed.described_phases()

    @cached_property
    def phase_begins(self) -> dict[int, int]:
        """First step, counted from 0, of each phase of the set -> number of the phase,
        from 0.
        """
        return {
            self.plan.first_step(phase.begin): number
            for number, phase in enumerate(self.set_phases)
        }

    def phase_of(self, step: int) -> TrainingPhase | None:
        """Settings of the phase of a step, counted from 0; None without phases."""
        phases: Sequence[TrainingPhase] = getattr(self.section, "phases", ())
        return phases[self.plan.phase_of(step)] if phases else None

    @cached_property
    def early_stopping(self) -> EarlyStopping | None:
        """Criterion for ending before the last step."""
        return getattr(self.section, "early_stopping", None)


def scheduled_rate(job: Job, step: int) -> float:
    """Learning rate of a step, counted from 1."""
    section = job.section
    phase = job.phase_of(step - 1)
    rate = learning_rate(
        section.schedule,
        section.optimizer.learning_rate,
        step,
        section.steps,
    )
    return rate if phase is None else rate * phase.learning_rate_scale


def describe_phase(job: Job, step: int) -> Metrics | None:
    """Number, shares and settings of the phase that begins with a step, counted from 1;
    None if none does.
    """
    number = job.phase_begins.get(step - 1)
    if number is None:
        return None
    settings = job.phase_of(step - 1)
    return {
        "number": number + 1,
        "of": len(job.set_phases),
        "shares": job.set_phases[number].shares,
        **({} if settings is None else settings.model_dump(exclude_none=True)),
    }


def warn_of_long_warmup(job: Job) -> None:
    """Warn if the learning rate rises for most of the training."""
    schedule = job.section.schedule
    steps = job.section.steps
    if schedule.use is not None:
        return
    warmup = min(schedule.warmup_of(steps), steps)
    if 2 * warmup > steps:
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
