"""Rows that a training stage reads, step by step, trained or not, derived from its
settings and its data.

No log is needed: the order is a function of the data, the seed and the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gristmill.core.files import read_json
from gristmill.core.store import StageFolder
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.report.facts import training
from gristmill.flows.report.stage_summaries import MetricsLine
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX, PRETRAIN, STAGES
from gristmill.mixtures.schema.pretrain import Training, TrainingInEpochs
from gristmill.mixtures.schema.rl import Rl
from gristmill.tokenize.packed import PackedSet
from gristmill.tokenize.shuffle import Order
from gristmill.train.loop.batch_plan import RowPlan, plan_of
from gristmill.train.rl.prompts import PromptPlan, prompt_plan_of
from gristmill.train.rl.rollout_tables import AnswerRow, read_batch

ID_LISTS = EXAMPLE_IDS, PROMPT_IDS = "examples.txt", "prompts.txt"
"""Lists of the examples of each row (fine-tuning), and of prompts (reinforcement
learning).
"""
ROWS_PER_SET = "rows-per-set.json"
"""Number of rows of each set, from which their order follows."""
Use = Literal["read", "will read"]
"""`read` if a step has been trained."""


class TraceError(LookupError):
    """The step, document or training does not exist, or its data is not made yet."""


@dataclass(frozen=True)
class KeptOrder:
    """Recorded prompts of a training with a curriculum, whose future prompts are
    unknown.

    Attributes:
        numbers: prompt numbers, int64, in the order in which they were used.
    """

    numbers: np.ndarray

    def span(self, first: int, count: int) -> np.ndarray:
        """Return consecutive prompts, (count,); see `rows`."""
        return self.rows(np.arange(first, first + count))

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Return the prompts at some positions, (n,).

        Raises:
            TraceError: a position lies beyond the recorded ones.
        """
        if len(positions) and int(positions.max()) >= len(self.numbers):
            raise TraceError(
                "rl.curriculum is set: the prompts of a step follow from the pass "
                "rates of earlier ones, and are known once it has run"
            )
        numbers: np.ndarray = self.numbers[positions]
        return numbers


