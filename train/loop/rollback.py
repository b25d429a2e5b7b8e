"""Rollbacks: return to a checkpoint before a streak of bad steps, and continue with
unread rows.

`rollbacks.json` is the source of truth: a list of all rollbacks, replaced atomically.
It determines how many rows are skipped and which checkpoints are abandoned, so a kill
at any point of a rollback is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from gristmill.core.files import read_json, write_json
from gristmill.train.loop.batch_plan import RowPlan

ROLLBACKS = "rollbacks.json"


class Rollback(TypedDict):
    """Return to an earlier step.

    Attributes:
        to_step, from_step: steps done after and before it.
        first_bad_step: first step of the streak that caused it.
        positions: skipped from then on.
    """

    to_step: int
    from_step: int
    first_bad_step: int
    positions: int


def read_rollbacks(work: Path) -> list[Rollback]:
    """All rollbacks so far."""
    rollbacks: list[Rollback] = (
        read_json(work / ROLLBACKS) if (work / ROLLBACKS).exists() else []
    )
    return rollbacks


def write_rollbacks(work: Path, rollbacks: Sequence[Rollback]) -> None:
    """Replace the list."""
    write_json(work / ROLLBACKS, list(rollbacks))


def plan_after(plan: RowPlan, rollbacks: Sequence[Rollback]) -> RowPlan:
    """Row plan after rollbacks: positions move forward from the target step of each
    rollback on.
    """
    jumps: list[tuple[int, int]] = []
    for rollback in rollbacks:
        jumps = [jump for jump in jumps if jump[0] <= rollback["to_step"]]
        jumps.append((rollback["to_step"], rollback["positions"]))
    return plan.with_jumps(tuple(jumps))


def describe_rollback(
    plan: RowPlan,
    rollbacks: Sequence[Rollback],
    from_step: int,
    to_step: int,
    first_bad_step: int,
) -> Rollback:
    """Entry of a new rollback, after which step `to_step` + 1 reads the rows that step
    `from_step` + 1 would have read.

    Args:
        plan: of the section, without jumps.
        rollbacks: earlier ones.
        from_step, to_step: steps done before and after.
        first_bad_step: first step of the streak.
    """
    rollback: Rollback = {
        "to_step": to_step,
        "from_step": from_step,
        "first_bad_step": first_bad_step,
        "positions": 0,
    }
    reached, _ = plan_after(plan, rollbacks).positions(from_step)
    restart, _ = plan_after(plan, [*rollbacks, rollback]).positions(to_step)
    return {**rollback, "positions": reached - restart}


def is_given_up(step: int, num_earlier: int, rollbacks: Sequence[Rollback]) -> bool:
    """Return True if a rollback after the save of a checkpoint went back to an earlier
    step.

    Args:
        step: of the checkpoint.
        num_earlier: number of rollbacks before it was saved.
        rollbacks: all of them.
    """
    return any(step > rollback["to_step"] for rollback in rollbacks[num_earlier:])
