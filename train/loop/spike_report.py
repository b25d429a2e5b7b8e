"""Loss-spike reports: documents of a skipped step, ordered by loss, as JSON and as a
list to exclude.

    autopsies/step-120.json   the step, the statistics of its window, and its documents,
                              highest loss first: loss, source, place, and for
                              pre-training their origin and quality
    autopsies/exclude.txt     ids of the attributed documents of all reports, one
                              hexadecimal id per line
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import TypedDict

from gristmill.core.files import read_json, write_text
from gristmill.train.loop.objective import JsonObject, Metrics, ReadDocument

AUTOPSIES = "autopsies"
EXCLUDE = "exclude.txt"
SUSPICIOUS_DEVIATIONS = 2.0
"""Documents are attributed from this many standard deviations above the batch mean: one
in forty if losses are normal.
"""

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to text."""
Origins = Mapping[str, Metrics]
"""Origin and quality of documents, by id."""
Known = Callable[[Sequence[str]], Origins]
"""Function from hexadecimal document ids to the origin and quality of each document."""


class SkippedStep(TypedDict):
    """Figures of a skipped step; None for NaN and Inf, and for an empty window.

    Attributes:
        step: counted from 1.
        loss, grad_norm: of the step.
        mean, deviation: of the losses before it.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    mean: float | None
    deviation: float | None


class SpikeReport(SkippedStep):
    """Loss-spike report of a step.

    Attributes:
        suspects: ids of the attributed documents, highest loss first.
        documents: all documents in the same order, with their origin and quality; NaN
            and Inf come first, as null.
    """

    suspects: list[str]
    documents: list[JsonObject]


def examine(
    step: SkippedStep,
    documents: Sequence[ReadDocument],
    origins: Origins = MappingProxyType({}),
) -> SpikeReport:
    """Create the loss-spike report of a step.

    Args:
        step: its figures.
        documents: from Objective.blame.
        origins: their origin and quality, by id.
    """
    # NaN and Inf first
    ordered = sorted(
        documents,
        key=lambda document: (
            -document["loss"] if math.isfinite(document["loss"]) else -math.inf,
            document["id"],
        ),
    )
    # At least one document is attributed, and never all for their rank alone.
    losses = [document["loss"] for document in ordered]
    attributed = sum(not math.isfinite(loss) for loss in losses)
    if not attributed and len(losses) > 1:
        threshold = fmean(losses) + SUSPICIOUS_DEVIATIONS * stdev(losses)
        attributed = sum(loss > threshold for loss in losses)
    suspects = list(
        dict.fromkeys(document["id"] for document in ordered[: max(1, attributed)])
    )
    listed = [
        {
            **document,
            "loss": document["loss"] if math.isfinite(document["loss"]) else None,
            **origins.get(document["id"], {}),
        }
        for document in ordered
    ]
    return {**step, "suspects": suspects, "documents": listed}


def write_spike_report(folder: Path, report: SpikeReport) -> None:
    """Write a loss-spike report, and update the list of attributed documents."""
    write_text(
        folder / f"step-{report['step']}.json",
        json.dumps(report, ensure_ascii=False, indent=1),
    )
    write_exclusion(folder)


def write_exclusion(folder: Path) -> None:
    """Collect the attributed documents of all loss-spike reports in a folder."""
    suspects = sorted(
        {
            document_id
            for path in folder.glob("step-*.json")
            for document_id in read_json(path)["suspects"]
        }
    )
    write_text(folder / EXCLUDE, "".join(f"{suspect}\n" for suspect in suspects))


def forget_after(folder: Path, step: int) -> None:
    """Remove reports that a training resumed from `step` writes again."""
    if not folder.exists():
        return
    for path in folder.glob("step-*.json"):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()
    write_exclusion(folder)
