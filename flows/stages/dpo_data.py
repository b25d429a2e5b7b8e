"""`dpo_data`: encodes pairs of answers, and audits them."""

from __future__ import annotations

from gristmill.flows.stages import decontaminate
from gristmill.flows.stages.sections import step_recipe, without
from gristmill.flows.stages.stage import Recipe, Stage
from gristmill.flows.stages.trainings import data_needs, made_sets, whole
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.steps.decontaminate import Decontaminate


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """What the encoded pairs, and their audit, depend on."""
    from gristmill.mixtures.posttraining import DpoData

    dpo = whole("dpo")(manifest, verify)
    if dpo is None:
        return None
    recipe, told = ({key: part[key] for key in DpoData.model_fields if key in part} for part in dpo)
    leaks = _leaks(manifest)
    named, config = (None, None) if leaks is None else step_recipe(decontaminate.STAGE, leaks, manifest, verify)
    # How often a set is read is none of this stage's.
    return (
        {**recipe, "data": [without(item, "weight") for item in recipe["data"]], "leaks": named},
        {**told, "data": [without(item, "weight") for item in told["data"]], "leaks": config},
    )


def _leaks(manifest: Manifest) -> Decontaminate | None:
    """The evaluation sets that preferences are compared with: their own, or those of the documents."""
    if manifest.dpo is not None and manifest.dpo.leaks is not None:
        return manifest.dpo.leaks
    return next((step.config for step in manifest.prepare if isinstance(step.config, Decontaminate)), None)


def needs(manifest: Manifest) -> list[str]:
    """The pairs as they were prepared, and what says how they are encoded."""
    return ["dpo_prepare", *made_sets(manifest.dpo), *data_needs(manifest)]


STAGE = Stage(
    "dpo_data",
    7,
    "gristmill.train.stages.dpo_data:run",
    configure,
    needs,
    report=("gristmill.flows.report.finetuning:preferences",),
)
