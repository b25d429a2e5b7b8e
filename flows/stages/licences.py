"""`licences`: recognises the licence of each document, and drops licences that are not
allowed.
"""

from __future__ import annotations

from gristmill.flows.stages.stage import PrepareStep, Stage
from gristmill.mixtures.steps.licences import Licences

STAGE = Stage(
    "licences",
    1,
    "gristmill.dataprep.licences.licences:run",
    step=PrepareStep(Licences, lambda section: ["spdx", "spdx_by"]),
    report=("gristmill.flows.report.document_sections:licences",),
)
