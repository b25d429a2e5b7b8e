"""`quality`: scores documents by a classifier, by perplexity or by heuristics, and drops the worst."""

from __future__ import annotations

from gristmill.flows.stages.stage import Stage
from gristmill.mixtures.steps.quality import Quality

STAGE = Stage(
    "quality", 4, "gristmill.dataprep.judges.quality:run", section=Quality,
    columns=lambda section: [*section.scores, "perplexity_bucket"],
    report=("gristmill.flows.report.document_sections:quality",))
