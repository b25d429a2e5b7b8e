"""`edit`: a user's function changes texts."""

from __future__ import annotations

from gristmill.flows.stages.annotate import preflight
from gristmill.flows.stages.stage import PrepareStep, Stage
from gristmill.mixtures.steps.own_steps import Edit

STAGE = Stage(
    "edit",
    2,
    "gristmill.dataprep.user_code.edit:run",
    preflight=preflight,
    step=PrepareStep(
        Edit, columns=lambda section: ["edits", "bytes_removed", "bytes_added"]
    ),
    report=(
        "gristmill.flows.report.document_sections:edits",
        "gristmill.flows.report.document_sections:own_code",
    ),
)
