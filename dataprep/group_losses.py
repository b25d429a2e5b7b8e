"""Documents that a stage dropped, by source, domain and language."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

GroupColumn = Literal["source", "domain", "language"]
COLUMNS: tuple[GroupColumn, ...] = get_args(GroupColumn)
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
