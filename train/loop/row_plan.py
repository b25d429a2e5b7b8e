"""Which rows each step reads, and which process computes them: a pure function of (set, seed, plan, step).

Step b of a plan with one batch size B holds positions [b B, (b+1) B) of the keyed order, whatever the number of
processes or micro-batches; those only cut it. A ramp changes how many positions a step takes, and into how many
shorter rows a row is cut; the positions still follow one another without a gap. So the state of the stream is one
integer, and a resumed training reads what it would have read.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from gristmill.mixtures.training import BatchStage, Pretrain, Training


class PlanError(ValueError):
    """A ramp does not fit the packed set, or does not ascend."""


class RowOrder(Protocol):
    """What is read at each position (see tokenize.order.Order)."""

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The rows, int64, at positions, int64."""

    def span(self, first: int, count: int) -> np.ndarray:
        """The rows, int64, at positions that follow one another."""


@dataclass(frozen=True)
class RowPlan:
    """How many positions each step takes, and how long its rows are.

    Attributes:
        batches: (first step, its first position, rows per step) of each stretch of steps, ascending from (0, 0, B).
        cuts: (first step, shorter rows per row) of each stretch of steps, ascending from step 0.
        jumps: (first step, positions) that were left out before a step, ascending: see loop.rollback.
        phases: the first step of each of the section's phases, ascending from step 0.
    """

    batches: tuple[tuple[int, int, int], ...]
    cuts: tuple[tuple[int, int], ...] = ((0, 1),)
    jumps: tuple[tuple[int, int], ...] = ()
    phases: tuple[int, ...] = (0,)

    def with_jumps(self, jumps: tuple[tuple[int, int], ...]) -> RowPlan:
        """The same plan with positions left out."""
        return replace(self, jumps=jumps)

    def positions(self, step: int) -> tuple[int, int]:
        """The first position of a step (counted from 0), and how many it takes."""
        first_step, first, size = self.batches[bisect_right(self.batches, step, key=lambda part: part[0]) - 1]
        left_out = sum(positions for from_step, positions in self.jumps if from_step <= step)
        return first + (step - first_step) * size + left_out, size

    def end(self, steps: int) -> int:
        """The position behind those of so many steps."""
        return self.positions(steps)[0]

    def cuts_in_step(self, step: int) -> int:
        """Into how many rows of equal length each row of the set is cut in a step."""
        return self.cuts[bisect_right(self.cuts, step, key=lambda part: part[0]) - 1][1]

    def phase_of(self, step: int) -> int:
        """The number, from 0, of the phase that a step belongs to."""
        return bisect_right(self.phases, step) - 1

    def first_step(self, position: int) -> int:
        """The first step that reads nothing before a position, counted from 0."""
        return bisect_left(range(position + 1), position, key=lambda step: self.positions(step)[0])

    def rows(self, order: RowOrder, step: int) -> np.ndarray:
        """The rows (int64, shape (B,)) of one optimizer step, counted from 0; epochs follow one another."""
        return order.span(*self.positions(step))

    def steps_of(self, positions: np.ndarray) -> np.ndarray:
        """The steps (int64, counted from 0) that read some positions, -1 where none does: inverts `positions`."""
        steps = self._steps_without_jumps(positions)
        left_out = 0
        for from_step, jump in self.jumps:
            gap = self.with_jumps(()).positions(from_step)[0] + left_out
            left_out += jump
            behind = self._steps_without_jumps(positions - left_out)
            steps = np.where(positions < gap, steps, np.where(positions < gap + jump, -1, behind))
        return steps

    def _steps_without_jumps(self, positions: np.ndarray) -> np.ndarray:
        first_steps, firsts, sizes = (np.array(column, dtype=np.int64) for column in zip(*self.batches, strict=True))
        stretch = np.searchsorted(firsts, positions, side="right") - 1
        steps: np.ndarray = first_steps[stretch] + (positions - firsts[stretch]) // sizes[stretch]
        return steps


