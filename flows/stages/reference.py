"""`reference`: asks the model that preferences are learned from how likely it finds the answers."""

from __future__ import annotations

from gristmill.flows.stages.stage import Recipe
from gristmill.flows.stages.trainings import model_before, training
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """What the starting model's log-probabilities depend on besides it and the answers."""
    section = manifest.dpo
    if section is None:
        return None
    # The size of a forward pass is how the work is done. What a loss makes of the numbers is none of this stage's.
    # Single answers are other work than pairs; all other losses share one recipe.
    told: Recipe = {"answers": True} if section.loss == "kto" else {}
    if section.lora is not None and section.lora.base is not None:
        told["rounded"] = {"base": section.lora.base, "targets": section.lora.targets}
    return {"precision": section.precision, **told}, {"micro_batch_size": section.micro_batch_size}


def needs(manifest: Manifest) -> list[str]:
    """The answers, and the model that preferences are learned from."""
    return ["dpo_data", model_before("dpo", manifest)]


STAGE = training("reference", 2, configure, needs)
