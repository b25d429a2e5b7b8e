"""Documents read by a training's skipped steps, with the origin, language, quality and
cluster of each.

A spike report holds the facts known when it was written; the others are read from the
committed outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from gristmill.core.files import read_json
from gristmill.core.store import StageFolder


def spike_reports(folder: StageFolder) -> list[dict[str, Any]]:
    """Return the loss-spike reports of a training in step order; see
    gristmill.train.loop.spike_report.
    """
    reports = [
        read_json(path)
        for path in sorted((folder.data / "autopsies").glob("step-*.json"))
    ]
    return sorted(reports, key=lambda report: int(report["step"]))


def with_origins(
    reports: list[dict[str, Any]], mix: Path, inputs: Mapping[str, Path]
) -> list[dict[str, Any]]:
    """Add to a pre-training's spike reports everything that earlier stages know of the
    attributed documents.

    Args:
        reports: those of `spike_reports`.
        mix: the packed set that the training read.
        inputs: committed data folders by stage, including `ingest`.
    """
    suspects = {document for report in reports for document in report["suspects"]}
    if not suspects:
        return reports
    from gristmill.tokenize.packed import PackedSet
    from gristmill.tokenize.row_provenance import known_of

    with closing(PackedSet(mix)) as packed:
        origins = known_of(packed, inputs, suspects)
    return [
        {
            **report,
            "documents": [
                {**document, **origins.get(document["id"], {})}
                for document in report["documents"]
            ],
        }
        for report in reports
    ]
