"""`canaries`: inserts made-up secrets, to measure what a model memorises."""

from __future__ import annotations

from gristmill.flows.stages.stage import PrepareStep, Stage
from gristmill.mixtures.steps.canaries import Canaries

STAGE = Stage(
    "canaries",
    1,
    "gristmill.dataprep.cleaning.canaries:run",
    step=PrepareStep(Canaries, columns=lambda section: ["edits", "canary_copies"]),
)
