"""Check of a step's losses against the manifest's guard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from gristmill.dataprep.conservation import top_reasons
from gristmill.dataprep.dedup.repeats import DuplicateKind, DuplicateSample
from gristmill.dataprep.group_losses import COLUMNS, GroupColumn, GroupLoss
from gristmill.mixtures.schema.guard import Guard

NAMED = 3
"""Groups, and clusters of duplicates, that a message names."""


@dataclass(frozen=True)
class LargeCluster:
    """One of the largest clusters of duplicates."""

    survivor: str
    size: int
    kind: DuplicateKind | None = None

    def describe(self) -> str:
        """Name its size, survivor and kind."""
        kind = f", {self.kind}" if self.kind else ""
        return f"{self.size:,} like {self.survivor[:16]}{kind}"


@dataclass(frozen=True)
class StepLosses:
    """The part of a step's summary that is about losses.

    Attributes:
        losses: by source, domain and language.
        duplicate_sample, largest_clusters: of a step that drops duplicates.
    """

    losses: Sequence[GroupLoss]
    duplicate_sample: DuplicateSample | None = None
    largest_clusters: Sequence[LargeCluster] = ()

    def describe_duplicates(self) -> str:
        """Describe the dropped duplicates in a sentence; empty for other steps."""
        if self.duplicate_sample is None or not self.duplicate_sample.documents:
            return ""
        largest = self.largest_clusters[:NAMED]
        clusters = "; ".join(cluster.describe() for cluster in largest)
        return f"largest clusters: {clusters}; {self.duplicate_sample.describe()}"


@dataclass(frozen=True)
class Vanished:
    """Groups of a column that lost more than a guard allows, the largest loss first."""

    column: GroupColumn
    losses: Sequence[GroupLoss]
    max_loss: float

    def describe(self) -> str:
        """Describe the losses in a sentence, with examples of the largest."""
        first, number = self.losses[0], len(self.losses)
        counts = [
            f"{loss.group} lost {loss.dropped:,} of {loss.read:,} documents"
            for loss in self.losses[:NAMED]
        ]
        more = f", and {number - NAMED:,} more" if number > NAMED else ""
        locators = ", ".join(document.locator for document in first.examples)
        examples = f", such as {locators}" if locators else ""
        return (
            f"{self.column} {', '.join(counts)}{more} (guard.max_loss: "
            f"{self.max_loss:g}); most by {first.reason}{examples}"
        )


def read_losses(summary: Mapping[str, Any]) -> StepLosses:
    """Return the losses in the summary of `ingest` or a step; those of `ingest` are by
    source only, since a record that it drops is not a document.
    """
    losses = summary.get("losses")
    if losses is None:
        losses = [
            GroupLoss(
                "source",
                source,
                counts["read"],
                counts["read"] - counts["kept"],
                top_reasons(counts["dropped"], counts["quarantined"])[0][0],
                [],
            )
            for source, counts in summary["counts"]["sources"].items()
            if counts["kept"] < counts["read"]
        ]
    return TypeAdapter(StepLosses).validate_python({**summary, "losses": losses})


def vanished(step: StepLosses, guard: Guard) -> Iterator[Vanished]:
    """Yield the groups that lost more than the guard allows, by column."""
    for column in COLUMNS:
        losses = [
            loss
            for loss in step.losses
            if loss.column == column and is_beyond(guard, loss.read, loss.dropped)
        ]
        if losses:
            losses.sort(key=lambda loss: (-loss.dropped, loss.group))
            yield Vanished(column, losses, guard.max_loss)


def is_beyond(guard: Guard, read: int, dropped: int) -> bool:
    """Return True if a group of `read` documents lost more than a guard allows."""
    return read >= guard.min_documents and dropped > guard.max_loss * read
