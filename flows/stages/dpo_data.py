"""`dpo_data`: encodes pairs of answers, and audits them."""

from __future__ import annotations

from gristmill.flows.stages import decontaminate
from gristmill.flows.stages.sections import step_recipe, without
from gristmill.flows.stages.stage import (
    Configured,
    Stage,
)
from gristmill.flows.stages.trainings import data_needs, made_sets, whole
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.decontaminate import Decontaminate


def configure(manifest: Manifest, verify: bool) -> Configured | None:
    """Return the settings that determine the encoded pairs and their audit."""
    from gristmill.mixtures.schema.posttraining import DpoData

    dpo = whole("dpo")(manifest, verify)
    if dpo is None:
        return None
    recipe, arguments = (
        {key: part[key] for key in DpoData.model_fields if key in part} for part in dpo
    )
    leaks = None if manifest.dpo is None else manifest.dpo.leaks
    if leaks is None:  # the evaluation sets of the documents
        leaks = next(
            (
                step.config
                for step in manifest.prepare
                if isinstance(step.config, Decontaminate)
            ),
            None,
        )
    leaks_recipe: Recipe | None = None
    leaks_settings: Recipe | None = None
    if leaks is not None:
        leaks_recipe, leaks_settings = step_recipe(
            decontaminate.STAGE, leaks, manifest, verify
        )
    # This stage ignores the weights of sets.
    return (
        {
            **recipe,
            "data": [without(item, "weight") for item in recipe["data"]],
            "leaks": leaks_recipe,
        },
        {
            **arguments,
            "data": [without(item, "weight") for item in arguments["data"]],
            "leaks": leaks_settings,
        },
    )


def needs(manifest: Manifest) -> list[str]:
    """Return the stages of the prepared pairs, and of what determines their
    encoding.
    """
    return ["dpo_prepare", *made_sets(manifest.dpo), *data_needs(manifest)]


STAGE = Stage(
    "dpo_data",
    9,
    "gristmill.train.stages.dpo_data:run",
    configure,
    needs,
    report=("gristmill.flows.report.finetuning:preferences",),
)
