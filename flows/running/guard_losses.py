"""Losses in the summaries of stages, and the warning about those beyond a guard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from gristmill.dataprep.dedup.repeats import DuplicateSample
from gristmill.dataprep.group_losses import GroupLoss
from gristmill.mixtures.schema.guard import Guard
from gristmill.mixtures.yaml_text import join_first

NAMED = 3
"""Groups, and clusters of duplicates, that a message names."""
_LOSSES = TypeAdapter(list[GroupLoss], config=ConfigDict(defer_build=True))


def read_losses(summary: Mapping[str, Any]) -> list[GroupLoss]:
    """Return the losses in the summary of a stage, by column, the largest first."""
    return _LOSSES.validate_python(summary.get("losses", []))


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
    sample = summary.get("duplicate_sample")
    if not sample or not sample["documents"]:
        return ""
    clusters = [
        f"{cluster['size']:,} like {cluster['survivor'][:16]}, {cluster['kind']}"
        for cluster in summary["largest_clusters"][:NAMED]
    ]
    described = DuplicateSample(**sample).describe()
    return f"largest clusters: {'; '.join(clusters)}; {described}"
