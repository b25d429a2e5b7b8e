"""Going back to a checkpoint from before a streak of bad steps, and reading on behind what was read.

`rollbacks.json` is what counts: a list of all rollbacks, replaced as a whole. From it follow how far the stream has
moved on, and which checkpoints are of a future that was given up; so a kill between any two of the things that a
rollback does changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import read_json, write_json
from gristmill.train.loop.row_plan import RowPlan

ROLLBACKS = "rollbacks.json"


def read_rollbacks(work: Path) -> list[dict[str, Any]]:
    """All rollbacks so far: `to_step`, `from_step`, `first_bad_step`, `positions` (that are never read again)."""
    found: list[dict[str, Any]] = read_json(work / ROLLBACKS) if (work / ROLLBACKS).exists() else []
    return found


def write_rollbacks(work: Path, rollbacks: Sequence[Mapping[str, Any]]) -> None:
    """Replace the list."""
    write_json(work / ROLLBACKS, list(rollbacks))


def plan_after(plan: RowPlan, rollbacks: Sequence[Mapping[str, Any]]) -> RowPlan:
    """The plan of a training that went back: from the step gone back to on, all positions lie further on."""
    jumps: list[tuple[int, int]] = []
    for one in rollbacks:
        jumps = [jump for jump in jumps if jump[0] <= one["to_step"]] + [(one["to_step"], one["positions"])]
    return plan.with_jumps(tuple(jumps))


def describe_rollback(
    plan: RowPlan, rollbacks: Sequence[Mapping[str, Any]], from_step: int, to_step: int, first_bad_step: int
) -> dict[str, Any]:
    """One more rollback: after it, step `to_step` + 1 reads what step `from_step` + 1 would have read.

    Args:
        plan: the section's, without jumps.
        rollbacks: before this one.
        from_step, to_step: steps done before and after.
        first_bad_step: of the streak.
    """
    reached, _ = plan_after(plan, rollbacks).positions(from_step)
    again, _ = plan_after(plan, [*rollbacks, {"to_step": to_step, "positions": 0}]).positions(to_step)
    return {"to_step": to_step, "from_step": from_step, "first_bad_step": first_bad_step, "positions": reached - again}


def is_given_up(step: int, state: Mapping[str, Any], rollbacks: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a checkpoint lies behind a step that the training went back to after it was saved."""
    return any(step > one["to_step"] for one in rollbacks[state["rollbacks"] :])