@dataclass(frozen=True)
class Reading:
    """A training stage and its reading order.

    Attributes:
        stage: its name.
        folder: the stage's output, finished or not.
        section: its settings.
        plan: positions of each step.
        order: row at each position; in reinforcement learning, the prompt.
        packed: packed set of the rows, in pre-training.
        examples: ids of the examples of each row, in fine-tuning; of each prompt, in
            reinforcement learning.
    """

    stage: str
    folder: StageFolder
    section: Training
    plan: RowPlan | PromptPlan
    order: Order | KeptOrder
    packed: PackedSet | None = None
    examples: tuple[tuple[str, ...], ...] = ()

    def rows(self, step: int) -> np.ndarray:
        """Return the rows (int64, shape (B,)) of a step, counted from 1.

        Raises:
            TraceError: the step does not exist.
        """
        if not 1 <= step <= self.section.steps:
            raise TraceError(
                f"{self.stage} has {self.section.steps} steps; there is no step "
                f"{step}; give 1 to {self.section.steps}"
            )
        return self.plan.rows(self.order, step - 1)

    def steps_that_read(self, rows: np.ndarray) -> dict[int, list[int]]:
        """Return step (counted from 1) -> the given rows that it reads, in step
        order.
        """
        if isinstance(self.order, KeptOrder):
            positions = np.flatnonzero(np.isin(self.order.numbers, rows))
            rows = self.order.numbers[positions]
        else:
            epochs = range(-(-self.plan.end(self.section.steps) // self.order.total))
            of_epochs = [self.order.positions(rows, epoch) for epoch in epochs]
            positions = np.array(of_epochs, np.int64).ravel()
            rows = np.tile(rows, len(epochs))
        rows_by_step: dict[int, list[int]] = defaultdict(list)
        for steps in np.atleast_2d(self.plan.steps_of(positions) + 1):
            for step, row in zip(steps.tolist(), rows.tolist(), strict=True):
                if step <= self.section.steps:
                    rows_by_step[step].append(row)
        return {step: sorted(rows_by_step[step]) for step in sorted(rows_by_step)}

    def steps_done(self) -> int:
        """Return the number of steps certainly trained, by the commit, the metrics or
        the checkpoints.
        """
        if self.folder.state() == "committed":
            return self.section.steps
        recorded = [line["step"] for line in self.metrics()]
        return max([0, *recorded, *self.checkpoints()])

    def checkpoints(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending."""
        # The marker is written last; loading a checkpoint verifies its files too.
        return sorted(
            int(path.parent.name.removeprefix("step-"))
            for path in (self.folder.work / "checkpoints").glob("step-*/complete.json")
        )

    def use(self, step: int, done: int) -> Use:
        """Return `read` if a step has been trained, else `will read`."""
        return "read" if step <= done else "will read"

    def metrics(self) -> list[MetricsLine]:
        """Return the metrics recorded so far; an empty list before training starts."""
        return training(self.folder)


def reading_of(session: Session, stage: str = PRETRAIN) -> Reading:
    """Return the reading order of a training stage of a manifest.

    Raises:
        TraceError: the manifest has no such stage, or its data does not exist yet.
    """
    if stage not in session.plan:
        raise TraceError(
            f"{session.manifest_file} has no `{stage}:` section, so it "
            "has no such steps"
        )
    node = session.plan[stage]
    folder = session.folder(stage)
    plan: RowPlan | PromptPlan
    order: Order | KeptOrder
    if node.stage.training is None:
        traced = [name for name, entry in STAGES.items() if entry.training is not None]
        raise TraceError(
            f"the steps of {stage} cannot be traced; those of {', '.join(traced)} can"
        )
    section = node.stage.training.model_validate(node.config)
    if node.stage.row_kind == "documents":
        inputs = committed_inputs(session)
        if MIX not in inputs:
            raise TraceError(
                "the mixture is not packed yet; run: "
                f"{session.command('run', '--until', MIX)}"
            )
        packed = PackedSet(inputs[MIX])
        plan = plan_of(section, packed.sequence_length)
        order = packed.order(section.key_seed)
        return Reading(stage, folder, section, plan, order, packed)
    ids = folder.data / (
        PROMPT_IDS if node.stage.row_kind == "prompts" else EXAMPLE_IDS
    )
    if not ids.exists():
        raise TraceError(
            f"the examples that {stage} reads are known once it has started; run: "
            f"{session.command('run', '--until', stage)}"
        )
    examples = tuple(tuple(line.split()) for line in ids.read_text().splitlines())
    if isinstance(section, Rl):
        order = _order_of_prompts(section, folder, [ids[0] for ids in examples])
        section = section.in_steps(len(examples))
        plan = prompt_plan_of(section)
    else:
        rows_per_set: list[int] = read_json(folder.data / ROWS_PER_SET)
        order = Order(rows_per_set, section.key_seed)
        if isinstance(section, TrainingInEpochs):
            section = section.in_steps(sum(rows_per_set))
        plan = plan_of(section, 0)
    return Reading(stage, folder, section, plan, order, examples=examples)


def _order_of_prompts(
    section: Rl, folder: StageFolder, ids: Sequence[str]
) -> Order | KeptOrder:
    """Return the order of the prompts: with a curriculum, that of the recorded
    answers.
    """
    if section.curriculum is None:
        return Order([len(ids)], section.key_seed)
    numbers = {id_: number for number, id_ in enumerate(ids)}
    prompts: list[int] = []
    for batch in range(-(-section.steps // section.updates_per_batch)):
        answers = read_batch([folder.data, folder.work], batch)
        if answers is None:
            break
        prompts += [numbers[answer["id"]] for answer in answers[:: section.group_size]]
    return KeptOrder(np.array(prompts, dtype=np.int64))


def answers_of_step(reading: Reading, step: int) -> list[AnswerRow]:
    """Return the answers to a step's prompts, grouped by prompt; an empty list before
    they are drawn.

    Args:
        reading: of the stage `rl`.
        step: counted from 1.

    Returns:
        rows of `train/rl/rollout_tables.py`.
    """
    section = reading.section
    assert isinstance(section, Rl)
    batch, within = divmod(step - 1, section.updates_per_batch)
    answers = read_batch([reading.folder.data, reading.folder.work], batch)
    if answers is None:
        return []
    first = within % section.steps_per_batch * section.global_batch_size
    return answers[first : first + section.global_batch_size]
