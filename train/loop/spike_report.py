"""Loss-spike reports: documents of a skipped step, ordered by loss, as HTML, as JSON,
and as a list to exclude.

    autopsies/step-120.json   the step, the statistics of its window, and its documents,
    highest loss first: loss,
                              source, place, and for pre-training their origin and
                              quality
    autopsies/step-120.html   the same as a self-contained page autopsies/exclude.txt
    ids of the attributed documents of all reports, one hexadecimal id per line

After a rollback (see rollback.py) the same step may be skipped again with other rows:
its files are named step-120-r1 after one rollback.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.core.files import atomic_write, read_json
from gristmill.tokenize.row_provenance import KNOWN

ORIGIN = "where from, how judged"
AUTOPSIES, EXCLUDE = "autopsies", "exclude.txt"
SUSPICIOUS_DEVIATIONS = 2.0
"""Documents are attributed from this many standard deviations above the batch mean: one
in forty if losses are normal.
"""


def examine(
    step: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Create the loss-spike report of a step.

    Args:
        step: `step`, `loss`, `grad_norm`, and the window's `mean` and `deviation` (None
            for an empty window).
        documents: from Objective.blame.

    Returns:
        the step with `documents` (highest loss first; NaN and Inf come first, as null)
        and `suspects`, ids in the same order.
    """
    ordered = sorted(
        documents, key=lambda document: (-_badness(document["loss"]), document["id"])
    )
    suspects = list(
        dict.fromkeys(
            document["id"] for document in ordered[: _count_attributed(ordered)]
        )
    )
    listed = [
        {
            **document,
            "loss": document["loss"] if math.isfinite(document["loss"]) else None,
        }
        for document in ordered
    ]
    return {**step, "suspects": suspects, "documents": listed}


def write_spike_report(
    folder: Path, found: Mapping[str, Any], rollbacks: int = 0
) -> None:
    """Write a loss-spike report, and update the list of attributed documents."""
    name = f"step-{found['step']}" + (f"-r{rollbacks}" if rollbacks else "")
    for suffix, content in (
        (".json", json.dumps(found, ensure_ascii=False, indent=1)),
        (".html", as_page(found)),
    ):
        with atomic_write(folder / f"{name}{suffix}") as sink:
            sink.write(content.encode())
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
    with atomic_write(folder / EXCLUDE) as sink:
        sink.write("".join(f"{document_id}\n" for document_id in suspects).encode())


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


def as_page(found: Mapping[str, Any]) -> str:
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
    documents = [_shown(document) for document in found["documents"]]
    figures = [
        (name, _number(found.get(key)))
        for name, key in (
            ("loss", "loss"),
            ("gradient norm", "grad_norm"),
            ("mean of the window", "mean"),
            ("its deviation", "deviation"),
        )
    ]
    return templates.get_template("spike_report.html.jinja").render(
        step=found["step"],
        known=figures,
        documents=documents,
        suspects=set(found["suspects"]),
        exclude=EXCLUDE,
        columns=list(dict.fromkeys(key for document in documents for key in document)),
    )


def describe_origin(one: Mapping[str, Any]) -> str:
    """Origin and quality of a document as one line (see tokenize.origins.KNOWN)."""
    parts = [
        str(one.get("url") or one.get("locator") or ""),
        str(one.get("language") or ""),
    ]
    parts += [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in one.get("quality", {}).items()
    ]
    if one.get("cluster_size", 1) > 1:
        parts.append(f"cluster {one['cluster'][:8]} of {one['cluster_size']}")
    return " · ".join(part for part in parts if part)


def _shown(document: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a document: loss first, origin as one column, text last."""
    last = {"text": document["text"]} if "text" in document else {}
    origin = {ORIGIN: described} if (described := describe_origin(document)) else {}
    return {
        "loss": document["loss"],
        **{
            key: value for key, value in document.items() if key not in (*KNOWN, "text")
        },
        **origin,
        **last,
    }


def _number(value: float | None) -> str:
    return (
        "NaN or Inf"
        if value is None
        else f"{value:,}"
        if isinstance(value, int)
        else f"{value:.4g}"
    )


def _badness(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _count_attributed(ordered: Sequence[Mapping[str, Any]]) -> int:
    """Number of attributed documents, highest loss first: at least one, and never all
    for their rank alone.
    """
    losses = [document["loss"] for document in ordered]
    unknown = sum(not math.isfinite(loss) for loss in losses)
    if unknown or len(losses) < 2:
        return unknown or len(losses)
    mean = math.fsum(losses) / len(losses)
    deviation = math.sqrt(
        math.fsum((loss - mean) ** 2 for loss in losses) / (len(losses) - 1)
    )
    return max(
        1, sum(loss > mean + SUSPICIOUS_DEVIATIONS * deviation for loss in losses)
    )
