"""`opt_outs`: drops documents whose publishers reserve their use for training."""

from __future__ import annotations

from gristmill.flows.stages.stage import PrepareStep, Stage
from gristmill.mixtures.steps.opt_outs import OPT_OUT_RULES, OptOuts

STAGE = Stage(
    "opt_outs",
    1,
    "gristmill.dataprep.opt_outs.opt_outs:run",
    step=PrepareStep(
        OptOuts,
        columns=lambda section: OPT_OUT_RULES,
        rules="gristmill.dataprep.opt_outs.replayed_rules:rules",
        intended_losses=lambda section: [("domain", rule) for rule in OPT_OUT_RULES],
    ),
    report=("gristmill.flows.report.document_sections:opt_outs",),
)
