"""What a skipped step had read, ordered by loss: for people (HTML), for programs (JSON), and as a list to exclude.

    autopsies/step-120.json   the step, the window that it was judged by, its documents from the worst one on: loss,
                              source, place, and for pre-training where they are from and how they were judged
    autopsies/step-120.html   the same as a page that needs nothing else
    autopsies/exclude.txt     ids of the attributed documents of all reports, one hexadecimal id per line

After the training went back (see rollback.py) the same step may be skipped again, with other rows: the names of those
are step-120-r1 after one rollback.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gristmill.dataprep.files import atomic_write, read_json
from gristmill.tokenize.origins import KNOWN

ORIGIN = "where from, how judged"
AUTOPSIES, EXCLUDE = "autopsies", "exclude.txt"
SUSPICIOUS_DEVIATIONS = 2.0
"""A document is attributed from so many deviations over the batch's mean on: one in forty where losses are normal."""


def examine(step: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The loss-spike report of one step.

    Args:
        step: `step`, `loss`, `grad_norm`, and the window's `mean` and `deviation` (None where there is none).
        documents: as from Objective.blame.

    Returns:
        the step with `documents` (worst first; a loss that is NaN or Inf is the worst, and written as null) and
        `suspects`, ids in the same order.
    """
    ordered = sorted(documents, key=lambda one: (-_badness(one["loss"]), one["id"]))
    suspects = list(dict.fromkeys(one["id"] for one in ordered[: _count_attributed(ordered)]))
    listed = [{**one, "loss": one["loss"] if math.isfinite(one["loss"]) else None} for one in ordered]
    return {**step, "suspects": suspects, "documents": listed}


def write_spike_report(folder: Path, found: Mapping[str, Any], rollbacks: int = 0) -> None:
    """Write a loss-spike report into the folder, and the list of all attributed documents again."""
    name = f"step-{found['step']}" + (f"-r{rollbacks}" if rollbacks else "")
    for suffix, content in ((".json", json.dumps(found, ensure_ascii=False, indent=1)), (".html", as_page(found))):
        with atomic_write(folder / f"{name}{suffix}") as sink:
            sink.write(content.encode())
    write_exclusion(folder)


def write_exclusion(folder: Path) -> None:
    """Collect the attributed documents of all loss-spike reports in a folder."""
    suspects = sorted({one for path in folder.glob("step-*.json") for one in read_json(path)["suspects"]})
    with atomic_write(folder / EXCLUDE) as sink:
        sink.write("".join(f"{one}\n" for one in suspects).encode())


def forget_after(folder: Path, step: int, rollbacks: int = 0) -> None:
    """Remove what a training that resumes from `step`, after so many rollbacks, writes again."""
    if not folder.exists():
        return
    for path in folder.glob("step-*.*"):
        found, _, after = path.stem.removeprefix("step-").partition("-r")
        if (int(after or 0), int(found)) > (rollbacks, step):
            path.unlink()
    write_exclusion(folder)


def as_page(found: Mapping[str, Any]) -> str:
    """A loss-spike report as a page of HTML that needs nothing else (spike_report.html.jinja escapes every value)."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["shown"] = _number
    documents = [_shown(one) for one in found["documents"]]
    known = [
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
        known=known,
        documents=documents,
        suspects=set(found["suspects"]),
        exclude=EXCLUDE,
        columns=list(dict.fromkeys(key for one in documents for key in one)),
    )


def describe_origin(one: Mapping[str, Any]) -> str:
    """One line: where a document is from and how it was judged (see tokenize.origins.KNOWN)."""
    parts = [str(one.get("url") or one.get("locator") or ""), str(one.get("language") or "")]
    parts += [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in one.get("quality", {}).items()
    ]
    if one.get("cluster_size", 1) > 1:
        parts.append(f"cluster {one['cluster'][:8]} of {one['cluster_size']}")
    return " · ".join(part for part in parts if part)


def _shown(one: Mapping[str, Any]) -> dict[str, Any]:
    """A document's columns: its loss first, where it is from in one, its text last."""
    last = {"text": one["text"]} if "text" in one else {}
    origin = {ORIGIN: described} if (described := describe_origin(one)) else {}
    return {
        "loss": one["loss"],
        **{key: value for key, value in one.items() if key not in (*KNOWN, "text")},
        **origin,
        **last,
    }


def _number(value: float | None) -> str:
    return "NaN or Inf" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _badness(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _count_attributed(ordered: Sequence[Mapping[str, Any]]) -> int:
    """How many of the documents, worst first, are attributed: never all of them for their place alone, at least one."""
    losses = [one["loss"] for one in ordered]
    unknown = sum(not math.isfinite(loss) for loss in losses)
    if unknown or len(losses) < 2:
        return unknown or len(losses)
    mean = math.fsum(losses) / len(losses)
    deviation = math.sqrt(math.fsum((loss - mean) ** 2 for loss in losses) / (len(losses) - 1))
    return max(1, sum(loss > mean + SUSPICIOUS_DEVIATIONS * deviation for loss in losses))
