"""`edit`: a user's function changes texts."""

from __future__ import annotations

from gristmill.flows.stages.annotate import preflight
from gristmill.flows.stages.stage import Stage
from gristmill.mixtures.steps.own_steps import Edit

STAGE = Stage(
    "edit",
    1,
    "gristmill.dataprep.user_code.edit:run",
    section=Edit,
    columns=lambda section: ["edits", "bytes_removed", "bytes_added"],
    preflight=preflight,
    report=(
        "gristmill.flows.report.document_sections:edits",
        "gristmill.flows.report.document_sections:own_code",
    ),
)
