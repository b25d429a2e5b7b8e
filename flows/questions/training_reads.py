"""What a training stage reads, step by step, whether it has been trained or not: from its settings and its data alone.

No log is kept of it, and none is needed: the order is a function of the data, the seed and the step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gristmill.core.files import read_json
from gristmill.core.stage_context import read_inputs
from gristmill.core.store import StageFolder
from gristmill.flows.questions.find_documents import committed_inputs
from gristmill.flows.running.session import Session
from gristmill.flows.stages.registry import MIX, PRETRAIN, STAGES
from gristmill.mixtures.reinforcement import Rl
from gristmill.mixtures.training import Pretrain, Training, TrainingInEpochs
from gristmill.tokenize.order import Order
from gristmill.tokenize.packed import PackedSet
from gristmill.train.loop.batch_plan import RowPlan, plan_of
from gristmill.train.loop.rollback import plan_after, read_rollbacks
from gristmill.train.reinforcement.prompts import PromptPlan, prompt_plan_of
from gristmill.train.reinforcement.rollout_tables import read_batch

EXAMPLE_IDS, PROMPT_IDS = "examples.txt", "prompts.txt"
"""What a fine-tuning stage calls the list of its examples, row by row, and reinforcement learning that of its
prompts."""
ROWS_PER_SET = "rows-per-set.json"
"""Beside it: how many of the rows are of each set, of which their order is made."""
Use = Literal["read", "will read"]


class TraceError(LookupError):
    """There is no such step, document or training, or what it reads is not made yet."""


@dataclass(frozen=True)
class KeptOrder:
    """The prompts that a training with a curriculum has asked so far: which it will ask, it does not know itself.

    Attributes:
        numbers: of the prompts, int64, in the order in which they were asked.
    """

    numbers: np.ndarray

    def span(self, first: int, count: int) -> np.ndarray:
        """Some of them that follow each other, (count,); see `rows`."""
        return self.rows(np.arange(first, first + count))

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Those at some places, (n,).

        Raises:
            TraceError: they were not asked yet.
        """
        if len(positions) and int(positions.max()) >= len(self.numbers):
            raise TraceError(
                "rl.curriculum is set: which prompts a step asks follows from the pass rates of those "
                "before it, and is known once it is there"
            )
        found: np.ndarray = self.numbers[positions]
        return found


