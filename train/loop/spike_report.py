"""Loss-spike reports: documents of a skipped step, ordered by loss, as HTML, as JSON,
and as a list to exclude.

    autopsies/step-120.json   the step, the statistics of its window, and its documents,
                              highest loss first: loss, source, place, and for
                              pre-training their origin and quality
    autopsies/step-120.html   the same as a self-contained page
    autopsies/exclude.txt     ids of the attributed documents of all reports, one
                              hexadecimal id per line

After a rollback (`rollback.py`) the same step may be skipped again with other rows:
its files are named step-120-r1 after one rollback.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

from gristmill.core.files import read_json, write_text
from gristmill.tokenize.row_provenance import KNOWN
from gristmill.train.loop.objective import ReadDocument

ORIGIN = "where from, how judged"
AUTOPSIES = "autopsies"
EXCLUDE = "exclude.txt"
SUSPICIOUS_DEVIATIONS = 2.0
"""Documents are attributed from this many standard deviations above the batch mean: one
in forty if losses are normal.
"""

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to text."""
Known = Callable[[Sequence[str]], Mapping[str, Mapping[str, object]]]
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
    documents: list[dict[str, object]]


def examine(
    step: SkippedStep,
    documents: Sequence[ReadDocument],
    origins: Mapping[str, Mapping[str, object]] = MappingProxyType({}),
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
        mean = math.fsum(losses) / len(losses)
        deviation = math.sqrt(
            math.fsum((loss - mean) ** 2 for loss in losses) / (len(losses) - 1)
        )
        threshold = mean + SUSPICIOUS_DEVIATIONS * deviation
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


def write_spike_report(folder: Path, report: SpikeReport, rollbacks: int = 0) -> None:
    """Write a loss-spike report, and update the list of attributed documents."""
    name = f"step-{report['step']}" + (f"-r{rollbacks}" if rollbacks else "")
    text = json.dumps(report, ensure_ascii=False, indent=1)
    write_text(folder / f"{name}.json", text)
    write_text(folder / f"{name}.html", as_page(report))
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


def forget_after(folder: Path, step: int, rollbacks: int = 0) -> None:
    """Remove reports that a training resumed from `step`, after `rollbacks` rollbacks,
    writes again.
    """
    if not folder.exists():
        return
    for path in folder.glob("step-*.*"):
        report_step, _, report_rollbacks = path.stem.removeprefix("step-").partition(
            "-r"
        )
        if (int(report_rollbacks or 0), int(report_step)) > (rollbacks, step):
            path.unlink()
    write_exclusion(folder)


def as_page(report: SpikeReport) -> str:
    """Self-contained HTML page of a loss-spike report (spike_report.html.jinja escapes
    every value).
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["shown"] = _number
    documents = []
    for document in report["documents"]:
        # Loss first, origin as one column, text last.
        columns = {"loss": document["loss"]} | {
            key: value for key, value in document.items() if key not in (*KNOWN, "text")
        }
        origin = describe_origin(document)
        if origin:
            columns[ORIGIN] = origin
        if "text" in document:
            columns["text"] = document["text"]
        documents.append(columns)
    figures = [
        ("loss", _number(report["loss"])),
        ("gradient norm", _number(report["grad_norm"])),
        ("mean of the window", _number(report["mean"])),
        ("its deviation", _number(report["deviation"])),
    ]
    return templates.get_template("spike_report.html.jinja").render(
        step=report["step"],
        known=figures,
        documents=documents,
        suspects=set(report["suspects"]),
        exclude=EXCLUDE,
        columns=list(dict.fromkeys(key for document in documents for key in document)),
    )


def describe_origin(document: Mapping[str, Any]) -> str:
    """Origin and quality of a document as one line (see `row_provenance.KNOWN`)."""
    parts = [
        str(document.get("url") or document.get("locator") or ""),
        str(document.get("language") or ""),
    ]
    parts += [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in document.get("quality", {}).items()
    ]
    if document.get("cluster_size", 1) > 1:
        parts.append(f"cluster {document['cluster'][:8]} of {document['cluster_size']}")
    return " · ".join(part for part in parts if part)


def _number(value: float | None) -> str:
    if value is None:
        return "NaN or Inf"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
