"""`gristmill losses`: sources, domains and languages that the preparation lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

from gristmill.dataprep.group_losses import (
    COLUMNS,
    NAMED,
    GroupColumn,
    GroupLoss,
    describe_duplicates,
    read_losses,
)
from gristmill.dataprep.whatif_thresholds import short_name
from gristmill.flows.pages.page_elements import Note, Parts, Table, table
from gristmill.flows.pages.terminal_pages import Answer
from gristmill.flows.questions.find_documents import committed_folders
from gristmill.flows.running.session import Session
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.yaml_text import join_first

SHOWN_GROUPS = 10
"""Groups of each column in a table; JSON has all."""


@dataclass(frozen=True)
class LostGroup(GroupLoss):
    """Documents of a source, domain or language that all stages dropped.

    Attributes:
        read: documents before the first stage that dropped any.
        reason, examples: of the stage that dropped most, and its rule.
        share: dropped of those read.
        vanished: it lost more than the guard allows, in a stage or in all together.
        steps: stage -> its losses.
    """

    share: float
    vanished: bool
    steps: Mapping[str, GroupLoss]


@dataclass(frozen=True)
class LossReport(Answer):
    """Losses of all committed stages.

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
        groups = join_first([group.describe() for group in self.vanished], NAMED)
        return f"Lost more than the guard allows: {groups}."

    def tables(self) -> list[Table]:
        """The groups of each column that lost the largest share."""
        columns = {"read": ",", "lost": ",", "share": ".1%", "most by": ""}
        meanings = {
            "domain": "host of the locator",
            "read": "before the first stage that dropped any",
            "lost": "dropped by all stages",
            "share": "lost of those read",
        }
        values = attrgetter("group", "read", "dropped", "share", "reason")
        return [
            table(
                {column: "", **columns},
                map(values, islice(groups, SHOWN_GROUPS)),
                meanings,
            )
            for column, groups in groupby(self.groups, attrgetter("column"))
        ]

    def parts(self) -> list[Parts]:
        """Return the verdict, the largest losses, and examples as parts of a page."""
        examples = [
            f"{group.group}: {example}"
            for group in self.vanished
            for example in group.examples
        ]
        duplicates = [f"{step}: {text}" for step, text in self.duplicates.items()]
        verdict = Note(self.verdict(), "plain")
        return [verdict, self.tables(), examples, duplicates]


def losses(session: Session) -> LossReport:
    """Return the losses of the committed stages of a manifest."""
    folders = committed_folders(session)
    summaries = {name: folder.manifest()["summary"] for name, folder in folders.items()}
    return report_losses(session.manifest, summaries)


def report_losses(
    manifest: Manifest, summaries: Mapping[str, Mapping[str, Any]]
) -> LossReport:
    """Add the losses of all stages up by group.

    Args:
        summaries: of the committed stages.
    """
    guards = manifest.guards
    steps_of_groups: dict[tuple[GroupColumn, str], dict[str, GroupLoss]]
    steps_of_groups = defaultdict(dict)
    for name in guards:
        for loss in read_losses(summaries.get(name, {})):
            steps_of_groups[loss.column, loss.group][name] = loss
    groups = []
    for group, steps in steps_of_groups.items():
        most = max(steps, key=lambda name: steps[name].dropped)
        read = max(loss.read for loss in steps.values())
        dropped = sum(loss.dropped for loss in steps.values())
        is_lost = manifest.guard.is_exceeded(read, dropped) or any(
            guards[name].is_exceeded(loss.read, loss.dropped)
            for name, loss in steps.items()
        )
        groups.append(
            LostGroup(
                *group,
                read,
                dropped,
                f"{most}: {short_name(steps[most].reason)}",
                steps[most].examples,
                dropped / read,
                is_lost,
                steps,
            )
        )
    groups.sort(key=lambda lost: (COLUMNS.index(lost.column), -lost.share, lost.group))
    duplicates = {name: describe_duplicates(summaries.get(name, {})) for name in guards}
    return LossReport(
        groups, {name: sentence for name, sentence in duplicates.items() if sentence}
    )
