"""`dpo`: learns preferences between answers."""

from __future__ import annotations

from gristmill.flows.stages import reference
from gristmill.flows.stages.trainings import torchrun_stage, whole
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.posttraining import Dpo


def needs(manifest: Manifest) -> list[str]:
    """Return what the reference needs, its log-probabilities of the answers, and
    held-out text.
    """
    return ["tokenizer", "mix", *reference.needs(manifest), "reference"]


STAGE = torchrun_stage(
    "dpo",
    8,
    whole("dpo"),
    needs,
    training=Dpo,
    row_kind="examples",
    output="model",
    report=("gristmill.flows.report.finetuning:preference_effects",),
)