@dataclass(frozen=True)
class Reading:
    """A training stage and the order in which it reads.

    Attributes:
        stage: its name.
        folder: the stage's output, finished or not.
        section: its settings.
        plan: which positions each step takes.
        order: which row is read at each position; in reinforcement learning, which prompt is answered.
        packed: the set that the rows are of, in pre-training.
        examples: the ids of the examples that each row holds, in fine-tuning; each prompt's, in reinforcement learning.
    """

    stage: str
    folder: StageFolder
    section: Training
    plan: RowPlan | PromptPlan
    order: Order | KeptOrder
    packed: PackedSet | None = None
    examples: tuple[tuple[str, ...], ...] = ()

    @property
    def fingerprint(self) -> str | None:
        """Of what the rows hold; only a packed set's is known without reading the data."""
        return None if self.packed is None else self.packed.fingerprint

    def rows(self, step: int) -> np.ndarray:
        """The rows (int64, shape (B,)) of a step, counted from 1.

        Raises:
            TraceError: there is no such step.
        """
        if not 1 <= step <= self.section.steps:
            raise TraceError(
                f"{self.stage} has {self.section.steps} steps; there is no step {step}; give 1 to {self.section.steps}"
            )
        return self.plan.rows(self.order, step - 1)

    def steps_that_read(self, rows: np.ndarray) -> dict[int, list[int]]:
        """Step (counted from 1) -> those of some rows that it reads, in the order of the steps."""
        end = self.plan.end(self.section.steps)
        found: dict[int, list[int]] = {}
        if isinstance(self.order, KeptOrder):
            asked = np.flatnonzero(np.isin(self.order.numbers, rows))
            epochs = np.atleast_2d(self.plan.steps_of(asked) + 1)
            for step, number in zip(
                epochs.ravel().tolist(), np.tile(self.order.numbers[asked], len(epochs)).tolist(), strict=True
            ):
                if step <= self.section.steps:
                    found.setdefault(step, []).append(number)
            return {step: sorted(found[step]) for step in sorted(found)}
        for epoch in range(-(-end // self.order.total)):
            positions = self.order.positions(rows, epoch)
            within = positions < end
            for steps in np.atleast_2d(self.plan.steps_of(positions[within]) + 1):
                for step, row in zip(steps.tolist(), rows[within].tolist(), strict=True):
                    # What a rollback left behind was read by steps that were given up.
                    if 0 < step <= self.section.steps:
                        found.setdefault(step, []).append(row)
        return {step: sorted(found[step]) for step in sorted(found)}

    def steps_done(self) -> int:
        """How many steps have certainly been trained: by the commit, the record or the checkpoints."""
        if self.folder.state() == "committed":
            return self.section.steps
        recorded = [line["step"] for line in self.metrics()]
        return max([0, *recorded, *self.checkpoints()])

    def checkpoints(self) -> list[int]:
        """The steps of which there is a complete checkpoint, ascending."""
        # The marker, which is written last, says so; loading one checks its files too.
        return sorted(
            int(path.parent.name.removeprefix("step-"))
            for path in (self.folder.work / "checkpoints").glob("step-*/complete.json")
        )

    def use(self, step: int, done: int) -> Use:
        """Whether a step has been trained."""
        return "read" if step <= done else "will read"

    def metrics(self) -> list[dict[str, Any]]:
        """The lines that the training has recorded so far; none where it has not begun."""
        for place in (self.folder.data, self.folder.work):
            path = place / "metrics.jsonl"
            if path.exists():
                return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return []


def reading_of(session: Session, stage: str = PRETRAIN) -> Reading:
    """What a training stage of a manifest reads.

    Raises:
        TraceError: the manifest has no such stage, or its data is not made yet.
    """
    if stage not in session.plan:
        raise TraceError(f"{session.manifest_file} has no `{stage}:` section, so it has no such steps")
    node, folder = session.plan[stage], session.folder(stage)
    kind = node.stage
    if kind.trained is None:
        traced = [name for name, one in STAGES.items() if one.trained is not None]
        raise TraceError(f"{stage} reads no rows whose steps could be traced; those of {', '.join(traced)} can be")
    section = kind.trained.model_validate(node.config)
    if kind.rows == "documents":
        inputs = committed_inputs(session, session.plan)
        if MIX not in inputs:
            raise TraceError(f"the mixture is not packed yet; run: {session.command('run', '--until', MIX)}")
        return _pre_training(stage, folder, section, inputs[MIX])
    ids = PROMPT_IDS if kind.rows == "prompts" else EXAMPLE_IDS
    if not (folder.data / ids).exists():
        raise TraceError(
            f"which examples {stage} reads is known once it has begun; run: {session.command('run', '--until', stage)}"
        )
    examples = tuple(tuple(line.split()) for line in (folder.data / ids).read_text().splitlines())
    if isinstance(section, Rl):
        order = (
            Order([len(examples)], section.key_seed)
            if section.curriculum is None
            else (_kept_order(folder, section, examples))
        )
        section = section.in_steps(len(examples))
        return Reading(stage, folder, section, prompt_plan_of(section), order, examples=examples)
    rows_per_set: list[int] = read_json(folder.data / ROWS_PER_SET)
    if isinstance(section, TrainingInEpochs):
        section = section.in_steps(sum(rows_per_set))
    return Reading(
        stage,
        folder,
        section,
        settled_plan(folder, plan_of(section, 0)),
        Order(rows_per_set, section.key_seed),
        examples=examples,
    )


def reading_of_folder(folder: StageFolder) -> Reading:
    """What a pre-training reads that has been started, from its own folder.

    Raises:
        TraceError: it has not been started, or its packed set is gone.
    """
    description = folder.path / "stage.json"
    if not description.exists():
        raise TraceError(f"{folder.path}: this pre-training has not been started")
    told = read_json(description)
    return _pre_training(told["stage"], folder, Pretrain.model_validate(told["config"]), read_inputs(told)[MIX])


def _kept_order(folder: StageFolder, section: Rl, examples: Sequence[tuple[str, ...]]) -> KeptOrder:
    """What the kept answers of a training say of the prompts that it has asked."""
    numbers = {ids[0]: number for number, ids in enumerate(examples)}
    asked: list[int] = []
    for batch in range(-(-section.steps // section.updates_per_batch)):
        found = read_batch([folder.data, folder.work], batch)
        if found is None:
            break
        asked += [numbers[one["id"]] for one in found[:: section.group_size]]
    return KeptOrder(np.array(asked, dtype=np.int64))


def settled_plan(folder: StageFolder, plan: RowPlan) -> RowPlan:
    """A training's plan with what its rollbacks so far left out."""
    for place in (folder.data, folder.work):
        if rollbacks := read_rollbacks(place):
            return plan_after(plan, rollbacks)
    return plan


def _pre_training(stage: str, folder: StageFolder, section: Training, mix: Path) -> Reading:
    packed = PackedSet(mix)
    return Reading(
        stage,
        folder,
        section,
        settled_plan(folder, plan_of(section, packed.sequence_length)),
        packed.order(section.key_seed),
        packed,
    )


def answers_of_step(reading: Reading, step: int, share: int = 0, shares: int = 1) -> list[dict[str, Any]]:
    """The answers to a step's prompts, those to one prompt side by side; none where they are not drawn yet.

    Args:
        reading: of the stage `rl`.
        step: counted from 1.
        share, shares: only those of this process, of so many that share the step's answers.

    Returns:
        what `train/reinforcement/rollout_tables.py` keeps of each.
    """
    section = reading.section
    assert isinstance(section, Rl)
    batch, within = divmod(step - 1, section.updates_per_batch)
    found = read_batch([reading.folder.data, reading.folder.work], batch)
    if found is None:
        return []
    first = within % section.steps_per_batch * section.global_batch_size
    return found[first : first + section.global_batch_size][share::shares]