def plan_of(section: Training, sequence_length: int, phase_ends: Sequence[int] = ()) -> RowPlan:
    """The plan that a training's section asks for.

    Args:
        section: batch size, and for pre-training its ramps and phases.
        sequence_length: tokens per row of the packed set, L.
        phase_ends: the positions at which the phases of the set end; without them the plan says which rows steps read,
            but not how those of phases are cut.

    Raises:
        PlanError: a ramp or phase names a length that does not divide L, or a stage of a ramp ends before it begins.
    """
    if not isinstance(section, Pretrain):
        return RowPlan(((0, 0, section.global_batch_size),))
    plan = RowPlan(_batches(section, sequence_length), _cuts(section, sequence_length))
    if not section.phases or not phase_ends:
        return plan
    begins = (0, *(plan.first_step(end) for end in phase_ends[:-1]))
    if any(phase.sequence_length is not None for phase in section.phases):
        plan = replace(
            plan,
            cuts=tuple(
                (begin, _cuts_of(sequence_length, phase.sequence_length or sequence_length, "phases"))
                for begin, phase in zip(begins, section.phases, strict=True)
            ),
        )
    return replace(plan, phases=begins)


def _batches(section: Pretrain, sequence_length: int) -> tuple[tuple[int, int, int], ...]:
    found: list[tuple[int, int, int]] = []
    step = position = 0
    for number, stage in enumerate(section.batch_ramp):
        steps = _steps_of_stage(stage, step, position, sequence_length)
        if steps <= 0:
            raise PlanError(
                f"pretrain.batch_ramp, stage {number + 1}: ends before step {step + 1}, where the stages "
                "before it have come; let every stage end later than the one before"
            )
        found.append((step, position, stage.global_batch_size))
        step, position = step + steps, position + steps * stage.global_batch_size
    return (*found, (step, position, section.global_batch_size))


def _steps_of_stage(stage: BatchStage, step: int, position: int, sequence_length: int) -> int:
    """Steps of a stage that begins at a step and position; a number of tokens is reached, not cut short."""
    if stage.until_step is not None:
        return stage.until_step - step
    assert stage.until_tokens is not None
    return -((position * sequence_length - stage.until_tokens) // (stage.global_batch_size * sequence_length))


def _cuts(section: Pretrain, sequence_length: int) -> tuple[tuple[int, int], ...]:
    found = []
    step = 0
    for stage in section.length_ramp:
        found.append((step, _cuts_of(sequence_length, stage.sequence_length, "length_ramp")))
        step = stage.until_step
    return (*found, (step, 1))


def _cuts_of(sequence_length: int, shorter: int, key: str) -> int:
    if sequence_length % shorter:
        raise PlanError(
            f"pretrain.{key}: sequence_length {shorter} does not divide the {sequence_length} tokens of a "
            "row of the packed set (mix.sequence_length)"
        )
    return sequence_length // shorter


def micro_batches(rows: np.ndarray, rank: int, world_size: int, micro_batch_size: int) -> list[np.ndarray]:
    """One rank's share of a batch, cut into micro-batches.

    Rank r takes every world_size-th row from r on. All ranks get equally many micro-batches, since each of them is
    a collective operation; the last ones of a rank may be empty.

    Args:
        rows: (B,) the batch, the same on every rank.
        rank: 0 to world_size - 1.
        world_size: number of processes.
        micro_batch_size: most rows per forward pass.
    """
    share = rows[rank::world_size]
    count = -(-len(rows) // (world_size * micro_batch_size))
    return [share[start : start + micro_batch_size] for start in range(0, count * micro_batch_size, micro_batch_size)]


def extend_digest(digest: str, rows: np.ndarray) -> str:
    """The rolling hash of all that was read so far: two trainings with the same digest have read the same tokens.

    It begins with the fingerprint of what the rows are numbers of (for a packed set: its tokens' checksums), so that it
    speaks of content, not of numbers alone. Anybody who has the set and the seed can compute it again.

    Args:
        digest: of the steps before; at the start the data's fingerprint.
        rows: the step's rows, in their order.

    Returns:
        32 hexadecimal digits.
    """
    content = digest.encode() + np.asarray(rows, dtype="<i8").tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
