"""`sft`: fine-tunes a model on conversations."""

from __future__ import annotations

from gristmill.flows.stages.stage import (
    Configured,
    only,
)
from gristmill.flows.stages.trainings import torchrun_stage, whole
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.schema.posttraining import Tuning


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the settings that determine the training on packed examples."""
    configured = part_of_section(manifest, verify, of_data=False)
    if configured is None:
        return None
    recipe, arguments = configured
    distill = recipe.pop("distill")
    if distill is None:
        return recipe, arguments
    # The output of the stage `teacher` identifies the teacher.
    mixing = {key: distill[key] for key in ("kind", "beta", "weight")}
    return {**recipe, "distill": mixing}, {**arguments, "distill": distill}


def part_of_section(
    manifest: Manifest, verify: bool, of_data: bool
) -> Configured | None:
    """Return the keys of the section `sft` that its data, or its training, depend on."""
    from gristmill.mixtures.schema.posttraining import SftData

    configured = whole("sft")(manifest, verify)
    if configured is None:
        return None
    recipe, arguments = (
        {
            key: value
            for key, value in part.items()
            if key == "seed" or (key in SftData.model_fields) == of_data
        }
        for part in configured
    )
    return recipe, arguments


STAGE = torchrun_stage(
    "sft",
    7,
    configure,
    only("tokenizer", "mix", "sft_data", "model", "pretrain", "merge", "teacher"),
    training=Tuning,
    row_kind="examples",
    output="model",
)
