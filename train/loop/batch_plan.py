"""Rows of each step, and their split over processes: a pure function of (set, seed,
plan, step).

With a constant batch size B, step b reads positions [b B, (b+1) B) of the keyed order,
whatever the number of processes or micro-batches. A ramp changes the number of
positions per step, or the number of shorter rows that a row is cut into; positions
remain consecutive. So the state of the stream is one integer, and a resumed training
reads the same rows.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from gristmill.mixtures.schema.pretrain import Pretrain, Training


class PlanError(ValueError):
    """A ramp does not match the packed set, or does not ascend."""


class RowOrder(Protocol):
    """Row at each position (see `shuffle.Order`)."""

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Rows (int64) at positions (int64)."""

    def span(self, first: int, count: int) -> np.ndarray:
        """Rows (int64) at `count` consecutive positions."""


@dataclass(frozen=True)
class RowPlan:
    """Positions of each step, and the length of its rows.

    Attributes:
        batches: (first step, its first position, rows per step) of each range of steps,
            ascending from (0, 0, B).
        cuts: (first step, shorter rows per row) of each range of steps, ascending from
            step 0.
        phases: first step of each of the section's phases, ascending from step 0.
    """

    batches: tuple[tuple[int, int, int], ...]
    cuts: tuple[tuple[int, int], ...] = ((0, 1),)
    phases: tuple[int, ...] = (0,)

    def positions(self, step: int) -> tuple[int, int]:
        """First position of a step (counted from 0), and its number of positions."""
        first_step, first, size = self.batches[
            bisect_right(self.batches, step, key=lambda batch: batch[0]) - 1
        ]
        return first + (step - first_step) * size, size

    def end(self, steps: int) -> int:
        """Position after those of the first `steps` steps."""
        return self.positions(steps)[0]

    def cuts_in_step(self, step: int) -> int:
        """Number of rows of equal length that each row of the set is cut into."""
        return self.cuts[bisect_right(self.cuts, step, key=lambda cut: cut[0]) - 1][1]

    def phase_of(self, step: int) -> int:
        """Phase, from 0, of a step."""
        return bisect_right(self.phases, step) - 1

    def first_step(self, position: int) -> int:
        """First step, counted from 0, that reads no earlier position than this one."""
        return bisect_left(
            range(position + 1), position, key=lambda step: self.positions(step)[0]
        )

    def rows(self, order: RowOrder, step: int) -> np.ndarray:
        """Rows (int64, shape (B,)) of an optimizer step, counted from 0; epochs are
        consecutive.
        """
        return order.span(*self.positions(step))

    def steps_of(self, positions: np.ndarray) -> np.ndarray:
        """Steps (int64, counted from 0) that read positions: the inverse of
        `positions`.
        """
        first_steps, firsts, sizes = (
            np.array(column, dtype=np.int64)
            for column in zip(*self.batches, strict=True)
        )
        stretch = np.searchsorted(firsts, positions, side="right") - 1
        return first_steps[stretch] + (positions - firsts[stretch]) // sizes[stretch]


def plan_of(
    section: Training, sequence_length: int, phase_ends: Sequence[int] = ()
) -> RowPlan:
    """Row plan of a training's section.

    Args:
        section: batch size, and ramps and phases of pre-training.
        sequence_length: tokens per row of the packed set, L.
        phase_ends: positions at which the phases of the set end; without them the plan
            has the rows of each step but not the cuts of phases.

    Raises:
        PlanError: the length of a ramp or phase does not divide L, or a stage of a ramp
            ends before it begins.
    """
    if not isinstance(section, Pretrain):
        return RowPlan(((0, 0, section.global_batch_size),))
    batches = []
    step = position = 0
    for number, stage in enumerate(section.batch_ramp):
        if stage.until_step is not None:
            steps = stage.until_step - step
        else:
            assert stage.until_tokens is not None
            # A number of tokens is rounded up to whole steps.
            steps = -(
                (position * sequence_length - stage.until_tokens)
                // (stage.global_batch_size * sequence_length)
            )
        if steps <= 0:
            raise PlanError(
                f"pretrain.batch_ramp, stage {number + 1}: ends before step "
                f"{step + 1}, where the stages "
                "before it have come; let every stage end later than the one before"
            )
        batches.append((step, position, stage.global_batch_size))
        step = step + steps
        position = position + steps * stage.global_batch_size
    cuts = []
    first = 0
    for cut_stage in section.length_ramp:
        cuts.append(
            (first, _cuts_of(sequence_length, cut_stage.sequence_length, "length_ramp"))
        )
        first = cut_stage.until_step
    plan = RowPlan(
        (*batches, (step, position, section.global_batch_size)), (*cuts, (first, 1))
    )
    if not section.phases or not phase_ends:
        return plan
    begins = (0, *(plan.first_step(end) for end in phase_ends[:-1]))
    if any(phase.sequence_length is not None for phase in section.phases):
        plan = replace(
            plan,
            cuts=tuple(
                (
                    begin,
                    _cuts_of(
                        sequence_length,
                        phase.sequence_length or sequence_length,
                        "phases",
                    ),
                )
                for begin, phase in zip(begins, section.phases, strict=True)
            ),
        )
    return replace(plan, phases=begins)


def _cuts_of(sequence_length: int, shorter: int, key: str) -> int:
    if sequence_length % shorter:
        raise PlanError(
            f"pretrain.{key}: sequence_length {shorter} does not divide the "
            f"{sequence_length} tokens of a row of the packed set (mix.sequence_length)"
        )
    return sequence_length // shorter


def micro_batches(
    rows: np.ndarray, rank: int, world_size: int, micro_batch_size: int
) -> list[np.ndarray]:
    """One rank's share of a batch, split into micro-batches.

    Rank r gets every world_size-th row, starting at r. Each micro-batch is a
    collective, so all ranks get equally many; the last ones of a rank may be empty.

    Args:
        rows: (B,) the batch, equal on every rank.
        rank: 0 to world_size - 1.
        world_size: number of processes.
        micro_batch_size: maximum rows per forward pass.
    """
    share = rows[rank::world_size]
    count = -(-len(rows) // (world_size * micro_batch_size))
    return [
        share[start : start + micro_batch_size]
        for start in range(0, count * micro_batch_size, micro_batch_size)
    ]


def or_first(rows: np.ndarray) -> np.ndarray:
    """Rows of a micro-batch, or row 0 in place of an empty one, which is computed too,
    as forward and backward passes are collectives.
    """
    return rows if len(rows) else np.zeros(1, np.int64)


def slices(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` items that cover `count` of them, in order."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def extend_digest(digest: str, rows: np.ndarray) -> str:
    """Rolling hash of all rows read: two trainings with the same digest have read the
    same tokens.

    The first digest is the fingerprint of the data (for a packed set: the checksums of
    its tokens), so the hash covers content, not only row numbers. It can be recomputed
    from the set and the seed.

    Args:
        digest: of earlier steps; initially the data's fingerprint.
        rows: of the step, in order.

    Returns:
        32 hexadecimal digits.
    """
    content = digest.encode() + np.asarray(rows, dtype="<i8").tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest()
