"""`reference`: computes the log-probabilities of the answers under the model from which
preferences are learned.
"""

from __future__ import annotations

from gristmill.flows.stages.stage import (
    Configured,
)
from gristmill.flows.stages.trainings import model_before, torchrun_stage
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.manifest import Manifest


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the settings that determine the starting model's log-probabilities,
    besides model and answers.
    """
    section = manifest.dpo
    if section is None:
        return None
    # The size of a forward pass does not change results, and this stage does not
    # compute losses.
    settings: Recipe = {}
    if section.lora is not None and section.lora.base is not None:
        settings["rounded"] = {
            "base": section.lora.base,
            "targets": section.lora.targets,
        }
    return {"precision": section.precision, **settings}, {
        "micro_batch_size": section.micro_batch_size
    }


def needs(manifest: Manifest) -> list[str]:
    """Return the answers, and the model from which preferences are learned."""
    return ["dpo_data", model_before("dpo", manifest)]


STAGE = torchrun_stage("reference", 2, configure, needs)
