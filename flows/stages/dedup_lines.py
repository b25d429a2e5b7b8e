"""`dedup_lines`: removes lines that many documents share."""

from __future__ import annotations

from gristmill.flows.stages.stage import PrepareStep, Stage
from gristmill.mixtures.steps.dedup import DedupLines

STAGE = Stage(
    "dedup_lines",
    1,
    "gristmill.dataprep.dedup.lines:run",
    step=PrepareStep(
        DedupLines,
        columns=lambda section: ["lines_removed", "removed_line_ratio", "edits"],
    ),
    report=("gristmill.flows.report.document_sections:repeated_lines",),
)
