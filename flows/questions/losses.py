"""`gristmill losses`: sources, domains and languages that the steps of `prepare` lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.dataprep.group_losses import COLUMNS, GroupColumn, LostDocument
from gristmill.flows.pages.page_elements import Table, table
from gristmill.flows.pages.terminal_tables import print_table
from gristmill.flows.questions.find_documents import committed_folders
from gristmill.flows.running.guard_losses import (
    NAMED,
    is_beyond,
    read_losses,
)
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console, visible
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.yaml_text import join_first

SHOWN_GROUPS = 10
"""Groups of each column in a table; JSON has all."""


@dataclass(frozen=True)
class LossOfStep:
    """Documents of a group that a step dropped, most by one rule (`reason`)."""

    step: str
    read: int
    dropped: int
    reason: str
    examples: Sequence[LostDocument]
    vanished: bool


@dataclass(frozen=True)
class LostGroup:
    """A source, domain or language, and its losses.

    Attributes:
        column, group: `source` and its name, for example.
        read: documents before the first step that dropped any.
        dropped: by all steps.
        share: dropped of those read.
        vanished: it lost more than the guard allows, in a step or in all together.
        steps: steps that dropped its documents, the largest loss first.
    """

    column: GroupColumn
    group: str
    read: int
    dropped: int
    share: float
    vanished: bool
    steps: Sequence[LossOfStep]


@dataclass(frozen=True)
class LossReport:
    """Losses of all committed steps.

    Attributes:
        groups: by column, the largest share first.
        duplicates: step -> a sentence on the duplicates that it dropped.
    """

    groups: Sequence[LostGroup] = ()
    duplicates: Mapping[str, str] = field(default_factory=dict)

    @property
    def vanished(self) -> list[LostGroup]:
        """Groups that lost more than the guard allows."""
        return [group for group in self.groups if group.vanished]

    def verdict(self) -> str:
        """Answer whether a source, domain or language vanished."""
        if not self.vanished:
            return "No source, domain or language lost more than the guard allows."
        named = [
            f"{group.column} {group.group} ({group.dropped:,} of {group.read:,}, "
            f"most by {group.steps[0].reason} of {group.steps[0].step})"
            for group in self.vanished
        ]
        return f"Lost more than the guard allows: {join_first(named, NAMED)}."

    def show(self) -> None:
        """Print the verdict, the largest losses, and examples of vanished groups."""
        console = plain_console()
        console.print(visible(self.verdict()))
        print_table(console, loss_table(self))
        for group in self.vanished:
            for lost in group.steps[0].examples:
                console.print(
                    visible(f"{group.group}: {lost.id[:16]} {lost.locator}"),
                    style="dim",
                    soft_wrap=True,
                )
        for step, sentence in self.duplicates.items():
            console.print(visible(f"{step}: {sentence}"))


def losses(session: Session) -> LossReport:
    """Return the losses of the committed stages of a manifest."""
    summaries = {
        name: folder.manifest()["summary"]
        for name, folder in committed_folders(session).items()
        if name in session.manifest.guards
    }
    return report_losses(session.manifest, summaries)


def report_losses(
    manifest: Manifest, summaries: Mapping[str, Mapping[str, Any]]
) -> LossReport:
    """Add the losses of all steps up by group.

    Args:
        summaries: of the committed stages.
    """
    by_group: dict[tuple[GroupColumn, str], list[LossOfStep]] = {}
    duplicates: dict[str, str] = {}
    for name, guard in manifest.guards.items():
        if name not in summaries:
            continue
        step = read_losses(summaries[name])
        for loss in step.losses:
            by_group.setdefault((loss.column, loss.group), []).append(
                LossOfStep(
                    name,
                    loss.read,
                    loss.dropped,
                    loss.reason,
                    loss.examples,
                    is_beyond(guard, loss.read, loss.dropped),
                )
            )
        if sentence := step.describe_duplicates():
            duplicates[name] = sentence
    groups = []
    for (column, group), steps in by_group.items():
        read = max(loss.read for loss in steps)
        dropped = sum(loss.dropped for loss in steps)
        is_lost = any(loss.vanished for loss in steps)
        groups.append(
            LostGroup(
                column,
                group,
                read,
                dropped,
                dropped / read,
                is_lost or is_beyond(manifest.guard, read, dropped),
                sorted(steps, key=lambda loss: -loss.dropped),
            )
        )
    groups.sort(key=lambda lost: (COLUMNS.index(lost.column), -lost.share, lost.group))
    return LossReport(groups, duplicates)


def loss_table(report: LossReport) -> Table:
    """The groups of each column that lost the largest share."""
    rows = []
    for column in COLUMNS:
        groups = [group for group in report.groups if group.column == column]
        rows += [
            [
                column,
                group.group,
                group.read,
                group.dropped,
                group.share,
                f"{group.steps[0].step}: {group.steps[0].reason}",
                "vanished" if group.vanished else "",
            ]
            for group in groups[:SHOWN_GROUPS]
        ]
    columns = {"read": ",", "lost": ",", "share": ".1%", "most by": "", " ": ""}
    meanings = {
        "read": "before the first step that dropped any",
        "share": "lost of those read",
    }
    return table({"": "", "name": "", **columns}, rows, meanings)
