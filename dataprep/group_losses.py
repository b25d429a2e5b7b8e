"""Documents that a stage dropped, by source, domain and language, and the warning about
those beyond a guard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import ConfigDict, TypeAdapter

from gristmill.dataprep.dedup.repeats import DuplicateSample
from gristmill.mixtures.schema.guard import Guard
from gristmill.mixtures.yaml_text import join_first

GroupColumn = Literal["source", "domain", "language"]
COLUMNS: tuple[GroupColumn, ...] = get_args(GroupColumn)
NAMED = 3
"""Groups that a message names."""
IntendedLosses = Sequence[tuple[str, str]]
"""Columns, each with a rule of a step that is about it, such as a list of languages to
keep: what it drops is not a loss of a group of that column.
"""


@dataclass(frozen=True)
class GroupLoss:
    """Documents of a source, domain or language that a stage dropped.

    Attributes:
        column, group: `source` and its name, for example.
        read, dropped: numbers of documents, without those of rules about the column.
        reason: the rule that dropped most.
        examples: locators of documents that it dropped.
    """

    column: GroupColumn
    group: str
    read: int
    dropped: int
    reason: str
    examples: Sequence[str]

    def describe(self) -> str:
        """Name the group, its loss and the rule."""
        return (
            f"{self.column} {self.group} ({self.dropped:,} of {self.read:,}, most by "
            f"{self.reason})"
        )


_LOSSES = TypeAdapter(list[GroupLoss], config=ConfigDict(defer_build=True))


def read_losses(summary: Mapping[str, Any]) -> list[GroupLoss]:
    """Return the losses in the summary of a stage, by column, the largest first."""
    return _LOSSES.validate_python(summary.get("group_losses", []))


def describe_vanished(summary: Mapping[str, Any], guard: Guard) -> str:
    """Describe the groups of a stage that lost more than the guard allows; empty if
    there are none.
    """
    losses = [
        loss
        for loss in read_losses(summary)
        if guard.is_exceeded(loss.read, loss.dropped)
    ]
    if not losses:
        return ""
    groups = join_first([loss.describe() for loss in losses], NAMED)
    duplicates = describe_duplicates(summary)
    return (
        f"lost more than guard.max_loss = {guard.max_loss:g} allows: {groups}, such as "
        f"{', '.join(losses[0].examples)}{duplicates and '; '}{duplicates}"
    )


def describe_duplicates(summary: Mapping[str, Any]) -> str:
    """Describe the duplicates that a step dropped; empty for other steps."""
    sample = summary.get("duplicate_sample", {"documents": 0})
    if not sample["documents"]:
        return ""
    return DuplicateSample(**sample).describe(summary["largest_clusters"])
