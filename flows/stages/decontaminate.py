"""`decontaminate`: drops documents with text of evaluation sets, or cuts it out."""

from __future__ import annotations

from gristmill.flows.stages.stage import PrepareStep, Stage
from gristmill.mixtures.steps.decontaminate import Decontaminate

STAGE = Stage(
    "decontaminate",
    4,
    "gristmill.dataprep.decontamination.decontaminate:run",
    step=PrepareStep(
        Decontaminate,
        columns=lambda section: [
            "contamination",
            "contamination_words",
            "contaminated_item",
            "left_words",
            "edits",
        ],
        rules="gristmill.dataprep.decontamination.decontaminate:rules",
    ),
    report=("gristmill.flows.report.document_sections:contamination",),
)
