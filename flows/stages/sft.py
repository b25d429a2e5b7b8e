"""`sft`: fine-tunes a model on conversations."""

from __future__ import annotations

from collections.abc import Callable

from gristmill.flows.stages.sections import reads_of
from gristmill.flows.stages.stage import Recipe, only
from gristmill.flows.stages.trainings import training, whole
from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.posttraining import Tuning


def configure(manifest: Manifest, verify: bool) -> tuple[Recipe, Recipe] | None:
    """What the training on packed examples depends on besides them."""
    found = part_of_section(manifest, verify, lambda key, of_data: not of_data or key == "seed")
    if found is None:
        return None
    recipe, told = found
    if recipe["ewc"] is not None:
        recipe |= reads_of(manifest)
    distill = recipe.pop("distill")
    if distill is None:
        return recipe, told
    # The teacher is what the stage of that name made of it.
    mixed = {key: distill[key] for key in ("kind", "beta", "weight")}
    return {**recipe, "distill": mixed}, {**told, "distill": distill}


def part_of_section(
    manifest: Manifest, verify: bool, is_wanted: Callable[[str, bool], bool]
) -> tuple[Recipe, Recipe] | None:
    """The keys of the section `sft` that its data, or its training, depends on.

    Args:
        is_wanted: (key, whether it is one of the data's) -> whether it is.
    """
    from gristmill.mixtures.posttraining import SftData

    found = whole("sft")(manifest, verify)
    if found is None:
        return None
    recipe, told = (
        {key: value for key, value in part.items() if is_wanted(key, key in SftData.model_fields)} for part in found
    )
    return recipe, told


STAGE = training(
    "sft",
    6,
    configure,
    only("tokenizer", "mix", "sft_data", "model", "pretrain", "merge", "teacher"),
    trained=Tuning,
    rows="examples",
    makes_model=True,
    details="gristmill.flows.report.training:teaching_details",
)
